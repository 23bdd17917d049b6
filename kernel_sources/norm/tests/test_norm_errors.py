"""Every documented error of the norm family, word for word."""

import re

import pytest
import torch

X = torch.ones(2, 4096)
WEIGHT = torch.ones(4096)


def raises(message, error=ValueError):
    return pytest.raises(error, match="^" + re.escape(message))


@pytest.mark.parametrize(
    "x,message",
    [
        (torch.ones(()), "x must have at least 1 dims, got shape ()"),
        (torch.ones(2, 0), "x must have at least 1 element in its last dim, got shape (2, 0)"),
        (X.double(), "x must be bfloat16 or float16 or float32, got float64"),
        (X.t().contiguous().t(), "x must have unit stride in dim 1, got strides (1, 2)"),
    ],
)
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_input(norm, op, x, message):
    with raises(f"{op}: {message}"):
        getattr(norm, op)(x, None)


@pytest.mark.parametrize(
    "weight,message",
    [
        (torch.ones(4095), "must have shape (4096,), got (4095,)"),
        (torch.ones(1, 4096), "must have shape (4096,), got (1, 4096)"),
        (WEIGHT.half(), "must be float32 or float32, got float16"),
        (torch.ones(8192)[::2], "must have unit stride in dim 0, got strides (2,)"),
        (torch.ones(4096, device="meta"), "must be on cpu, got meta"),
    ],
)
def test_weight(norm, weight, message):
    with raises(f"rms_norm: weight {message}"):
        norm.rms_norm(X, weight)
    with raises(f"add_rms_norm: weight {message}"):
        norm.add_rms_norm(X, X, weight)
    with raises(f"layer_norm: bias {message}"):
        norm.layer_norm(X, None, weight)


@pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf")])
def test_eps(norm, eps):
    with raises(f"rms_norm: eps must be finite and not negative, got {eps}"):
        norm.rms_norm(X, WEIGHT, eps=eps)


@pytest.mark.parametrize("shape", [(3, 4096), (2, 1), (1, 2, 4096), ()])
def test_modulation(norm, shape):
    operand = torch.ones(shape)
    rule = f"must broadcast to (2, 4096) with last dim equal, got {shape}"
    with raises(f"rms_norm: scale {rule}"):
        norm.rms_norm(X, None, scale=operand)
    with raises(f"layer_norm: shift {rule}"):
        norm.layer_norm(X, shift=operand)


@pytest.mark.parametrize(
    "out,message",
    [
        (torch.ones(2, 4095), "must have shape (2, 4096), got (2, 4095)"),
        (torch.ones(2, 4096).half(), "must be float32, got float16"),
        (torch.ones(2, 4096, device="meta"), "must be on cpu, got meta"),
        (torch.ones(4096, 2).t(), "must have unit stride in dim 1, got strides (1, 2)"),
        (torch.ones(4096).expand(2, -1), "must not be expanded, got strides (0, 1)"),
    ],
)
def test_outputs(norm, out, message):
    with raises(f"rms_norm: out {message}"):
        norm.rms_norm(X, None, out=out)
    with raises(f"layer_norm: out {message}"):
        norm.layer_norm(X, out=out)
    with raises(f"add_rms_norm: out {message}"):
        norm.add_rms_norm(X, X, None, out=out)
    with raises(f"add_rms_norm: residual_out {message}"):
        norm.add_rms_norm(X, X, None, residual_out=out)


def test_residual(norm):
    with raises("add_rms_norm: residual must have shape (2, 4096), got (1, 4096)"):
        norm.add_rms_norm(X, X[:1], None)
    with raises("add_rms_norm: residual must be float32, got float16"):
        norm.add_rms_norm(X, X.half(), None)


def test_grad(norm):
    weight = torch.ones(4096, requires_grad=True)
    calls = {
        "rms_norm": lambda: norm.rms_norm(X, weight),
        "layer_norm": lambda: norm.layer_norm(X, None, weight),
        "add_rms_norm": lambda: norm.add_rms_norm(X, weight.expand(2, -1), None),
    }
    for op, call in calls.items():
        with torch.enable_grad(), raises(f"{op}: has no backward", RuntimeError):
            call()
        call()  # under no_grad
