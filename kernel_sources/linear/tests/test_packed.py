"""Values of linear, linear_split and gated_linear with quantised weights, against fp64.

The exact result is that of the dequantised weights in fp64, the baseline eager torch's with the
same weights rounded to the dtype of x.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import linear_cases as cases
import packing
import pytest
import torch
from _common.buffers import Guarded, gapped_copy, offset_copy
from _common.tolerance import assert_accurate, assert_bitwise

pytestmark = pytest.mark.parametrize("form", packing.FORMATS)

AROUND = [(before, "all") for before in cases.PROLOGUES]
AROUND += [("norm", after) for after in cases.EPILOGUES if after != "all"]
SIZES = [(1, 1), (7, 7), (9, 1030), (577, 1), (33, 576), (1000, 528), (50, 4097), (24, 12304)]


def check_linear(
    family: ModuleType, form: str, packed: packing.Packed, **operands: Any
) -> torch.Tensor:
    """Compare ``linear`` and its new residual with fp64; returns the result."""
    arguments = cases.with_residual_out(operands)
    actual = family.linear(weight=packed.weight, **arguments)
    assert_accurate(actual, *packing.expected(form, operands, {"weight": packed.dense}))
    if "branch" in operands:
        exact = cases.add_branch(**cases.double(operands))
        assert_accurate(arguments["residual_out"], exact, cases.add_branch(**operands))
    return actual


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize(("before", "after"), AROUND)
def test_prologues_and_epilogues(
    family: ModuleType,
    device: str,
    dtype: torch.dtype,
    form: str,
    rows: int,
    before: str,
    after: str,
) -> None:
    check_linear(
        family,
        form,
        packing.make_packed(family, form, 72, 272, device),
        x=cases.normal((rows, 272), dtype, device, seed=0),
        **cases.make_prologue(before, (rows, 272), dtype, device),
        **cases.make_epilogue(after, (rows, 72), dtype, device),
    )


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_sizes(
    family: ModuleType, device: str, dtype: torch.dtype, form: str, rows: int, n: int, k: int
) -> None:
    if device == "cpu" and dtype == torch.float16:
        pytest.skip("sizes on the CPU are covered by two dtypes")
    check_linear(
        family,
        form,
        packing.make_packed(family, form, n, k, device),
        x=cases.normal((rows, k), dtype, device, seed=0),
        **cases.make_prologue("add_normed_norm", (rows, k), dtype, device),
        **cases.make_epilogue("bias_residual", (rows, n), dtype, device),
    )


@pytest.mark.parametrize("rows", [*range(10), 17, 32, 33])
def test_rows(family: ModuleType, device: str, form: str, rows: int) -> None:
    check_linear(
        family,
        form,
        packing.make_packed(family, form, 112, 304, device),
        x=cases.normal((rows, 304), torch.bfloat16, device, seed=0),
        **cases.make_prologue("add_norm", (rows, 304), torch.bfloat16, device),
        **cases.make_epilogue("all", (rows, 112), torch.bfloat16, device),
    )


@pytest.mark.parametrize("k", [40960, 49152, 49168])
def test_long_rows(family: ModuleType, device: str, form: str, k: int) -> None:
    """Rows of x that fill shared memory, and those that no longer fit."""
    x = cases.normal((3, k), torch.bfloat16, device, seed=0)
    check_linear(family, form, packing.make_packed(family, form, 20, k, device), x=x)


@pytest.mark.parametrize("rows", [8, 12, 40])
@pytest.mark.parametrize("sizes", [(48, 16), (64, 16, 160), (7, 1, 33)])
def test_linear_split(
    family: ModuleType,
    device: str,
    dtype: torch.dtype,
    form: str,
    rows: int,
    sizes: tuple[int, ...],
) -> None:
    packed = [packing.make_packed(family, form, n, 144, device, seed=n) for n in sizes]
    biases = [cases.normal((n,), dtype, device, seed=n) for n in sizes]
    biases[-1] = None
    operands = {
        "x": cases.normal((rows, 144), dtype, device, seed=0),
        **cases.make_prologue("norm_zero_centered", (rows, 144), dtype, device),
    }
    results = family.linear_split(
        weights=[weight for weight, _ in packed], biases=biases, **operands
    )
    assert [result.shape for result in results] == [(rows, n) for n in sizes]
    pairs = [
        packing.expected(form, {**operands, "bias": bias}, {"weight": dense})
        for (_, dense), bias in zip(packed, biases, strict=True)
    ]
    exact, eager = (torch.cat(parts, dim=-1) for parts in zip(*pairs, strict=True))
    assert_accurate(torch.cat(results, dim=-1), exact, eager)


@pytest.mark.parametrize("rows", [8, 40])
@pytest.mark.parametrize(("n", "k"), [(64, 272), (65, 127), (200, 576), (40, 1)])
@pytest.mark.parametrize("before", ["none", "add_normed_norm_zero_centered"])
def test_gated_linear(
    family: ModuleType,
    device: str,
    dtype: torch.dtype,
    form: str,
    rows: int,
    n: int,
    k: int,
    before: str,
) -> None:
    if device == "cpu" and dtype == torch.float16:
        pytest.skip("sizes on the CPU are covered by two dtypes")
    gate = packing.make_packed(family, form, n, k, device)
    up = packing.make_packed(family, form, n, k, device, seed=2)
    operands = {
        "x": cases.normal((rows, k), dtype, device, seed=0),
        "gate_bias": cases.normal((n,), dtype, device, seed=3),
        "up_bias": cases.normal((n,), dtype, device, seed=4),
        **cases.make_prologue(before, (rows, k), dtype, device),
    }
    actual = family.gated_linear(
        gate=gate.weight, up=up.weight, **cases.with_residual_out(operands)
    )
    wanted = packing.expected(form, operands, {"gate": gate.dense, "up": up.dense})
    assert_accurate(actual, *wanted)


@pytest.mark.parametrize("rows", [1, 8, 12, 40])
def test_fp32_output(
    family: ModuleType, device: str, dtype: torch.dtype, form: str, rows: int
) -> None:
    """fp32 keeps what the sums hold: no bit of a weight was rounded where the kernel runs."""
    packed = packing.make_packed(family, form, 96, 768, device)
    x = cases.normal((rows, 768), dtype, device, seed=0)
    actual = family.linear(x, packed.weight, out_dtype=torch.float32)
    exact, eager = packing.expected(form, {"x": x}, {"weight": packed.dense})
    assert actual.dtype == torch.float32
    assert_accurate(actual, exact, eager.float())
    if packing.runs_in_the_kernel(form, x, packed.dense):
        error = (actual - exact).abs().amax(dim=-1) / exact.abs().amax(dim=-1)
        assert error.max() < 1e-5, error


@pytest.mark.parametrize("rows", [1, 13, 40])
@pytest.mark.parametrize(("offset", "row_gap"), [(0, 0), (1, 0), (3, 5)])
@pytest.mark.parametrize(("n", "k"), [(80, 272), (33, 65)])
def test_out(
    family: ModuleType,
    device: str,
    form: str,
    rows: int,
    n: int,
    k: int,
    offset: int,
    row_gap: int,
) -> None:
    """Outputs between guard bands have the values of the allocating form."""
    weight = packing.make_packed(family, form, n, k, device).weight
    x = cases.normal((rows, k), torch.bfloat16, device, seed=0)
    arguments = {
        "weight": weight,
        **cases.make_prologue("add_norm", (rows, k), torch.bfloat16, device),
        **cases.make_epilogue("bias_residual", (rows, n), torch.bfloat16, device),
    }
    expected = family.linear(x, residual_out=torch.empty_like(x), **arguments)
    place = {"offset": offset, "row_gap": row_gap}
    out = Guarded((rows, n), torch.bfloat16, device, **place)
    stream = Guarded((rows, k), torch.bfloat16, device, **place)
    assert family.linear(x, residual_out=stream.view, out=out.view, **arguments) is out.view
    out.assert_written()
    stream.assert_written()
    assert_bitwise(out.view, expected)
    assert_bitwise(stream.view, x + arguments["branch"])


@pytest.mark.parametrize("rows", [1, 12, 40])
@pytest.mark.parametrize("place", [offset_copy, lambda t: gapped_copy(t, 3)], ids=["offset", "gap"])
@pytest.mark.parametrize("k", [272, 65])
def test_placed_weight(
    family: ModuleType, device: str, form: str, rows: int, place: Any, k: int
) -> None:
    """Data off its alignment or with gaps between rows, and rows of a larger weight."""
    if form == "nvfp4":
        pytest.skip("tiles are contiguous and start on 16 bytes")
    packed = packing.make_packed(family, form, 80, k, device)
    data, scale, shape = packed.weight
    placed = place(data.view(torch.int8)).view(data.dtype)
    x = cases.normal((rows, k), torch.bfloat16, device, seed=0)
    wanted = packing.expected("gap", {"x": x}, {"weight": packed.dense})
    assert_accurate(family.linear(x, family.PackedWeight(placed, scale, shape)), *wanted)
    if scale.dim() == 1:
        part = family.PackedWeight(data[16:48], scale[16:48], (32, k))
        dense = {"weight": packed.dense[16:48]}
        assert_accurate(family.linear(x, part), *packing.expected(form, {"x": x}, dense))
