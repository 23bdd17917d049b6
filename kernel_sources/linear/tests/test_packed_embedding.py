"""embedding with a quantised table: each row dequantised in fp32 and rounded once."""

from __future__ import annotations

from types import ModuleType

import linear_cases as cases
import packing
import pytest
import torch
from _common.buffers import Guarded, gapped_copy, offset_copy
from _common.family import DTYPES
from _common.tolerance import assert_bitwise

FORMATS = pytest.mark.parametrize("form", packing.FORMATS)


def rounded(rows: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (rows * scale).to(dtype)


@FORMATS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("v", "d"), [(1, 1), (16, 256), (37, 300), (130, 520), (50, 4097)])
def test_every_row(
    family: ModuleType, device: str, form: str, dtype: torch.dtype, v: int, d: int
) -> None:
    """All rows in turn are the whole matrix: the family reads the layout that the tests write."""
    table, dense = packing.make_packed(family, form, v, d, device)
    ids = torch.arange(v, device=device)
    assert_bitwise(family.embedding(ids, table, out_dtype=dtype), rounded(dense, dtype))
    scaled = family.embedding(ids, table, scale=33.9411, out_dtype=dtype)
    assert_bitwise(scaled, rounded(dense, dtype, 33.9411))


@FORMATS
@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (300,)])
def test_ids_and_default_dtype(
    family: ModuleType, device: str, form: str, shape: tuple[int, ...]
) -> None:
    table, dense = packing.make_packed(family, form, 50, 72, device)
    ids = torch.randint(50, shape, generator=cases.generator(device, 7), device=device)
    assert_bitwise(family.embedding(ids, table), dense[ids].bfloat16())
    if len(shape) == 2:
        assert_bitwise(family.embedding(ids[:, 1], table), dense[ids[:, 1]].bfloat16())


@FORMATS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "offset"), [(64, 0), (65, 0), (64, 1)])
def test_out(
    family: ModuleType, device: str, form: str, dtype: torch.dtype, d: int, offset: int
) -> None:
    """The dtype of ``out`` is that of the result."""
    table, dense = packing.make_packed(family, form, 20, d, device)
    ids = torch.tensor([[3, 0, 19], [7, 7, 1]], device=device)
    out = Guarded((2, 3, d), dtype, device, offset=offset)
    assert family.embedding(ids, table, out=out.view) is out.view
    out.assert_written()
    assert_bitwise(out.view, dense[ids].to(dtype))


@pytest.mark.parametrize("form", ["fp8", "int8"])
@pytest.mark.parametrize("place", [offset_copy, lambda t: gapped_copy(t, 3)], ids=["offset", "gap"])
def test_placed_table(family: ModuleType, device: str, form: str, place: object) -> None:
    (data, scale, shape), dense = packing.make_packed(family, form, 20, 72, device)
    placed = place(data.view(torch.int8)).view(data.dtype)
    ids = torch.tensor([3, 0, 19], device=device)
    result = family.embedding(ids, family.PackedWeight(placed, scale, shape))
    assert_bitwise(result, dense[ids].bfloat16())


@FORMATS
def test_largest_index(family: ModuleType, device: str, form: str) -> None:
    """More rows than 16 bits count, the last one among the ids."""
    table, dense = packing.make_packed(family, form, 66000, 16, device)
    ids = torch.tensor([65999, 0, 40000], device=device)
    assert_bitwise(family.embedding(ids, table), dense[ids].bfloat16())


@FORMATS
def test_id_outside_on_the_cpu(family: ModuleType, form: str) -> None:
    table = packing.make_packed(family, form, 20, 72, "cpu").weight
    for outside in (20, -1):
        with pytest.raises(IndexError, match=r"^embedding: ids must be in \[0, 20\)"):
            family.embedding(torch.tensor([3, outside]), table)


@FORMATS
def test_id_outside_on_cuda(family: ModuleType, cuda: str, form: str) -> None:
    """Rows of NaN, and nothing else is touched."""
    table, dense = packing.make_packed(family, form, 20, 72, cuda)
    result = family.embedding(torch.tensor([3, 20, -1, 7], device=cuda), table)
    assert result[1:3].isnan().all()
    assert_bitwise(result[0::3], dense[[3, 7]].bfloat16())


def test_every_fp8_byte(family: ModuleType, device: str) -> None:
    """All values of E4M3 are exact, subnormals and both zeros too; its NaN stays NaN."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    table = family.PackedWeight(codes[None], torch.ones(1, device=device), (1, 256))
    ids = torch.zeros(1, dtype=torch.int64, device=device)
    for dtype in DTYPES:
        [row] = family.embedding(ids, table, out_dtype=dtype)
        wanted = codes.to(dtype)
        assert row.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
        assert_bitwise(row[~row.isnan()], wanted[~wanted.isnan()])
