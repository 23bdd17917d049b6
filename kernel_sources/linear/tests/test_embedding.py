"""embedding: rows copied bit for bit, or scaled with one rounding."""

from __future__ import annotations

from types import ModuleType

import linear_cases as cases
import pytest
import torch
from _common.buffers import Guarded, gapped_copy, offset_copy
from _common.family import DTYPES
from _common.tolerance import assert_bitwise


def make_ids(shape: tuple[int, ...], vocabulary: int, device: str) -> torch.Tensor:
    return torch.randint(vocabulary, shape, generator=cases.generator(device, 7), device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 7, 576, 4097, 8192])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (8,), (2, 3), (300,)])
def test_values(
    family: ModuleType, device: str, dtype: torch.dtype, d: int, shape: tuple[int, ...]
) -> None:
    table = cases.normal((50, d), dtype, device, seed=0)
    ids = make_ids(shape, 50, device)
    assert_bitwise(family.embedding(ids, table), table[ids])
    scaled = (table.float() * 33.9411).to(dtype)
    assert_bitwise(family.embedding(ids, table, scale=33.9411), scaled[ids])


@pytest.mark.parametrize("place", [offset_copy, lambda t: gapped_copy(t, 3)], ids=["offset", "gap"])
def test_placed_table(family: ModuleType, device: str, place: object) -> None:
    table = cases.normal((20, 72), torch.bfloat16, device, seed=0)
    ids = make_ids((5,), 20, device)
    assert_bitwise(family.embedding(ids, place(table)), table[ids])


def test_strided_ids(family: ModuleType, device: str) -> None:
    table = cases.normal((20, 72), torch.bfloat16, device, seed=0)
    ids = make_ids((6, 4), 20, device)
    assert_bitwise(family.embedding(ids[:, 1], table), table[ids[:, 1]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "offset"), [(64, 0), (65, 0), (64, 1)])
def test_out(family: ModuleType, device: str, dtype: torch.dtype, d: int, offset: int) -> None:
    table = cases.normal((20, d), dtype, device, seed=0)
    ids = make_ids((2, 3), 20, device)
    out = Guarded((2, 3, d), dtype, device, offset=offset)
    assert family.embedding(ids, table, out=out.view) is out.view
    out.assert_written()
    assert_bitwise(out.view, table[ids])


def test_largest_index(family: ModuleType, device: str) -> None:
    """A vocabulary of true size, its last row among the ids."""
    table = cases.normal((151936, 64), torch.bfloat16, device, seed=0)
    ids = torch.tensor([151935, 0, 75000], device=device)
    assert_bitwise(family.embedding(ids, table), table[ids])


def test_id_outside_on_the_cpu(family: ModuleType) -> None:
    table = torch.ones(20, 8)
    with pytest.raises(IndexError):
        family.embedding(torch.tensor([3, 20]), table)


@pytest.mark.parametrize("dtype", DTYPES)
def test_id_outside_on_cuda(family: ModuleType, cuda: str, dtype: torch.dtype) -> None:
    """Rows of NaN, and nothing else is touched."""
    table = cases.normal((20, 72), dtype, cuda, seed=0)
    result = family.embedding(torch.tensor([3, 20, -1, 7], device=cuda), table)
    assert result[1:3].isnan().all()
    assert_bitwise(result[0::3], table[[3, 7]])
