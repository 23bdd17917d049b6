"""FP8 caches: what is stored, what it gives, and that the bits of a row stay its own."""

import dataclasses

import attention_cases as cases
import pytest
import torch
from _common.family import replayed, write_late
from _common.tolerance import assert_bitwise

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8 = torch.float8_e4m3fn
CASES = tuple(
    dataclasses.replace(case, scales="one" if index % 4 == 3 else "head")
    for index, case in enumerate(cases.CASES)
)


def in_fp8(x, scale):
    """``x [.., G, D]`` as a cache stores it."""
    return (x.float() / scale[:, None]).clamp(-448, 448).to(FP8)


def assert_same(actual, expected):
    assert actual.dtype == expected.dtype == FP8
    assert_bitwise(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(attention, device, case, dtype):
    arguments = cases.inputs(case, dtype, device)
    before = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    result = attention.attend(**arguments)
    cases.assert_no_nan(result)
    (exact, exact_keys), (eager, _) = cases.exact_and_eager(arguments, dtype)
    cases.assert_near(result.cpu(), exact, eager)

    scale = arguments["k_scale"].cpu().double()[:, None]
    for b, length in enumerate(case.lengths):
        new = slice(length, length + case.tokens)
        appended = arguments["k_cache"][b, :, new].transpose(0, 1).cpu().double() * scale
        wanted = exact_keys[b].clamp(-448 * scale, 448 * scale)
        half_step = wanted.abs() / 16 + scale / 1024
        assert bool(((appended - wanted).abs() <= 1.1 * half_step + 0.01).all())
        values = arguments["v_cache"][b, :, new].transpose(0, 1)
        assert_same(values, in_fp8(arguments["v"][b], arguments["v_scale"]))
        for name, cache in before.items():
            cache[b, :, new] = arguments[name][b, :, new]
    for name, cache in before.items():
        assert_same(arguments[name], cache)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 6])
@pytest.mark.parametrize("heads_of_scale", [3, 1])
def test_append(attention, device, dim, heads_of_scale, dtype):
    k, v = (cases.rows(2, 21, 3, dim, dtype=dtype, seed=seed).to(device) for seed in (1, 2))
    lengths = torch.tensor([7, 0], dtype=torch.int32, device=device)
    k_scale = torch.arange(1, heads_of_scale + 1, device=device) / 448
    v_scale = torch.full((1,), 0.01, device=device)
    caches = [torch.full((2, 3, 28, dim), -1.0, device=device).to(FP8) for _ in range(2)]
    attention.append(k, v, *caches, lengths, k_scale=k_scale, v_scale=v_scale)
    for cache, new, scale in zip(caches, (k, v), (k_scale, v_scale), strict=True):
        expected = torch.full((2, 3, 28, dim), -1.0, device=device).to(FP8)
        expected[0, :, 7:28] = in_fp8(new[0], scale).transpose(0, 1)
        expected[1, :, 0:21] = in_fp8(new[1], scale).transpose(0, 1)
        assert_same(cache, expected)


def test_every_number_is_read_back(attention, device):
    """One live slot: the output is its value, for every FP8 number there is."""
    codes = torch.arange(256, dtype=torch.uint8)[torch.arange(256) % 128 != 127]
    codes = torch.cat((codes, codes[:2])).to(device)
    for dtype in (torch.bfloat16, torch.float16):
        for dim in (64, 128, 256):
            v = codes.view(FP8).to(dtype).repeat(2)[: 2 * dim].view(1, 1, -1, dim)
            k = torch.zeros_like(v)
            cache = torch.zeros(1, v.shape[2], 16, dim, device=device).to(FP8)
            one = torch.ones(1, device=device)
            lengths = torch.zeros(1, dtype=torch.int32, device=device)
            out = attention.attend(
                k, k, v, cache, cache.clone(), lengths, scaling=1.0, k_scale=one, v_scale=one
            )
            assert_bitwise(out + 0.0, v + 0.0)


def test_append_equals_attend(attention, device):
    """What attend stores is what append stores of norm_rope's keys."""
    case = cases.Case(lengths=(3, 9), tokens=2, by_slot=False, norm="head", scales="head")
    arguments = cases.inputs(case, torch.bfloat16, device)
    others = [arguments[name].clone() for name in ("k_cache", "v_cache")]
    scales = {name: arguments[name] for name in ("k_scale", "v_scale")}
    names = ("q", "k", "cos", "sin", "rotary", "q_norm_weight", "k_norm_weight", "norm_scope",
             "norm_eps", "norm_zero_centered")  # fmt: skip
    _, k = attention.norm_rope(**{name: arguments[name] for name in names})
    attention.append(k, arguments["v"], *others, arguments["lengths"], **scales)
    attention.attend(**arguments)
    for b, length in enumerate(case.lengths):
        new = slice(length, length + 2)
        assert_same(arguments["k_cache"][b, :, new], others[0][b, :, new])
        assert_same(arguments["v_cache"][b, :, new], others[1][b, :, new])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        dict(dim=128, heads=8, kv_heads=2, norm="head", scales="head"),
        dict(dim=64, heads=16, kv_heads=1, norm="all", scales="one"),
        dict(dim=80, heads=4, kv_heads=4, rotary="interleaved", soft_cap=5.0, scales="one"),
        dict(dim=256, heads=6, kv_heads=2, rotary_dim=64, window=300, scales="head"),
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths,tokens,slots", cases.ROWS_OF_MANY_LENGTHS)
def test_bits_of_a_row_are_its_own(attention, cuda, settings, lengths, tokens, slots, dtype):
    case = cases.Case(lengths=lengths, tokens=tokens, slots=slots, **settings)
    arguments = cases.inputs(case, dtype, cuda)
    cases.assert_rows_alone(attention, arguments)


@pytest.mark.parametrize("history_static", [False, True])
@pytest.mark.parametrize("length", [100, 3000])
def test_replay_equals_eager(attention, cuda, length, history_static):
    case = cases.Case(lengths=(length,), slots=4096, dim=128, heads=8, norm="head", scales="head")
    arguments = cases.inputs(case, torch.bfloat16, cuda)
    scratch = attention.workspace(1, 1, 8, 128, 4096, cuda)
    expected = cases.call(attention, arguments)
    out = torch.empty_like(expected)
    replayed(
        lambda: attention.attend(
            **arguments, history_static=history_static, workspace=scratch, out=out
        )
    )
    assert_bitwise(out, expected)
    assert not scratch[:16384].any(), "counters must be zero between calls"


@pytest.mark.parametrize("name", ["k_cache", "v_cache", "k_scale", "v_scale"])
def test_everything_may_have_a_producer_in_flight(attention, cuda, name):
    case = cases.Case(lengths=(150,), norm="head", dim=128, scales="head")
    arguments = cases.inputs(case, torch.bfloat16, cuda)
    expected = cases.call(attention, arguments)
    late = torch.zeros_like(arguments[name])
    scratch = attention.workspace(1, 1, 4, 128, 192, cuda)
    out = torch.empty_like(expected)
    torch.cuda.synchronize()
    write_late(late, arguments[name])
    attention.attend(**(arguments | {name: late}), workspace=scratch, out=out)
    assert_bitwise(out, expected)
