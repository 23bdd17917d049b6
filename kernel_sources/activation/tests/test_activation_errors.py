"""Every documented error of the activation family, word for word."""

import re

import pytest
import torch

X = torch.ones(2, 64)


def raises(message, error=ValueError):
    return pytest.raises(error, match="^" + re.escape(message))


def calls(activation, x, **arguments):
    return {
        "activate": lambda: activation.activate(x, activation="silu", **arguments),
        "gated": lambda: activation.gated(x, x, **arguments),
        "gated_packed": lambda: activation.gated_packed(x, **arguments),
    }


def test_unknown_activation(activation):
    names = "identity, silu, gelu, gelu_tanh, quick_gelu, relu, relu2, sigmoid, tanh"
    rule = f"activation must be one of {names}, got 'swish'"
    with raises(f"activate: {rule}"):
        activation.activate(X, activation="swish")
    with raises(f"gated: {rule}"):
        activation.gated(X, X, activation="swish")
    with raises(f"gated_packed: {rule}"):
        activation.gated_packed(X, activation="swish")


@pytest.mark.parametrize(
    "x,rule",
    [
        (torch.ones(()), "have at least 1 dims, got shape ()"),
        (X.double(), "be bfloat16 or float16 or float32, got float64"),
        (X.t().contiguous().t(), "have unit stride in dim 1, got strides (1, 2)"),
    ],
)
@pytest.mark.parametrize(
    "op,argument", [("activate", "x"), ("gated", "gate"), ("gated_packed", "x")]
)
def test_input(activation, op, argument, x, rule):
    with raises(f"{op}: {argument} must {rule}"):
        calls(activation, x)[op]()


@pytest.mark.parametrize(
    "up,rule",
    [
        (X[:1], "have shape (2, 64), got (1, 64)"),
        (X.half(), "be float32, got float16"),
        (torch.ones(2, 64, device="meta"), "be on cpu, got meta"),
        (torch.ones(64, 2).t(), "have unit stride in dim 1, got strides (1, 2)"),
    ],
)
def test_up(activation, up, rule):
    with raises(f"gated: up must {rule}"):
        activation.gated(X, up)


def test_odd_width(activation):
    with raises("gated_packed: x must have an even last dim, got shape (2, 7)"):
        activation.gated_packed(torch.ones(2, 7))


@pytest.mark.parametrize("op", ["activate", "gated", "gated_packed"])
@pytest.mark.parametrize(
    "make,rule",
    [
        (lambda d: torch.ones(2, d + 1), "have shape (2, {d}), got (2, {more})"),
        (lambda d: torch.ones(2, d).half(), "be float32, got float16"),
        (lambda d: torch.ones(2, d, device="meta"), "be on cpu, got meta"),
        (lambda d: torch.ones(d, 2).t(), "have unit stride in dim 1, got strides (1, 2)"),
        (lambda d: torch.ones(d).expand(2, -1), "not be expanded, got strides (0, 1)"),
    ],
)
def test_out(activation, op, make, rule):
    width = 32 if op == "gated_packed" else 64
    with raises(f"{op}: out must {rule.format(d=width, more=width + 1)}"):
        calls(activation, X, out=make(width))[op]()


@pytest.mark.parametrize("op", ["activate", "gated", "gated_packed"])
def test_grad(activation, op):
    x = torch.ones(2, 64, requires_grad=True)
    call = calls(activation, x)[op]
    with torch.enable_grad(), raises(f"{op}: has no backward", RuntimeError):
        call()
    call()  # under no_grad
