"""Where operands lie: offsets, gaps, weight strides, outputs between guards, shared memory."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import linear_cases as cases
import pytest
import torch
from _common.buffers import Guarded, gapped_copy, offset_copy
from _common.tolerance import assert_accurate, assert_bitwise

ROWS = [1, 5, 8, 12]


def operands(rows: int, n: int, k: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    return {
        "x": cases.normal((rows, k), dtype, device, seed=0),
        "weight": cases.make_weight(n, k, dtype, device),
        **cases.make_prologue("add_normed_norm", (rows, k), dtype, device),
        **cases.make_epilogue("bias_residual", (rows, n), dtype, device),
    }


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("place", [offset_copy, lambda t: gapped_copy(t, 3)], ids=["offset", "gap"])
@pytest.mark.parametrize(
    "moved", ["x", "weight", "branch", "residual", "bias", "norm_weight", "branch_norm_weight"]
)
def test_placed_operand(
    family: ModuleType, device: str, dtype: torch.dtype, rows: int, place: Any, moved: str
) -> None:
    """Each operand off its alignment, or with gaps of NaN between rows."""
    arguments = operands(rows, 80, 192, dtype, device)
    placed = {**arguments, moved: place(arguments[moved])}
    assert_accurate(
        family.linear(**cases.with_residual_out(placed)),
        cases.linear(**cases.double(arguments)),
        cases.linear(**arguments),
    )


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("n", "k"), [(96, 64), (65, 33), (1, 50), (50, 1), (2304, 768)])
def test_transposed_weight(
    family: ModuleType, device: str, dtype: torch.dtype, rows: int, n: int, k: int
) -> None:
    """``[K, N]`` storage given as its transpose, as GPT-2 keeps its weights."""
    arguments = operands(rows, n, k, dtype, device)
    arguments["weight"] = arguments["weight"].t().contiguous().t()
    assert_accurate(
        family.linear(**cases.with_residual_out(arguments)),
        cases.linear(**cases.double(arguments)),
        cases.linear(**arguments),
    )


@pytest.mark.parametrize("rows", ROWS)
def test_strided_weight(family: ModuleType, device: str, rows: int) -> None:
    """Every second column, every second row, halves of one packed weight."""
    x = cases.normal((rows, 48), torch.bfloat16, device, seed=0)
    packed = cases.make_weight(80, 96, torch.bfloat16, device)
    for weight in (packed[:, ::2], packed[::2, :48], packed[:, 48:]):
        dense = weight.contiguous()
        exact = cases.linear(x.double(), dense.double())
        assert_accurate(family.linear(x, weight), exact, cases.linear(x, dense))
    halves = cases.make_weight(80, 48, torch.bfloat16, device)
    gate, up = halves[:40], halves[40:]
    assert_bitwise(
        family.gated_linear(x, gate, up), family.gated_linear(x, gate.clone(), up.clone())
    )


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("n", "k"), [(80, 192), (33, 65)])
@pytest.mark.parametrize(("offset", "row_gap"), [(0, 0), (1, 0), (8, 8), (3, 5)])
def test_out(
    family: ModuleType,
    device: str,
    dtype: torch.dtype,
    rows: int,
    n: int,
    k: int,
    offset: int,
    row_gap: int,
) -> None:
    """Outputs between guard bands: every element written, none beside, the values of the
    allocating form; ``out`` itself is returned."""
    arguments = operands(rows, n, k, dtype, device)
    residual_out = torch.empty_like(arguments["x"])
    expected = family.linear(**arguments, residual_out=residual_out)
    place = {"offset": offset, "row_gap": row_gap}
    out = Guarded((rows, n), dtype, device, **place)
    stream = Guarded((rows, k), dtype, device, **place)
    assert family.linear(**arguments, residual_out=stream.view, out=out.view) is out.view
    out.assert_written()
    stream.assert_written()
    assert_bitwise(out.view, expected)
    assert_bitwise(stream.view, residual_out)


@pytest.mark.parametrize("rows", ROWS)
def test_out_of_the_other_functions(
    family: ModuleType, device: str, dtype: torch.dtype, rows: int
) -> None:
    x = cases.normal((rows, 64), dtype, device, seed=0)
    weights = [cases.make_weight(n, 64, dtype, device, seed=n) for n in (24, 8, 9)]
    out = Guarded((rows, 41), dtype, device, row_gap=7)
    results = family.linear_split(x, weights, out=out.view)
    out.assert_written()
    assert [result.shape[1] for result in results] == [24, 8, 9]
    for result, expected in zip(results, family.linear_split(x, weights), strict=True):
        assert result.untyped_storage().data_ptr() == out.view.untyped_storage().data_ptr()
        assert_bitwise(result, expected)

    gated = Guarded((rows, 24), dtype, device, offset=1)
    assert family.gated_linear(x, weights[0], weights[0], out=gated.view) is gated.view
    gated.assert_written()
    assert_bitwise(gated.view, family.gated_linear(x, weights[0], weights[0]))

    wide = Guarded((rows, 24), torch.float32, device)
    family.linear(x, weights[0], out=wide.view)
    wide.assert_written()
    assert_bitwise(wide.view, family.linear(x, weights[0], out_dtype=torch.float32))


@pytest.mark.parametrize("shape", [(2, 3, 64), (1, 1, 64), (4, 5, 64)])
def test_out_with_leading_dims(family: ModuleType, device: str, shape: tuple[int, ...]) -> None:
    x = cases.normal(shape, torch.bfloat16, device, seed=0)
    weight = cases.make_weight(24, 64, torch.bfloat16, device)
    buffer = Guarded((*shape[:-1], 24), torch.bfloat16, device, row_gap=8)
    assert family.linear(x, weight, out=buffer.view) is buffer.view
    buffer.assert_written()
    assert_bitwise(buffer.view, family.linear(x, weight))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("gap", [0, 4])
def test_residual_in_place(
    family: ModuleType, device: str, dtype: torch.dtype, rows: int, gap: int
) -> None:
    """``out`` may be the residual."""
    x = cases.normal((rows, 64), dtype, device, seed=0)
    weight = cases.make_weight(48, 64, dtype, device)
    stream = gapped_copy(cases.normal((rows, 48), dtype, device, seed=5), gap)
    expected = family.linear(x, weight, residual=stream, scale=0.5)
    family.linear(x, weight, residual=stream, scale=0.5, out=stream)
    assert_bitwise(stream, expected)


def test_columns_of_one_buffer(family: ModuleType, device: str) -> None:
    """Input, residual and output may be different columns of one buffer."""
    buffer = cases.normal((4, 160), torch.bfloat16, device, seed=0)
    weight = cases.make_weight(32, 64, torch.bfloat16, device)
    x, residual, out = buffer[:, :64], buffer[:, 64:96], buffer[:, 96:128]
    expected = family.linear(x.clone(), weight, residual=residual.clone())
    untouched = buffer[:, 128:].clone()
    family.linear(x, weight, residual=residual, out=out)
    assert_bitwise(out, expected)
    assert_bitwise(buffer[:, 128:], untouched)


@pytest.mark.parametrize("case", ["x", "branch", "residual", "stream_x", "stream_branch", "rows"])
def test_overlap_is_refused(family: ModuleType, device: str, case: str) -> None:
    """Memory that one block would write while another reads it; nothing is written."""
    buffer = cases.normal((6, 64), torch.bfloat16, device, seed=0)
    weight = cases.make_weight(64, 64, torch.bfloat16, device)
    arguments: dict[str, Any] = {"x": buffer[:4].clone(), "weight": weight}
    message = {
        "x": "out must not share memory with x",
        "branch": "out must not share memory with branch",
        "residual": "out must not share memory with residual",
        "stream_x": "residual_out must not share memory with x",
        "stream_branch": "residual_out must not share memory with branch",
        "rows": "rows of out must not share memory",
    }[case]
    if case == "x":
        arguments |= {"x": buffer[:4], "out": buffer[1:5]}
    elif case == "branch":
        stream = torch.empty_like(buffer[:4])
        arguments |= {"branch": buffer[:4], "out": buffer[:4], "residual_out": stream}
    elif case == "residual":
        arguments |= {"residual": buffer[:4], "out": buffer[1:5]}
    elif case == "stream_x":
        branch = torch.ones_like(buffer[:4])
        arguments |= {"x": buffer[:4], "branch": branch, "residual_out": buffer[:4]}
    elif case == "stream_branch":
        arguments |= {"branch": buffer[:4], "residual_out": buffer[:4]}
    else:
        arguments |= {"out": buffer.as_strided((4, 64), (32, 1))}
    before = buffer.clone()
    with pytest.raises(RuntimeError, match=f"linear: {message}"):
        family.linear(**arguments)
    assert_bitwise(buffer, before)
