"""What a bad call gets: one sentence with operator, argument, rule and value."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

BF16 = torch.bfloat16
FP32 = torch.float32

ACTIVATION_RULE = (
    "activation must be one of identity, silu, gelu, gelu_tanh, quick_gelu, relu, relu2, sigmoid, "
    "tanh, got 'swish'"
)
Ones = Callable[..., torch.Tensor]
# The sentence after the operator's name, and what is given instead of good arguments or besides.
Case = tuple[str, Callable[[Ones], dict[str, Any]]]


def make_ones(device: str, usual: torch.dtype = BF16) -> Ones:
    def ones(*shape: int, dtype: torch.dtype = usual) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    return ones


# Beside x [2, 64] and weight [48, 64].
LINEAR: list[Case] = [
    ("x must have at least 1 dims, got shape ()", lambda ones: {"x": ones(dtype=FP32)}),
    (
        "x must be bfloat16 or float16 or float32, got int32",
        lambda ones: {"x": ones(2, 64, dtype=torch.int32)},
    ),
    ("x must have at least one column, got shape (2, 0)", lambda ones: {"x": ones(2, 0)}),
    ("x must have unit stride in dim 1, got strides (1, 2)", lambda ones: {"x": ones(64, 2).t()}),
    (
        "weight must have shape (N, 64) with N at least 1, got (64,)",
        lambda ones: {"weight": ones(64)},
    ),
    (
        "weight must have shape (N, 64) with N at least 1, got (48, 63)",
        lambda ones: {"weight": ones(48, 63)},
    ),
    (
        "weight must have shape (N, 64) with N at least 1, got (0, 64)",
        lambda ones: {"weight": ones(0, 64)},
    ),
    ("weight must be bfloat16, got float32", lambda ones: {"weight": ones(48, 64, dtype=FP32)}),
    ("bias must have shape (48,), got (47,)", lambda ones: {"bias": ones(47)}),
    ("bias must be contiguous, got strides (2,)", lambda ones: {"bias": ones(96)[::2]}),
    ("bias must be bfloat16, got float32", lambda ones: {"bias": ones(48, dtype=FP32)}),
    ("residual must have shape (2, 48), got (2, 64)", lambda ones: {"residual": ones(2, 64)}),
    ("residual must be bfloat16, got float32", lambda ones: {"residual": ones(2, 48, dtype=FP32)}),
    (
        "residual must have unit stride in dim 1, got strides (1, 2)",
        lambda ones: {"residual": ones(48, 2).t()},
    ),
    (ACTIVATION_RULE, lambda ones: {"activation": "swish"}),
    ("soft_cap must be finite and above 0, got 0.0", lambda ones: {"soft_cap": 0.0}),
    ("soft_cap must be finite and above 0, got inf", lambda ones: {"soft_cap": float("inf")}),
    ("soft_cap must be finite and above 0, got nan", lambda ones: {"soft_cap": float("nan")}),
    ("norm_eps must be given with norm_weight, got None", lambda ones: {"norm_weight": ones(64)}),
    ("norm_weight must be given with norm_eps, got None", lambda ones: {"norm_eps": 1e-6}),
    (
        "norm_eps must be finite and not negative, got -1.0",
        lambda ones: {"norm_weight": ones(64), "norm_eps": -1.0},
    ),
    (
        "norm_weight must have shape (64,), got (48,)",
        lambda ones: {"norm_weight": ones(48), "norm_eps": 1e-6},
    ),
    (
        "norm_weight must be bfloat16, got float32",
        lambda ones: {"norm_weight": ones(64, dtype=FP32), "norm_eps": 1e-6},
    ),
    (
        "residual_out must be given with branch (torch.empty_like(x)), got None",
        lambda ones: {"branch": ones(2, 64)},
    ),
    (
        "branch must be given with residual_out or a branch norm, got None",
        lambda ones: {"residual_out": ones(2, 64)},
    ),
    (
        "branch must be given with residual_out or a branch norm, got None",
        lambda ones: {"branch_norm_weight": ones(64), "branch_norm_eps": 1e-6},
    ),
    (
        "branch_norm_weight must be given with branch_norm_eps, got None",
        lambda ones: {"branch_norm_eps": 1e-6},
    ),
    (
        "branch must have shape (2, 64), got (2, 63)",
        lambda ones: {"branch": ones(2, 63), "residual_out": ones(2, 64)},
    ),
    (
        "residual_out must be bfloat16, got float32",
        lambda ones: {"branch": ones(2, 64), "residual_out": ones(2, 64, dtype=FP32)},
    ),
    (
        "residual_out must have shape (2, 64), got (2, 1, 64)",
        lambda ones: {"branch": ones(2, 64), "residual_out": ones(2, 1, 64)},
    ),
    ("out must have shape (2, 48), got (2, 47)", lambda ones: {"out": ones(2, 47)}),
    (
        "out must be bfloat16 (as x) or float32, got float16",
        lambda ones: {"out": ones(2, 48, dtype=torch.float16)},
    ),
    ("out must be float32, got bfloat16", lambda ones: {"out": ones(2, 48), "out_dtype": FP32}),
    (
        "out must have unit stride in dim 1, got strides (1, 2)",
        lambda ones: {"out": ones(48, 2).t()},
    ),
    (
        "out_dtype must be bfloat16 (as x) or float32, got float16",
        lambda ones: {"out_dtype": torch.float16},
    ),
    (
        "out must not be expanded, got strides (0, 1)",
        lambda ones: {"out": ones(1, 48).expand(2, 48)},
    ),
]

# Beside x [2, 64] and two weights [48, 64].
SPLIT: list[Case] = [
    ("weights must be one to three tensors, got 0", lambda ones: {"weights": []}),
    ("weights must be one to three tensors, got 4", lambda ones: {"weights": [ones(8, 64)] * 4}),
    ("biases must be 2, one a weight, got 1", lambda ones: {"biases": [ones(48)]}),
    (
        "weights[1] must have shape (N, 64) with N at least 1, got (48, 65)",
        lambda ones: {"weights": [ones(48, 64), ones(48, 65)]},
    ),
    (
        "weights[1] must have the column stride of weights[0], 1, got 48",
        lambda ones: {"weights": [ones(48, 64), ones(64, 48).t()]},
    ),
    ("biases[1] must have shape (48,), got (8,)", lambda ones: {"biases": [None, ones(8)]}),
    ("out must have shape (2, 96), got (2, 48)", lambda ones: {"out": ones(2, 48)}),
]
# Beside x [2, 64], gate and up [48, 64].
GATED: list[Case] = [
    ("up must have shape (48, 64), got (40, 64)", lambda ones: {"up": ones(40, 64)}),
    ("gate must be bfloat16, got float32", lambda ones: {"gate": ones(48, 64, dtype=FP32)}),
    ("up_bias must have shape (48,), got (40,)", lambda ones: {"up_bias": ones(40)}),
    (ACTIVATION_RULE, lambda ones: {"activation": "swish"}),
    ("out must have shape (2, 48), got (2, 96)", lambda ones: {"out": ones(2, 96)}),
]
# Beside ids [2] and table [16, 8].
EMBEDDING: list[Case] = [
    ("ids must be int64, got int32", lambda ones: {"ids": ones(2, dtype=torch.int32)}),
    (
        "table must have shape (V, D), both at least 1, got (8,)",
        lambda ones: {"table": ones(8)},
    ),
    (
        "table must be bfloat16 or float16 or float32, got int64",
        lambda ones: {"table": ones(16, 8, dtype=torch.int64)},
    ),
    (
        "table must have unit stride in dim 1, got strides (1, 8)",
        lambda ones: {"table": ones(16, 8).t()},
    ),
    ("out must have shape (2, 8), got (2, 9)", lambda ones: {"out": ones(2, 9)}),
    ("out must be bfloat16, got float32", lambda ones: {"out": ones(2, 8, dtype=FP32)}),
    ("out must be contiguous, got strides (16, 1)", lambda ones: {"out": ones(2, 16)[:, :8]}),
]


def good_arguments(function: str, ones: Ones, rows: int = 2) -> dict[str, Any]:
    x = ones(rows, 64)
    return {
        "linear": {"x": x, "weight": ones(48, 64)},
        "linear_split": {"x": x, "weights": [ones(48, 64), ones(48, 64)]},
        "gated_linear": {"x": x, "gate": ones(48, 64), "up": ones(48, 64)},
        "embedding": {"ids": ones(rows, dtype=torch.int64), "table": ones(16, 8)},
    }[function]


CASES = [
    pytest.param(function, rule, make, id=f"{function}: {rule}")
    for function, cases in (
        ("linear", LINEAR),
        ("linear_split", SPLIT),
        ("gated_linear", GATED),
        ("embedding", EMBEDDING),
    )
    for rule, make in cases
]


@pytest.mark.parametrize(("function", "rule", "make"), CASES)
def test_message(
    family: ModuleType,
    device: str,
    function: str,
    rule: str,
    make: Callable[[Ones], dict[str, Any]],
) -> None:
    ones = make_ones(device)
    arguments = {**good_arguments(function, ones), **make(ones)}
    with pytest.raises(ValueError, match=f"^{re.escape(f'{function}: {rule}')}$"):
        getattr(family, function)(**arguments)


@pytest.mark.parametrize("rows", [0, 2, 12])
def test_checks_do_not_depend_on_rows(family: ModuleType, device: str, rows: int) -> None:
    """What few rows refuse, many refuse too, though torch would take it."""
    ones = make_ones(device)
    arguments = good_arguments("linear", ones, rows)
    with pytest.raises(ValueError, match=r"^linear: bias must be contiguous"):
        family.linear(**arguments, bias=ones(96)[::2])
    with pytest.raises(ValueError, match=r"^linear: out must have shape"):
        family.linear(**arguments, out=ones(rows, 47))


@pytest.mark.parametrize("name", ["weight", "bias", "residual", "norm_weight", "branch", "out"])
def test_devices(family: ModuleType, device: str, name: str) -> None:
    ones = make_ones(device)
    shape = {"weight": (48, 64), "bias": (48,), "residual": (2, 48), "out": (2, 48)}
    elsewhere = torch.ones(shape.get(name, (64,) if "norm" in name else (2, 64)), device="meta")
    arguments = good_arguments("linear", ones)
    if name == "norm_weight":
        arguments["norm_eps"] = 1e-6
    if name == "branch":
        arguments["residual_out"] = ones(2, 64)
    arguments[name] = elsewhere.bfloat16()
    where = re.escape(str(arguments["x"].device))
    with pytest.raises(ValueError, match=f"^linear: {name} must be on {where}, got meta$"):
        family.linear(**arguments)


@pytest.mark.parametrize("function", ["linear", "linear_split", "gated_linear"])
def test_fp32_on_cuda(family: ModuleType, cuda: str, function: str) -> None:
    """fp32 is refused with the cast to use."""
    ones = make_ones(cuda, FP32)
    message = "x must be bfloat16 or float16 on CUDA: cast x and the weights with .to"
    with pytest.raises(ValueError, match=f"^{function}: {re.escape(message)}"):
        getattr(family, function)(**good_arguments(function, ones))


@pytest.mark.parametrize("rows", [2, 12])
@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("linear", "x"),
        ("linear", "weight"),
        ("linear_split", "weights"),
        ("gated_linear", "up"),
        ("embedding", "table"),
    ],
)
def test_gradients(family: ModuleType, device: str, function: str, name: str, rows: int) -> None:
    """Inference only: a gradient that would be lost is an error, and none is needed without one."""
    arguments = good_arguments(function, make_ones(device), rows)
    wanted = arguments[name][0] if name == "weights" else arguments[name]
    wanted.requires_grad_(True)
    with torch.enable_grad(), pytest.raises(RuntimeError, match=f"^{function}: has no backward"):
        getattr(family, function)(**arguments)
    expected = getattr(family, function)(**arguments)
    wanted.requires_grad_(False)
    with torch.enable_grad():
        result = getattr(family, function)(**arguments)
    pairs = (
        zip(result, expected, strict=True) if function == "linear_split" else [(result, expected)]
    )
    assert all(torch.equal(got, want) for got, want in pairs)


def test_unknown_argument(family: ModuleType) -> None:
    ones = make_ones("cpu")
    with pytest.raises(TypeError, match="eps"):
        family.linear(ones(2, 64), ones(48, 64), eps=1e-6)
