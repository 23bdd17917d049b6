"""What only a GPU can show: row invariance in bits, graph replay, launch order, full caches."""

import attention_cases as cases
import pytest
import torch
from _common.family import replayed, write_late
from _common.tolerance import assert_bitwise

SETTINGS = (
    dict(dim=128, heads=8, kv_heads=2, norm="head"),
    dict(dim=64, heads=16, kv_heads=1, norm="all"),
    dict(dim=80, heads=4, kv_heads=4, rotary="interleaved", soft_cap=5.0),
    dict(dim=256, heads=6, kv_heads=2, rotary_dim=64, window=300),
)


def one_row(attention, arguments, b, t, slots=None):
    """Token t of sequence b as a call of its own, the tokens before it already cached."""
    alone = {name: arguments[name][b : b + 1, t : t + 1] for name in "qkv"}
    for name in ("k_cache", "v_cache"):
        cache = arguments[name][b : b + 1]
        if slots is not None:
            longer = torch.full_like(cache, float("nan")).repeat(
                1, 1, 1 + slots // cache.shape[2], 1
            )
            longer[:, :, : cache.shape[2]] = cache
            cache = longer[:, :, :slots]
        alone[name] = cache
    if slots is not None and "cos" in arguments:
        rows = arguments["cos"].shape[0]
        for name in ("cos", "sin"):
            table = arguments[name].repeat(1 + slots // rows, 1)
            alone[name] = table[:slots]
    alone["lengths"] = arguments["lengths"][b : b + 1] + t
    return attention.attend(**(arguments | alone))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(
    "lengths,tokens,slots",
    [((5, 127, 126, 128), 2, 2100), ((1022,), 8, 2100), ((2040, 900), 4, 2100), ((0,) * 8, 1, 130)],
)
def test_bits_of_a_row_are_its_own(attention, cuda, settings, lengths, tokens, slots):
    case = cases.Case(lengths=lengths, tokens=tokens, slots=slots, **settings)
    arguments = cases.inputs(case, torch.bfloat16, cuda)
    together = attention.attend(**arguments)
    cases.assert_no_nan(together)
    for b in range(len(lengths)):
        for t in range(tokens):
            alone = one_row(attention, arguments, b, t)
            assert_bitwise(alone, together[b : b + 1, t : t + 1])
    last = tokens - 1
    longer = one_row(attention, arguments, 0, last, slots=32768)
    assert_bitwise(longer, together[:1, last:])
    order = torch.arange(len(lengths) - 1, -1, -1, device=cuda)
    moved = {
        name: arguments[name][order] for name in ("q", "k", "v", "k_cache", "v_cache", "lengths")
    }
    assert_bitwise(attention.attend(**(arguments | moved)), together[order])


@pytest.mark.parametrize("dim,window", [(128, None), (64, 300)])
@pytest.mark.parametrize("batch", [1, 2, 4, 8])
@pytest.mark.parametrize("slots", [1024, 2048, 4096])
def test_bits_do_not_depend_on_how_blocks_share(attention, cuda, batch, slots, dim, window):
    """Batches of 8 key heads take clusters of 8, 4 and 2 blocks, and blocks without clusters."""
    lengths = (1023, 300, 0, 900, 640, 127, 1, 511)[:batch]
    case = cases.Case(
        lengths=lengths, slots=slots, dim=dim, heads=32, kv_heads=8, norm="head", window=window
    )
    arguments = cases.inputs(case, torch.bfloat16, cuda)
    together = attention.attend(**arguments)
    cases.assert_no_nan(together)
    for b in range(batch):
        for alone_slots in (None, 32768):
            alone = one_row(attention, arguments, b, 0, slots=alone_slots)
            assert_bitwise(alone, together[b : b + 1])


@pytest.mark.parametrize("history_static", [False, True])
@pytest.mark.parametrize("length", [100, 3000])
def test_replay_equals_eager(attention, cuda, length, history_static):
    case = cases.Case(lengths=(length,), slots=4096, dim=128, heads=8, norm="head")
    arguments = cases.inputs(case, torch.bfloat16, cuda)
    scratch = attention.workspace(1, 1, 8, 128, 4096, cuda)
    shared = dict(history_static=history_static, workspace=scratch)
    expected = cases.call(attention, arguments)
    out, second = torch.empty_like(expected), torch.empty_like(expected)

    def chain():
        attention.attend(**arguments, **shared, out=out)
        attention.attend(**(arguments | {"q": out}), **shared, out=second)

    replayed(chain)
    assert_bitwise(out, expected)
    assert_bitwise(second, cases.call(attention, arguments | {"q": expected}))
    assert not scratch[:16384].any(), "counters must be zero between calls"


def test_one_workspace_for_calls_of_all_sizes(attention, cuda):
    scratch = attention.workspace(2, 4, 16, 256, 4096, cuda)
    scratch[16384:] = 0xFF
    for batch, tokens, dim in ((1, 1, 64), (2, 4, 256), (1, 1, 128), (2, 1, 64), (1, 8, 80)):
        case = cases.Case(lengths=(2500,) * batch, tokens=tokens, slots=4096, dim=dim, heads=16)
        arguments = cases.inputs(case, torch.bfloat16, cuda)
        expected = cases.call(attention, arguments)
        assert_bitwise(cases.call(attention, arguments, workspace=scratch), expected)


@pytest.mark.parametrize(
    "name", ["q", "k", "v", "k_cache", "v_cache", "lengths", "cos", "sin", "q_norm_weight"]
)
def test_everything_may_have_a_producer_in_flight(attention, cuda, name):
    case = cases.Case(lengths=(150,), norm="head", dim=128)
    arguments = cases.inputs(case, torch.bfloat16, cuda)
    expected = cases.call(attention, arguments)
    late = torch.zeros_like(arguments[name])
    scratch = attention.workspace(1, 1, 4, 128, 192, cuda)
    out = torch.empty_like(expected)
    torch.cuda.synchronize()
    write_late(late, arguments[name])
    attention.attend(**(arguments | {name: late}), workspace=scratch, out=out)
    assert_bitwise(out, expected)


@pytest.mark.parametrize("name", ["q", "k", "v", "cos", "sin"])
def test_only_history_is_static(attention, cuda, name):
    """With history_static, this token's tensors and a table by token may still be on their way."""
    case = cases.Case(lengths=(150,), norm="head", dim=128, by_slot=False)
    arguments = cases.inputs(case, torch.bfloat16, cuda)
    expected = cases.call(attention, arguments)
    late = torch.zeros_like(arguments[name])
    scratch = attention.workspace(1, 1, 4, 128, 192, cuda)
    out = torch.empty_like(expected)
    torch.cuda.synchronize()
    write_late(late, arguments[name])
    changed = arguments | {name: late}
    attention.attend(**changed, workspace=scratch, out=out, history_static=True)
    assert_bitwise(out, expected)


@pytest.mark.parametrize("length", [191, 192, 400, 2**31 - 1])
def test_tokens_past_the_last_slot_are_dropped(attention, cuda, length):
    arguments = cases.inputs(cases.Case(lengths=(100,), tokens=3), torch.bfloat16, cuda)
    arguments["lengths"].fill_(length)
    before = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    attention.attend(**arguments)
    attention.append(
        arguments["k"],
        arguments["v"],
        arguments["k_cache"],
        arguments["v_cache"],
        arguments["lengths"],
    )
    torch.cuda.synchronize()
    kept = slice(0, min(length, 192))
    for name, cache in before.items():
        assert_bitwise(arguments[name][:, :, kept], cache[:, :, kept])


def test_unaligned_cache(attention, cuda):
    arguments = cases.inputs(cases.Case(), torch.bfloat16, cuda)
    flat = torch.zeros(2 * 192 * 64 + 4, dtype=torch.bfloat16, device=cuda)
    arguments["k_cache"] = flat[4:].view(1, 2, 192, 64)
    with pytest.raises(RuntimeError, match="attend: k_cache must have rows on 16-byte boundaries"):
        attention.attend(**arguments)


def test_very_long_cache(attention, cuda):
    case = cases.Case(lengths=(32767,), slots=32768, dim=128, heads=8, norm="head")
    arguments = cases.inputs(case, torch.bfloat16, cuda)
    (exact, _), (eager, _) = cases.exact_and_eager(arguments, torch.bfloat16)
    cases.assert_near(attention.attend(**arguments).cpu(), exact, eager)
