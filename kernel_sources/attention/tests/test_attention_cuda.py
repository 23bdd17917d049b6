"""What only a GPU can show: how blocks share, graph replay, launch order, full caches."""

import attention_cases as cases
import pytest
import torch
from _common.family import replayed, write_late
from _common.tolerance import assert_bitwise


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
            alone = cases.one_row(attention, arguments, b, 0, slots=alone_slots)
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
