"""PackedTensor: a quantised weight that behaves as the matrix it stands for."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flash_rt.flashrt_hf.quantization import PackedTensor
from flash_rt.structures.precision.formats import packer, unpack
from flash_rt.structures.weights import bound_linear, copy_of

PRECISIONS = ("fp8", "int8", "nvfp4")


def made(precision: str, rows: int = 40, columns: int = 48) -> PackedTensor:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator).to(torch.bfloat16)
    return PackedTensor(packer(precision)(weight), torch.bfloat16)


def layer(precision: str) -> nn.Linear:
    linear = nn.Linear(48, 40, dtype=torch.bfloat16, device="meta")
    linear.weight = nn.Parameter(made(precision), requires_grad=False)
    linear.bias = nn.Parameter(torch.ones(40, dtype=torch.bfloat16), requires_grad=False)
    return linear


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(
        one.float(), other.float(), rtol=2e-2, atol=0.1
    )  # of sums of 48 products


@pytest.mark.parametrize("precision", PRECISIONS)
def test_is_its_values(precision: str) -> None:
    weight = made(precision)
    values = weight.dequantize()
    assert type(values) is torch.Tensor
    assert (weight.shape, weight.dtype, weight.precision) == ((40, 48), values.dtype, precision)
    assert torch.equal(weight.double(), values.double())
    assert torch.equal(weight.t(), values.t())
    assert torch.equal(weight[3:5], values[3:5])
    assert torch.equal(torch.cat(torch.split(weight, 7)), values)
    assert torch.equal(weight + 1, values + 1)
    assert torch.equal(1 - weight, 1 - values)
    assert float(weight.sum()) == float(values.sum())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_linear_and_embedding_read_the_packed_form(precision: str, rows: int) -> None:
    linear = layer(precision)
    x = torch.randn(2, rows, 48, dtype=torch.bfloat16)
    dense = linear.weight.dequantize()
    close(linear(x), F.linear(x, dense, linear.bias))
    close(F.linear(x.transpose(0, 1), linear.weight), F.linear(x.transpose(0, 1), dense))
    ids = torch.tensor([[0, 39], [7, 7]])
    assert torch.equal(F.embedding(ids, linear.weight), F.embedding(ids, dense))
    with pytest.raises(RuntimeError, match="input must be torch.bfloat16"):
        linear(x.half())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_copies_and_files_keep_it_packed(precision: str) -> None:
    linear = layer(precision)
    buffer = io.BytesIO()
    torch.save(linear.weight, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (
        copy.deepcopy(linear).weight,
        linear.weight.clone(),
        linear.weight.detach(),
        linear.to("cpu").weight,
        linear.state_dict()["weight"],
        loaded,
    ):
        assert isinstance(other, PackedTensor)
        assert torch.equal(other.dequantize(), linear.weight.dequantize())
    assert copy.deepcopy(linear).weight.packed.data.data_ptr() != loaded.packed.data.data_ptr()
    assert isinstance(copy.deepcopy(linear).weight, nn.Parameter)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_modules_move_and_cast_it_packed(precision: str) -> None:
    linear = layer(precision)
    parameter, exact = linear.weight, unpack(linear.weight.packed, torch.float32)
    x = torch.randn(2, 48)
    for dtype in (torch.float16, torch.float32):
        linear.to(dtype)
        assert isinstance(linear.weight, PackedTensor)
        assert linear.weight.dtype == dtype
        assert torch.equal(linear.weight.dequantize(), exact.to(dtype))
        close(linear(x.to(dtype)), F.linear(x.to(dtype), exact.to(dtype), linear.bias))
    weight = linear.weight
    weight.data = made("int8", 8, 16)  # as _apply does between devices that share a layout
    assert (weight.shape, weight.precision) == ((8, 16), "int8")
    assert copy_of(weight).precision == "int8"
    assert bound_linear(weight, None).weight.shape == (8, 16)
    with pytest.raises(RuntimeError, match="must be replaced by a quantised weight, got Tensor"):
        weight.data = torch.zeros(8, 16)
    linear = layer(precision).to("meta")
    assert linear.weight.packed.data.is_meta
    assert isinstance(parameter, nn.Parameter)


def test_cannot_be_written() -> None:
    weight = made("fp8")
    for write in (
        lambda: weight.zero_(),
        lambda: weight.copy_(torch.zeros(40, 48)),
        lambda: torch.add(weight, 1, out=weight),
    ):
        with pytest.raises(RuntimeError, match="must not be a quantised weight, which cannot be"):
            write()
    target = torch.zeros(40, 48, dtype=torch.bfloat16)
    assert torch.equal(target.copy_(weight), weight.dequantize())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_structures_find_it(precision: str) -> None:
    weight = layer(precision).weight
    found = copy_of(weight)
    assert found is not None
    assert found is copy_of(weight)
    assert found.precision == precision
    assert bound_linear(weight, None).weight is weight.packed
    # Rows from the middle of a tile, which are brought into tiles of their own.
    part = bound_linear(weight, None, start=8, stop=40).weight
    x = torch.randn(2, 48, dtype=torch.bfloat16)
    from flash_rt.structures import kernels

    linear = kernels.family("linear").linear
    assert torch.equal(linear(x, part), linear(x, weight.packed)[:, 8:])


def test_rows_of_a_block_scaled_weight_start_at_a_block() -> None:
    from flash_rt.flashrt_hf.quantization.scales import eight_bit

    data = torch.randn(300, 64).to(torch.float8_e4m3fn)
    weight = eight_bit(data, torch.rand(3, 1) + 0.5, torch.bfloat16)
    part = bound_linear(weight, None, start=128, stop=300).weight
    assert torch.equal(part.scale, weight.packed.scale[1:])
    with pytest.raises(ValueError, match=r"rows must be taken from a multiple of 128, got 64:300"):
        bound_linear(weight, None, start=64, stop=300)
