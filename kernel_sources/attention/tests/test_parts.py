"""norm_rope and append: the parts of attend for any number of tokens."""

import attention_cases as cases
import pytest
import torch
from _common.buffers import Guarded, gapped_copy, offset_copy
from _common.tolerance import assert_bitwise

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROTATED = (
    cases.Case(lengths=(3, 9), tokens=5, by_slot=False),
    cases.Case(lengths=(3,), tokens=11, by_slot=False, norm="head", dim=128),
    cases.Case(lengths=(3,), tokens=2, by_slot=False, norm="all", dim=2, slots=8),
    cases.Case(lengths=(3,), tokens=3, by_slot=False, norm="all", dim=80, rotary="interleaved"),
    cases.Case(lengths=(0,), tokens=2, rotary=None, norm="head", zero_centered=True, dim=256),
    cases.Case(lengths=(0,), tokens=2, by_slot=False, rotary_dim=10, dim=34),
    cases.Case(lengths=(0,), tokens=1, by_slot=False, heads=3, kv_heads=1, dim=512, norm="head"),
    cases.Case(lengths=(0,), tokens=1, by_slot=False, heads=3, kv_heads=1, dim=640, norm="head"),
    cases.Case(lengths=(0,), tokens=1, rotary=None),
)
NAMES = (
    "q", "k", "cos", "sin", "rotary", "q_norm_weight", "k_norm_weight", "norm_eps",
    "norm_zero_centered", "norm_scope",
)  # fmt: skip


def arguments_of(case, dtype, device):
    made = cases.inputs(case, dtype, device)
    return {name: made[name] for name in NAMES if name in made}


def rotated(arguments, to):
    a = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    results = []
    for name in "qk":
        x, weight = a[name], a.get(f"{name}_norm_weight")
        out = torch.zeros(x.shape, dtype=to)
        for b in range(x.shape[0]):
            for t in range(x.shape[1]):
                out[b, t] = cases.norm_and_rotate(x[b, t], weight, a, 0, (b, t), to)
        results.append(out)
    return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ROTATED, ids=str)
def test_norm_rope(attention, device, case, dtype):
    arguments = arguments_of(case, dtype, device)
    outs = tuple(Guarded(arguments[name].shape, dtype, device) for name in "qk")
    results = attention.norm_rope(**arguments, out=tuple(out.view for out in outs))
    exact, eager = rotated(arguments, torch.float64), rotated(arguments, dtype)
    for i, out in enumerate(outs):
        out.assert_intact()
        assert results[i] is out.view
        cases.assert_near(results[i].cpu(), exact[i], eager[i])


def test_norm_rope_layouts(attention, device):
    case = cases.Case(lengths=(3, 9), tokens=5, by_slot=False, norm="head")
    arguments = arguments_of(case, torch.bfloat16, device)
    expected = attention.norm_rope(**arguments)
    for change in (offset_copy, lambda x: gapped_copy(x, 3), lambda x: gapped_copy(x, 8)):
        changed = {name: change(arguments[name]) for name in "qk"}
        for one, other in zip(attention.norm_rope(**(arguments | changed)), expected, strict=True):
            assert_bitwise(one, other)
    outs = tuple(Guarded(x.shape, torch.bfloat16, device, offset=1) for x in expected)
    attention.norm_rope(**arguments, out=tuple(out.view for out in outs))
    for out, other in zip(outs, expected, strict=True):
        out.assert_written()
        assert_bitwise(out.view, other)


@pytest.mark.parametrize("norm", [None, "head", "all"])
def test_norm_rope_equals_attend(attention, device, norm):
    """What attend stores is what norm_rope gives: prefill and decode fill one cache."""
    case = cases.Case(lengths=(3, 9), tokens=2, by_slot=False, norm=norm)
    arguments = cases.inputs(case, torch.bfloat16, device)
    attention.attend(**arguments)
    _, k = attention.norm_rope(**{name: arguments[name] for name in NAMES if name in arguments})
    for b, length in enumerate(case.lengths):
        stored = arguments["k_cache"][b, :, length : length + case.tokens].transpose(0, 1)
        assert_bitwise(stored, k[b])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim,gap", [(64, 0), (64, 1), (6, 0), (80, 3)])
def test_append(attention, device, dim, gap, dtype):
    lengths = torch.tensor([7, 0], dtype=torch.int32, device=device)
    k, v = (
        gapped_copy(cases.rows(2, 21, 3, dim, dtype=dtype, seed=seed).to(device), gap)
        for seed in (1, 2)
    )
    caches = [Guarded((2, 3, 28, dim), dtype, device, row_gap=gap) for _ in range(2)]
    for cache in caches:
        cache.view.fill_(-1.0)
    attention.append(k, v, caches[0].view, caches[1].view, lengths)
    for cache, new in zip(caches, (k, v), strict=True):
        expected = torch.full_like(cache.view, -1.0)
        expected[0, :, 7:28] = new[0].transpose(0, 1)
        expected[1, :, 0:21] = new[1].transpose(0, 1)
        assert_bitwise(cache.view, expected)
        cache.assert_intact()


def test_empty(attention, device):
    k = torch.ones(1, 0, 2, 64, device=device)
    cache = torch.ones(1, 2, 4, 64, device=device)
    lengths = torch.zeros(1, dtype=torch.int32, device=device)
    attention.append(k, k, cache, cache.clone(), lengths)
    assert bool((cache == 1).all())
    q_out, k_out = attention.norm_rope(k, k)
    assert q_out.shape == k_out.shape == k.shape


def test_workspace(attention, device):
    made = attention.workspace(2, 4, 32, 128, 1000, device)
    assert made.dtype == torch.uint8 and made.device.type == device
    assert not made.any()
    # counters, (m, l) of 8 splits of 256 rows, o of the same
    assert made.numel() == 4 * 4096 + 8 * 8 * 256 + 4 * 8 * 256 * 128
