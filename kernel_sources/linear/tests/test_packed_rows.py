"""With quantised weights too, the bits of a row depend on that row alone, for 1..8 rows."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import linear_cases as cases
import packing
import pytest
import torch
from _common.buffers import gapped_copy, offset_copy
from _common.tolerance import assert_bitwise
from test_rows import PER_ROW, call, rows_of

pytestmark = pytest.mark.parametrize("form", packing.FORMATS)

SIZES = [(96, 256), (130, 577), (1000, 576), (48, 4096), (2048, 2048), (33, 4097), (64, 12288)]


def make_call(
    family: ModuleType,
    form: str,
    function: str,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: str,
    *,
    rows: int = 8,
) -> dict[str, Any]:
    """Arguments for so many rows."""
    arguments = {
        "x": cases.normal((rows, k), dtype, device, seed=0),
        **cases.make_prologue("add_normed_norm", (rows, k), dtype, device),
    }
    weight, other = (packing.make_packed(family, form, n, k, device, seed=i).weight for i in (1, 2))
    if function == "gated_linear":
        return {**arguments, "gate": weight, "up": other}
    if function == "linear_split":
        return {**arguments, "weights": [weight, other]}
    return {**arguments, "weight": weight, **cases.make_epilogue("all", (rows, n), dtype, device)}


@pytest.mark.parametrize("function", ["linear", "linear_split", "gated_linear"])
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("plain", [False, True], ids=["add_normed_norm", "none"])
def test_every_number_of_rows(
    family: ModuleType,
    device: str,
    dtype: torch.dtype,
    form: str,
    function: str,
    n: int,
    k: int,
    plain: bool,
) -> None:
    """M = 1..8 equals M = 1 row by row, in every bit."""
    if device == "cpu" and (plain or n * k > 1 << 17 or dtype == torch.float16):
        pytest.skip("large sizes, plain calls and fp16 are for the GPU's kernels")
    arguments = make_call(family, form, function, n, k, dtype, device)
    if plain:
        weights = ("x", "weight", "weights", "gate", "up")
        arguments = {name: v for name, v in arguments.items() if name in weights}
    single = [call(family, function, rows_of(arguments, slice(m, m + 1))) for m in range(8)]
    for rows in range(2, 9):
        several = call(family, function, rows_of(arguments, slice(0, rows)))
        for i, result in enumerate(several):
            assert_bitwise(result, torch.cat([single[m][i] for m in range(rows)]))


@pytest.mark.parametrize("function", ["linear", "linear_split", "gated_linear"])
@pytest.mark.parametrize("rows", [9, 21, 32])
def test_several_launches(
    family: ModuleType, device: str, form: str, function: str, rows: int
) -> None:
    """More rows than one launch takes keep their bits where the kernel runs for all of them."""
    arguments = make_call(family, form, function, 72, 577, torch.bfloat16, device, rows=rows)
    single = [call(family, function, rows_of(arguments, slice(m, m + 1))) for m in range(rows)]
    for i, result in enumerate(call(family, function, arguments)):
        assert_bitwise(result, torch.cat([single[m][i] for m in range(rows)]))


def test_place_and_neighbours(
    family: ModuleType, device: str, dtype: torch.dtype, form: str
) -> None:
    """A row keeps its bits in another place, beside rows of NaN, and wherever x lies."""
    arguments = make_call(family, form, "linear", 200, 576, dtype, device)
    expected = call(family, "linear", arguments)
    order = torch.tensor([5, 2, 7, 0, 1, 6, 3, 4], device=device)
    moved = call(family, "linear", rows_of(arguments, order))
    for result, wanted in zip(moved, expected, strict=True):
        assert_bitwise(result, wanted[order])
    poisoned = {**arguments, "x": arguments["x"].clone()}
    poisoned["x"][::2] = float("nan")
    for result, wanted in zip(call(family, "linear", poisoned), expected, strict=True):
        assert_bitwise(result[1::2], wanted[1::2])
    for place in (offset_copy, lambda tensor: gapped_copy(tensor, 3)):
        placed = {name: place(v) if name in PER_ROW else v for name, v in arguments.items()}
        for result, wanted in zip(call(family, "linear", placed), expected, strict=True):
            assert_bitwise(result, wanted)


def test_rows_of_a_weight(family: ModuleType, device: str, form: str) -> None:
    """A column of the result is the same whichever other rows the weight has."""
    if form == "fp8_blocks":
        pytest.skip("rows of a grid come by 128")
    data, scale, _ = packing.make_packed(family, form, 160, 576, device).weight
    x = cases.normal((3, 576), torch.bfloat16, device, seed=0)
    whole = family.linear(x, family.PackedWeight(data, scale, (160, 576)))
    part = data[2:4] if form == "nvfp4" else data[32:64]
    result = family.linear(x, family.PackedWeight(part, scale[32:64], (32, 576)))
    assert_bitwise(result, whole[:, 32:64])
