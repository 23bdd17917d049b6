"""Every documented error of the attention family, word for word, and that nothing was written."""

import re

import attention_cases as cases
import pytest
import torch
from _common.tolerance import assert_bitwise

CASE = cases.Case(lengths=(9, 3), tokens=2, norm="head")


def fp8(cache):
    return cache.to(torch.float8_e4m3fn)


def raises(message, error=ValueError):
    return pytest.raises(error, match="^" + re.escape(message))


def given(**changes):
    arguments = cases.inputs(CASE, torch.bfloat16)
    for name, change in changes.items():
        arguments[name] = change(arguments[name]) if callable(change) else change
    return arguments


def transposed(x):
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(q=lambda x: x[0]), "q must have dims [B, T, H, D], got shape (2, 4, 64)"),
        (dict(q=lambda x: x.double()), "q must be bfloat16 or float16 or float32, got float64"),
        (dict(q=transposed), "q must have unit stride in dim 3, got strides (512, 256, 1, 4)"),
        (dict(q=lambda x: x[..., :63]), "q must have an even head dim D, got shape (2, 2, 4, 63)"),
        (dict(k=lambda x: x[0]), "k must have dims [B, T, G, D], got shape (2, 2, 64)"),
        (dict(k=lambda x: x.half()), "k must be bfloat16, got float16"),
        (dict(v=lambda x: x.to("meta")), "v must be on cpu, got meta"),
        (dict(v=transposed), "v must have unit stride in dim 3, got strides (256, 128, 1, 2)"),
        (dict(k=lambda x: x[:, :1]), "k must have shape (2, 2, 2, 64), got (2, 1, 2, 64)"),
        (dict(v=lambda x: x[:, :, :1]), "v must have shape (2, 2, 2, 64), got (2, 2, 1, 64)"),
        (dict(q=lambda x: x[:, :, :3]),
         "k must have a number of heads G that divides H = 3, got 2"),
        (dict(k_cache=lambda x: x[0]),
         "k_cache must have dims [B, G, S, D], got shape (2, 192, 64)"),
        (dict(v_cache=lambda x: x[:, :, 1:]),
         "v_cache must have shape (2, 2, 192, 64), got (2, 2, 191, 64)"),
        (dict(k_cache=lambda x: x.float()), "k_cache must be bfloat16, got float32"),
        (dict(k_cache=lambda x: x.to("meta")), "k_cache must be on cpu, got meta"),
        (dict(k_cache=fp8), "v_cache must be float8_e4m3fn, got bfloat16"),
        (dict(v_cache=fp8), "v_cache must be bfloat16, got float8_e4m3fn"),
        (dict(k_cache=fp8, v_cache=fp8),
         "k_scale must be [2] or [1] float32 for a float8_e4m3fn cache, got None"),
        (dict(k_cache=fp8, v_cache=fp8, k_scale=torch.ones(2)),
         "v_scale must be [2] or [1] float32 for a float8_e4m3fn cache, got None"),
        (dict(k_cache=fp8, v_cache=fp8, k_scale=torch.ones(3)),
         "k_scale must have shape (2,) or (1,), got (3,)"),
        (dict(k_cache=fp8, v_cache=fp8, k_scale=torch.ones(1, dtype=torch.float64)),
         "k_scale must be float32, got float64"),
        (dict(k_cache=fp8, v_cache=fp8, k_scale=torch.ones(1, device="meta")),
         "k_scale must be on cpu, got meta"),
        (dict(k_cache=fp8, v_cache=fp8, k_scale=torch.ones(4)[::2]),
         "k_scale must be contiguous, got strides (2,)"),
        (dict(k_scale=torch.ones(1)),
         "k_scale must be None, for only a float8_e4m3fn cache has scales, "
         "got a tensor and a bfloat16 cache"),
        (dict(k_cache=lambda x: x[:, :1].expand(2, 2, 192, 64)),
         "k_cache must not be expanded, got strides (24576, 0, 64, 1)"),
        (dict(k_cache=lambda x: x[:, :, :0], v_cache=lambda x: x[:, :, :0]),
         "k_cache must have at least 1 slot, got shape (2, 2, 0, 64)"),
        (dict(lengths=lambda x: x[:1]), "lengths must have shape (2,), got (1,)"),
        (dict(lengths=lambda x: x.long()), "lengths must be int32, got int64"),
        (dict(lengths=lambda x: x.to("meta")), "lengths must be on cpu, got meta"),
        (dict(lengths=lambda x: x.repeat_interleave(2)[::2]),
         "lengths must be contiguous, got strides (2,)"),
        (dict(lengths=lambda x: x + 182),
         "lengths must be at least 0 and at most S - T = 190, got 185 to 191; allocate a longer"),
        (dict(lengths=lambda x: x - 4),
         "lengths must be at least 0 and at most S - T = 190, got -1 to 5; allocate a longer"),
        (dict(cos=None), "cos must be given together with the other of cos and sin, got None"),
        (dict(sin=None), "sin must be given together with the other of cos and sin, got None"),
        (dict(cos=lambda x: x[0]), "cos must have shape [P, R] or [B, T, R], got (64,)"),
        (dict(cos=lambda x: x[:191]), "cos must have at least S = 192 rows, got 191"),
        (dict(cos=lambda x: x[:, :63]),
         "cos must have an even rotary dim R of at most D = 64, got 63"),
        (dict(cos=lambda x: x.repeat(1, 2)),
         "cos must have an even rotary dim R of at most D = 64, got 128"),
        (dict(cos=lambda x: x[:9].view(3, 3, 64)),
         "cos must have shape (2, 2, 64), got (3, 3, 64)"),
        (dict(sin=lambda x: x[:, :32]), "sin must have shape (192, 64), got (192, 32)"),
        (dict(cos=lambda x: x.half()), "cos must be bfloat16 or float32, got float16"),
        (dict(sin=lambda x: x.bfloat16()), "sin must be float32, got bfloat16"),
        (dict(sin=lambda x: x.to("meta")), "sin must be on cpu, got meta"),
        (dict(rotary="neox"), "rotary must be one of half, interleaved, got 'neox'"),
        (dict(norm_scope="row"), "norm_scope must be one of head, all, got 'row'"),
        (dict(norm_scope="all"), "q_norm_weight must have shape (256,), got (64,)"),
        (dict(k_norm_weight=lambda x: x[:63]), "k_norm_weight must have shape (64,), got (63,)"),
        (dict(q_norm_weight=lambda x: x.float()), "q_norm_weight must be bfloat16, got float32"),
        (dict(q_norm_weight=lambda x: x.to("meta")), "q_norm_weight must be on cpu, got meta"),
        (dict(q_norm_weight=lambda x: x.repeat_interleave(2)[::2]),
         "q_norm_weight must be contiguous, got strides (2,)"),
        (dict(norm_eps=-1.0), "norm_eps must be finite and not negative, got -1.0"),
        (dict(scaling=0.0), "scaling must be finite and not 0, got 0.0"),
        (dict(scaling=float("nan")), "scaling must be finite and not 0, got nan"),
        (dict(window=0), "window must be at least 1 or None, got 0"),
        (dict(soft_cap=0.0), "soft_cap must be finite and more than 0, or None, got 0.0"),
        (dict(soft_cap=float("inf")), "soft_cap must be finite and more than 0, or None, got inf"),
        (dict(out=torch.empty(2, 2, 4, 32)),
         "out must have shape (2, 2, 4, 64), got (2, 2, 4, 32)"),
        (dict(out=torch.empty(2, 2, 4, 64)), "out must be bfloat16, got float32"),
        (dict(out=torch.empty(2, 4, 2, 64, dtype=torch.bfloat16).transpose(1, 2)),
         "out must be contiguous, got strides (512, 64, 128, 1)"),
        (dict(workspace=torch.empty(8)), "workspace must be uint8, got float32"),
        (dict(workspace=torch.empty(8, dtype=torch.uint8, device="meta")),
         "workspace must be on cpu, got meta"),
        (dict(workspace=torch.empty(1 << 20, 2, dtype=torch.uint8)[:, 0]),
         "workspace must be contiguous, got strides (2,)"),
        (dict(workspace=torch.empty(8, dtype=torch.uint8)),
         "workspace must have at least 24832 bytes (see workspace()), got 8"),
    ],
)  # fmt: skip
def test_attend(attention, changes, message):
    arguments = given(**changes)
    before = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    with raises(f"attend: {message}"):
        attention.attend(**arguments)
    for name, cache in before.items():
        if cache.device.type != "meta":
            if cache.dtype == torch.float8_e4m3fn:
                cache, arguments[name] = cache.view(torch.uint8), arguments[name].view(torch.uint8)
            assert_bitwise(arguments[name], cache)


def test_too_many_rows(attention):
    arguments = cases.inputs(cases.Case(lengths=(1, 1, 1), tokens=3), torch.bfloat16)
    rule = "q must have B * T <= 8 (more: norm_rope, append and torch's own attention)"
    with raises(f"attend: {rule}, got shape (3, 3, 4, 64)"):
        attention.attend(**arguments)


def test_too_many_heads(attention):
    arguments = cases.inputs(cases.Case(heads=514), torch.bfloat16)
    with raises("attend: q must have H <= 512, got shape (1, 1, 514, 64)"):
        attention.attend(**arguments)


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_cache_alignment(attention, name):
    wide = torch.zeros(2, 2, 192, 68, dtype=torch.bfloat16)
    arguments = given(**{name: wide[..., 4:]})
    rule = f"{name} must have rows on 16-byte boundaries"
    with raises(f"attend: {rule}, got strides (26112, 13056, 68, 1)"):
        attention.attend(**arguments)


@pytest.mark.parametrize("name", ["q", "k", "v", "k_cache", "cos", "q_norm_weight"])
def test_attend_needs_no_grad(attention, name):
    arguments = given(**{name: lambda x: x.detach().requires_grad_()})
    message = "attend: has no backward and an input requires grad; call it under torch.no_grad()"
    with torch.enable_grad(), raises(message, RuntimeError):
        attention.attend(**arguments)
    assert attention.attend(**{**arguments}).shape == arguments["q"].shape


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(k=lambda x: x.half()), "k must be bfloat16, got float16"),
        (dict(cos=lambda x: x[:2]), "cos must have shape [B, T, R], got (2, 64)"),
        (dict(rotary="full"), "rotary must be one of half, interleaved, got 'full'"),
        (dict(norm_scope="all"), "q_norm_weight must have shape (256,), got (64,)"),
        (dict(norm_eps=float("nan")), "norm_eps must be finite and not negative, got nan"),
        (dict(out=(torch.empty(0),)), "out must hold two tensors, got 1"),
        (dict(out=(torch.empty(0), torch.empty(0))),
         "out[0] must have shape (2, 2, 4, 64), got (0,)"),
        (dict(out=(torch.empty(2, 2, 4, 64, dtype=torch.bfloat16), torch.empty(0))),
         "out[1] must have shape (2, 2, 2, 64), got (0,)"),
    ],
)  # fmt: skip
def test_norm_rope(attention, changes, message):
    arguments = given(**changes)
    if "cos" not in changes:
        arguments |= {"cos": None, "sin": None}
    for name in ("v", "k_cache", "v_cache", "lengths", "scaling", "window", "soft_cap"):
        del arguments[name]
    with raises(f"norm_rope: {message}"):
        attention.norm_rope(**arguments)


def test_norm_rope_needs_no_grad(attention):
    a = given(q=lambda x: x.requires_grad_())
    with torch.enable_grad(), raises("norm_rope: has no backward", RuntimeError):
        attention.norm_rope(a["q"], a["k"])


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(k=lambda x: x.double()), "k must be bfloat16 or float16 or float32, got float64"),
        (dict(v=lambda x: x[:, :1]), "v must have shape"),
        (dict(k_cache=lambda x: x.float()), "k_cache must be bfloat16, got float32"),
        (dict(lengths=lambda x: x.long()), "lengths must be int32, got int64"),
        (dict(lengths=lambda x: x + 182), "lengths must be at least 0 and at most S - T = 190"),
    ],
)
def test_append(attention, changes, message):
    a = given(**changes)
    before = a["k_cache"].clone()
    with raises(f"append: {message}"):
        attention.append(a["k"], a["v"], a["k_cache"], a["v_cache"], a["lengths"])
    assert_bitwise(a["k_cache"], before)


def test_append_needs_no_grad(attention):
    a = given(v=lambda x: x.requires_grad_())
    with torch.enable_grad(), raises("append: has no backward", RuntimeError):
        attention.append(a["k"], a["v"], a["k_cache"], a["v_cache"], a["lengths"])


@pytest.mark.parametrize("name", ["batch", "tokens", "heads", "dim", "slots"])
def test_workspace(attention, name):
    sizes = dict(batch=1, tokens=1, heads=4, dim=64, slots=8)
    with raises(f"workspace: {name} must be at least 1, got 0"):
        attention.workspace(**(sizes | {name: 0}), device="cpu")
