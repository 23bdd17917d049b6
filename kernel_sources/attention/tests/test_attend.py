"""attend against the same computation in fp64: outputs, appended rows, untouched rows."""

import attention_cases as cases
import pytest
import torch
from _common.buffers import Guarded, gapped_copy, offset_copy
from _common.tolerance import assert_accurate, assert_bitwise

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SETTINGS = (
    dict(dim=128, heads=8, kv_heads=2, norm="head"),
    dict(dim=64, heads=16, kv_heads=1, norm="all"),
    dict(dim=80, heads=4, kv_heads=4, rotary="interleaved", soft_cap=5.0),
    dict(dim=256, heads=6, kv_heads=2, rotary_dim=64, window=300),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", cases.CASES, ids=str)
def test_values(attention, device, case, dtype):
    arguments = cases.inputs(case, dtype, device)
    before = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    out = Guarded(arguments["q"].shape, dtype, device)
    result = attention.attend(**arguments, out=out.view)
    assert result is out.view
    out.assert_intact()
    (exact, exact_keys), (eager, eager_keys) = cases.exact_and_eager(arguments | before, dtype)
    cases.assert_no_nan(result)
    cases.assert_near(result.cpu(), exact, eager)

    for b, length in enumerate(case.lengths):
        new = slice(length, length + case.tokens)
        appended = arguments["k_cache"][b, :, new].transpose(0, 1)
        cases.assert_near(appended.cpu(), exact_keys[b], eager_keys[b])
        assert_bitwise(arguments["v_cache"][b, :, new].transpose(0, 1), arguments["v"][b])
        for name, cache in before.items():
            cache[b, :, new] = arguments[name][b, :, new]
    for name, cache in before.items():
        assert_bitwise(arguments[name], cache)


def test_poisoned_slots_are_really_needed(attention, device):
    """The NaN that test_values puts behind the live rows does reach the result of a longer call."""
    arguments = cases.inputs(cases.Case(lengths=(100,)), torch.bfloat16, device)
    arguments["lengths"] += 1
    assert cases.call(attention, arguments).isnan().all()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("lengths,tokens,slots", cases.ROWS_OF_MANY_LENGTHS)
def test_bits_of_a_row_are_its_own(attention, device, settings, lengths, tokens, slots):
    case = cases.Case(lengths=lengths, tokens=tokens, slots=slots, **settings)
    arguments = cases.inputs(case, torch.bfloat16, device)
    together = cases.assert_rows_alone(attention, arguments)
    order = torch.arange(len(lengths) - 1, -1, -1, device=device)
    moved = {
        name: arguments[name][order] for name in ("q", "k", "v", "k_cache", "v_cache", "lengths")
    }
    assert_bitwise(attention.attend(**(arguments | moved)), together[order])


@pytest.mark.parametrize("dim", [64, 48])
def test_layouts(attention, device, dim):
    """Slices of a fused projection, odd addresses, strided caches, an output without alignment."""
    case = cases.Case(lengths=(20, 33), tokens=2, dim=dim, norm="head")
    arguments = cases.inputs(case, torch.bfloat16, device)
    expected = cases.call(attention, arguments)

    fused = torch.cat([arguments[name] for name in "qkv"], dim=2)
    q, k, v = fused.split([case.heads, case.kv_heads, case.kv_heads], dim=2)
    assert_bitwise(cases.call(attention, arguments, q=q, k=k, v=v), expected)

    odd = {name: offset_copy(arguments[name]) for name in "qkv"}
    assert_bitwise(cases.call(attention, arguments, **odd), expected)
    gapped = {name: gapped_copy(arguments[name], 3) for name in "qkv"}
    assert_bitwise(cases.call(attention, arguments, **gapped), expected)
    out = Guarded(expected.shape, torch.bfloat16, device, offset=1)
    assert_bitwise(cases.call(attention, arguments, out=out.view), expected)
    out.assert_written()

    by_token = {
        name: arguments[name].transpose(1, 2).contiguous().transpose(1, 2)
        for name in ("k_cache", "v_cache")
    }
    actual = attention.attend(**(arguments | by_token))
    assert_bitwise(actual, expected)
    tables = {name: gapped_copy(arguments[name], 5) for name in ("cos", "sin")}
    assert_bitwise(cases.call(attention, arguments, **tables), expected)
    tables["sin"] = arguments["sin"]
    assert_bitwise(cases.call(attention, arguments, **tables), expected)


def test_one_table_for_all_sequences(attention, device):
    case = cases.Case(lengths=(50, 50), tokens=2, by_slot=False)
    arguments = cases.inputs(case, torch.bfloat16, device)
    expected = cases.call(attention, arguments)
    one = {name: arguments[name][:1] for name in ("cos", "sin")}
    assert_bitwise(cases.call(attention, arguments, **one), expected)


def test_token_by_token_equals_one_call(attention, device):
    """Rows appended by this call count as rows that the cache holds."""
    case = cases.Case(lengths=(126,), tokens=4, norm="head")
    arguments = cases.inputs(case, torch.float16, device)
    together = cases.call(attention, arguments)
    for t in range(case.tokens):
        new = {name: arguments[name][:, t : t + 1] for name in "qkv"}
        one = attention.attend(**(arguments | new | {"lengths": arguments["lengths"] + t}))
        torch.testing.assert_close(one, together[:, t : t + 1], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("shape", [(0, 1), (2, 0)])
def test_empty(attention, device, shape):
    arguments = cases.inputs(cases.Case(lengths=(1, 1)), torch.bfloat16, device)
    batch, tokens = shape
    new = {name: arguments[name][:batch, :1].expand(-1, 1, -1, -1)[:, :tokens] for name in "qkv"}
    caches = {name: arguments[name][:batch] for name in ("k_cache", "v_cache", "lengths")}
    before = arguments["k_cache"].clone()
    assert attention.attend(**(arguments | new | caches)).shape == (*shape, 4, 64)
    assert_bitwise(arguments["k_cache"], before)


def test_negative_scaling(attention, device):
    arguments = cases.inputs(cases.Case(), torch.bfloat16, device)
    arguments["scaling"] *= -1
    (exact, _), (eager, _) = cases.exact_and_eager(arguments, torch.bfloat16)
    assert_accurate(cases.call(attention, arguments).cpu(), exact, eager)


def test_large_scores(attention, device):
    """Scores far beyond exp's range: only the largest count."""
    arguments = cases.inputs(cases.Case(lengths=(150,), tokens=2), torch.bfloat16, device)
    arguments["scaling"] = 1000.0
    (exact, _), (eager, _) = cases.exact_and_eager(arguments, torch.bfloat16)
    actual = cases.call(attention, arguments).cpu()
    assert actual.isfinite().all()
    near = (actual.double() - exact).abs().amax(-1) < 0.05
    close_before = (eager.double() - exact).abs().amax(-1) < 0.05
    assert near.sum() >= close_before.sum() - 1, (near, close_before)
