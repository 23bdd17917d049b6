"""The bits of a row depend on that row alone, for 1..8 rows."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import linear_cases as cases
import pytest
import torch
from _common.buffers import gapped_copy, offset_copy
from _common.tolerance import assert_bitwise

SIZES = [(96, 256), (1000, 576), (577, 1001), (48, 4096), (2048, 2048), (33, 4097)]
PER_ROW = ("x", "branch", "residual")


def call(family: ModuleType, function: str, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """All tensors that the call computes."""
    arguments = cases.with_residual_out(arguments)
    result = getattr(family, function)(**arguments)
    results = list(result) if isinstance(result, tuple) else [result]
    return results + [arguments[name] for name in ("residual_out",) if name in arguments]


def rows_of(arguments: dict[str, Any], rows: Any) -> dict[str, Any]:
    """The same call for some of its rows."""
    return {name: v[rows] if name in PER_ROW else v for name, v in arguments.items()}


def make_call(
    function: str, n: int, k: int, before: str, dtype: torch.dtype, device: str
) -> dict[str, Any]:
    """Arguments for eight rows."""
    arguments = {
        "x": cases.normal((8, k), dtype, device, seed=0),
        **cases.make_prologue(before, (8, k), dtype, device),
    }
    weight = cases.make_weight(n, k, dtype, device)
    other = cases.make_weight(n, k, dtype, device, seed=2)
    if function == "gated_linear":
        return {**arguments, "gate": weight, "up": other}
    if function == "linear_split":
        return {**arguments, "weights": [weight, other[: n // 2], other[n // 2 :]]}
    return {**arguments, "weight": weight, **cases.make_epilogue("all", (8, n), dtype, device)}


@pytest.mark.parametrize("function", ["linear", "linear_split", "gated_linear"])
@pytest.mark.parametrize("before", cases.PROLOGUES)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_every_number_of_rows(
    family: ModuleType,
    device: str,
    dtype: torch.dtype,
    function: str,
    n: int,
    k: int,
    before: str,
) -> None:
    """M = 1..8 equals M = 1 row by row, in every bit."""
    if device == "cpu" and n * k > 1 << 20 and before != "add_normed_norm":
        pytest.skip("large sizes on the CPU are covered by one prologue")
    arguments = make_call(function, n, k, before, dtype, device)
    single = [call(family, function, rows_of(arguments, slice(m, m + 1))) for m in range(8)]
    for rows in range(1, 9):
        several = call(family, function, rows_of(arguments, slice(0, rows)))
        for i, result in enumerate(several):
            assert_bitwise(result, torch.cat([single[m][i] for m in range(rows)]))


@pytest.mark.parametrize("before", ["none", "norm", "add_normed_norm"])
def test_place_and_neighbours(
    family: ModuleType, device: str, dtype: torch.dtype, before: str
) -> None:
    """A row keeps its bits in another place, and beside rows of NaN."""
    arguments = make_call("linear", 1000, 576, before, dtype, device)
    expected = call(family, "linear", arguments)
    order = torch.tensor([5, 2, 7, 0, 1, 6, 3, 4], device=device)
    for result, wanted in zip(
        call(family, "linear", rows_of(arguments, order)), expected, strict=True
    ):
        assert_bitwise(result, wanted[order])
    poisoned = {**arguments, "x": arguments["x"].clone()}
    poisoned["x"][::2] = float("nan")
    for result, wanted in zip(call(family, "linear", poisoned), expected, strict=True):
        assert_bitwise(result[1::2], wanted[1::2])


@pytest.mark.parametrize(("n", "k"), [(64, 576), (65, 577)])
@pytest.mark.parametrize("place", [offset_copy, lambda t: gapped_copy(t, 3)], ids=["offset", "gap"])
def test_alignment_of_x(
    family: ModuleType, device: str, dtype: torch.dtype, n: int, k: int, place: Any
) -> None:
    """Where x lies does not change a bit."""
    arguments = make_call("linear", n, k, "add_normed_norm", dtype, device)
    expected = call(family, "linear", arguments)
    placed = {name: place(v) if name in PER_ROW else v for name, v in arguments.items()}
    for result, wanted in zip(call(family, "linear", placed), expected, strict=True):
        assert_bitwise(result, wanted)


def test_transposed_weight_rows(family: ModuleType, device: str, dtype: torch.dtype) -> None:
    arguments = make_call("linear", 96, 200, "norm", dtype, device)
    arguments["weight"] = arguments["weight"].t().contiguous().t()
    several = family.linear(**arguments)
    single = [family.linear(**rows_of(arguments, slice(m, m + 1))) for m in range(8)]
    assert_bitwise(several, torch.cat(single))


def test_repeatable(family: ModuleType, device: str, dtype: torch.dtype) -> None:
    """The same call gives the same bits."""
    arguments = make_call("gated_linear", 1000, 576, "add_normed_norm", dtype, device)
    expected = call(family, "gated_linear", arguments)
    for _ in range(5):
        for result, wanted in zip(call(family, "gated_linear", arguments), expected, strict=True):
            assert_bitwise(result, wanted)
