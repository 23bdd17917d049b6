"""Values of linear, linear_split and gated_linear against fp64."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import linear_cases as cases
import pytest
import torch
from _common.tolerance import assert_accurate, assert_bitwise

# Relative to the largest of a row; bf16 rounds to 4e-3 and fp16 to 5e-4.
FP32_SUM = 1e-5
SIZES = [(1, 1), (7, 7), (1, 4097), (4097, 1), (7, 576), (576, 7), (1000, 576), (577, 1000)]
SIZES += [(4097, 1000), (1000, 4097), (64, 8192), (48, 12296)]


def check_linear(family: ModuleType, **operands: Any) -> torch.Tensor:
    """Compare ``linear`` and its new residual with fp64; returns the result."""
    arguments = cases.with_residual_out(operands)
    actual = family.linear(**arguments)
    exact = cases.double(operands)
    assert_accurate(actual, cases.linear(**exact), cases.linear(**operands))
    if "branch" in operands:
        eager = cases.add_branch(**operands)
        assert_accurate(arguments["residual_out"], cases.add_branch(**exact), eager)
    return actual


@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize("after", cases.EPILOGUES)
@pytest.mark.parametrize("before", cases.PROLOGUES)
def test_prologues_and_epilogues(
    family: ModuleType, device: str, dtype: torch.dtype, rows: int, before: str, after: str
) -> None:
    check_linear(
        family,
        x=cases.normal((rows, 256), dtype, device, seed=0),
        weight=cases.make_weight(72, 256, dtype, device),
        **cases.make_prologue(before, (rows, 256), dtype, device),
        **cases.make_epilogue(after, (rows, 72), dtype, device),
    )


@pytest.mark.parametrize("rows", [2, 9])
@pytest.mark.parametrize("activation", cases.ACTIVATIONS)
def test_activations(
    family: ModuleType, device: str, dtype: torch.dtype, rows: int, activation: str
) -> None:
    x = cases.normal((rows, 128), dtype, device, seed=0, std=4.0)
    gate = cases.make_weight(40, 128, dtype, device)
    up = cases.make_weight(40, 128, dtype, device, seed=2)
    check_linear(family, x=x, weight=gate, activation=activation)
    operands = {"x": x, "gate": gate, "up": up, "activation": activation}
    assert_accurate(
        family.gated_linear(**operands),
        cases.gated_linear(**cases.double(operands)),
        cases.gated_linear(**operands),
    )


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_sizes(
    family: ModuleType, device: str, dtype: torch.dtype, rows: int, n: int, k: int
) -> None:
    for before in ("none", "add_normed_norm"):
        check_linear(
            family,
            x=cases.normal((rows, k), dtype, device, seed=0),
            weight=cases.make_weight(n, k, dtype, device),
            **cases.make_prologue(before, (rows, k), dtype, device),
            **cases.make_epilogue("bias_residual", (rows, n), dtype, device),
        )


@pytest.mark.parametrize("rows", [*range(10), 33])
def test_rows(family: ModuleType, device: str, dtype: torch.dtype, rows: int) -> None:
    """Every number of rows, none and more than one launch takes among them."""
    check_linear(
        family,
        x=cases.normal((rows, 200), dtype, device, seed=0),
        weight=cases.make_weight(104, 200, dtype, device),
        **cases.make_prologue("add_norm", (rows, 200), dtype, device),
        **cases.make_epilogue("all", (rows, 104), dtype, device),
    )


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("k", [40960, 49152, 49160])
def test_long_rows(family: ModuleType, device: str, dtype: torch.dtype, rows: int, k: int) -> None:
    """Rows of x that fill shared memory, and those that no longer fit."""
    check_linear(
        family,
        x=cases.normal((rows, k), dtype, device, seed=0),
        weight=cases.make_weight(24, k, dtype, device),
        **cases.make_prologue("norm", (rows, k), dtype, device),
    )


@pytest.mark.parametrize("shape", [(64,), (1, 1, 64), (2, 3, 64), (2, 0, 64), (3, 5, 64)])
def test_leading_dims(family: ModuleType, device: str, shape: tuple[int, ...]) -> None:
    """Any leading dims, and none, give the shape of x with N in place of K."""
    x = cases.normal(shape, torch.bfloat16, device, seed=0)
    weight = cases.make_weight(24, 64, torch.bfloat16, device)
    flat = x.reshape(-1, 64)
    expected = family.linear(flat, weight).view(*shape[:-1], 24)
    assert_bitwise(family.linear(x, weight), expected)
    assert_bitwise(family.linear_split(x, [weight, weight])[1], expected)
    gated = family.gated_linear(flat, weight, weight).view(*shape[:-1], 24)
    assert_bitwise(family.gated_linear(x, weight, weight), gated)


@pytest.mark.parametrize("rows", [1, 8, 12])
@pytest.mark.parametrize("sizes", [(40,), (48, 16), (64, 16, 16), (7, 1, 33)])
@pytest.mark.parametrize("before", ["none", "norm", "add_normed_norm_zero_centered"])
def test_linear_split(
    family: ModuleType,
    device: str,
    dtype: torch.dtype,
    rows: int,
    sizes: tuple[int, ...],
    before: str,
) -> None:
    x = cases.normal((rows, 144), dtype, device, seed=0)
    weights = [cases.make_weight(n, 144, dtype, device, seed=n) for n in sizes]
    biases = [cases.normal((n,), dtype, device, seed=n + 1) for n in sizes]
    biases[-1] = None
    arguments = {"x": x, **cases.make_prologue(before, (rows, 144), dtype, device)}
    results = family.linear_split(
        weights=weights, biases=biases, **cases.with_residual_out(arguments)
    )
    assert [result.shape for result in results] == [(rows, n) for n in sizes]
    calls = [
        {**arguments, "weight": weight, "bias": bias}
        for weight, bias in zip(weights, biases, strict=True)
    ]
    # As one N: the error of a single number says nothing of the next.
    assert_accurate(
        torch.cat(results, dim=-1),
        torch.cat([cases.linear(**cases.double(call)) for call in calls], dim=-1),
        torch.cat([cases.linear(**call) for call in calls], dim=-1),
    )


@pytest.mark.parametrize("rows", [1, 8, 12])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (65, 127), (1000, 576), (1, 1)])
@pytest.mark.parametrize("before", cases.PROLOGUES)
def test_gated_linear(
    family: ModuleType, device: str, dtype: torch.dtype, rows: int, n: int, k: int, before: str
) -> None:
    operands = {
        "x": cases.normal((rows, k), dtype, device, seed=0),
        "gate": cases.make_weight(n, k, dtype, device),
        "up": cases.make_weight(n, k, dtype, device, seed=2),
        "gate_bias": cases.normal((n,), dtype, device, seed=3),
        "up_bias": cases.normal((n,), dtype, device, seed=4),
        **cases.make_prologue(before, (rows, k), dtype, device),
    }
    assert_accurate(
        family.gated_linear(**cases.with_residual_out(operands)),
        cases.gated_linear(**cases.double(operands)),
        cases.gated_linear(**operands),
    )


@pytest.mark.parametrize("rows", [1, 8, 12])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_fp32_output(
    family: ModuleType, device: str, dtype: torch.dtype, rows: int, soft_cap: float | None
) -> None:
    """``out_dtype`` fp32 keeps what the sums hold: far more than a rounding to the input's dtype.

    On a GPU the sums are those of tensor cores, which keep fewer bits than fp32 does.
    """
    x = cases.normal((rows, 768), dtype, device, seed=0)
    weight = cases.make_weight(96, 768, dtype, device)
    bias = cases.normal((96,), dtype, device, seed=3)
    actual = family.linear(x, weight, bias, soft_cap=soft_cap, out_dtype=torch.float32)
    operands = (x, weight, bias)
    exact = cases.linear(*(tensor.double() for tensor in operands), soft_cap=soft_cap)
    assert actual.dtype == torch.float32
    if device == "cpu":
        operands = tuple(tensor.float() for tensor in operands)
    assert_accurate(actual, exact, cases.linear(*operands, soft_cap=soft_cap).float())
    error = (actual - exact).abs().amax(dim=-1) / exact.abs().amax(dim=-1)
    assert error.max() < FP32_SUM, error


def test_residual_stream_is_the_hosts(family: ModuleType, device: str, dtype: torch.dtype) -> None:
    """The new residual has the bits of the host's own ``x + branch``."""
    x = cases.normal((3, 512), dtype, device, seed=0)
    weight = cases.make_weight(16, 512, dtype, device)
    arguments = cases.make_prologue("add_norm", (3, 512), dtype, device)
    residual_out = torch.empty_like(x)
    family.linear(x, weight, residual_out=residual_out, **arguments)
    assert_bitwise(residual_out, x + arguments["branch"])


def test_extreme_values(family: ModuleType, device: str) -> None:
    """A NaN or infinity stays in its row; activations and the cap saturate as they should."""
    x = cases.normal((4, 64), torch.bfloat16, device, seed=0)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    weight = cases.make_weight(16, 64, torch.bfloat16, device)
    y = family.linear(x, weight)
    assert y[1].isnan().all()
    assert not y[2].isfinite().any()
    assert_bitwise(y[0::3], family.linear(x[0::3], weight))
    large = torch.full((2, 64), 1e3, dtype=torch.bfloat16, device=device)
    large[1] = -1e3
    ones = torch.ones((8, 64), dtype=torch.bfloat16, device=device)
    capped = family.linear(large, ones, soft_cap=30.0)
    assert capped[0].eq(30).all()
    assert capped[1].eq(-30).all()
    silu = family.linear(large, ones, activation="silu")
    assert silu[0].eq(64e3).all()
    assert silu[1].eq(0).all()
