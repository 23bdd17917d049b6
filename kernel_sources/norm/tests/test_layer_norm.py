"""layer_norm: values, layouts, aliases."""

import norm_cases as cases
import pytest
import torch
from _common.buffers import Guarded, gapped_copy, offset_copy
from _common.family import DTYPES
from _common.tolerance import assert_accurate, assert_bitwise


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", cases.SIZES)
@pytest.mark.parametrize("affine", [False, True])
def test_values(norm, device, dtype, size, affine):
    x = cases.rows(3, size, dtype=dtype, device=device)
    weight = cases.parameter(size, dtype=dtype, device=device) if affine else None
    bias = cases.parameter(size, dtype=dtype, device=device, seed=2) if affine else None
    actual = norm.layer_norm(x, weight, bias)
    eager = torch.nn.functional.layer_norm(x, (size,), weight, bias)
    assert_accurate(actual, cases.layer_norm(x, weight, bias), eager)


def test_weight_without_bias_and_bias_without_weight(norm, device):
    x = cases.rows(3, 100, dtype=torch.bfloat16, device=device)
    operand = cases.parameter(100, dtype=torch.float32, device=device)
    for arguments in (dict(weight=operand), dict(bias=operand)):
        eager = cases.layer_norm(x, **arguments, to=x.dtype)
        actual = norm.layer_norm(x, **arguments)
        assert_accurate(actual, cases.layer_norm(x, **arguments), eager)


def test_mean_far_from_zero(norm, device):
    x = cases.rows(3, 1000, dtype=torch.float32, device=device) + 1000.0
    eager = torch.nn.functional.layer_norm(x, (1000,))
    assert_accurate(norm.layer_norm(x), cases.layer_norm(x), eager)


@pytest.mark.parametrize("operand_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(72,), (2, 1, 72), (2, 3, 72), (1, 3, 72)])
def test_modulated(norm, device, operand_dtype, shape):
    x = cases.rows(2, 3, 72, dtype=torch.bfloat16, device=device)
    scale = cases.rows(*shape, dtype=operand_dtype, device=device, seed=2)
    shift = cases.rows(*shape, dtype=operand_dtype, device=device, seed=3)
    actual = norm.layer_norm(x, scale=scale, shift=shift)
    exact = cases.layer_norm(x, scale=scale, shift=shift)
    assert_accurate(actual, exact, cases.layer_norm(x, scale=scale, shift=shift, to=x.dtype))


@pytest.mark.parametrize("size", [64, 65, 4096])
def test_bits_do_not_depend_on_the_layout(norm, device, size):
    x = cases.rows(4, 3, size, dtype=torch.bfloat16, device=device)
    weight = cases.parameter(size, dtype=torch.bfloat16, device=device)
    expected = norm.layer_norm(x, weight, weight)
    assert_bitwise(norm.layer_norm(offset_copy(x), weight, weight), expected)
    assert_bitwise(norm.layer_norm(x, weight, offset_copy(weight)), expected)
    assert_bitwise(norm.layer_norm(gapped_copy(x, 3), weight, weight), expected)
    swapped = norm.layer_norm(x.transpose(0, 1), weight, weight)
    assert_bitwise(swapped, expected.transpose(0, 1).contiguous())


@pytest.mark.parametrize("size", [64, 127, 4096, 65600])
def test_bits_of_a_row_depend_on_that_row_alone(norm, device, size):
    x = cases.rows(8, size, dtype=torch.bfloat16, device=device)
    whole = norm.layer_norm(x)
    for row in range(8):
        assert_bitwise(norm.layer_norm(x[row : row + 1]), whole[row : row + 1])


@pytest.mark.parametrize("size", [1, 64, 127, 65600])
@pytest.mark.parametrize("offset,row_gap", [(0, 0), (1, 0), (3, 5)])
def test_out(norm, device, size, offset, row_gap):
    x = cases.rows(3, size, dtype=torch.bfloat16, device=device)
    buffer = Guarded((3, size), torch.bfloat16, device, offset=offset, row_gap=row_gap)
    assert norm.layer_norm(x, out=buffer.view) is buffer.view
    buffer.assert_written()
    assert_bitwise(buffer.view, norm.layer_norm(x))


def test_in_place_and_empty(norm, device):
    x = cases.rows(3, 200, dtype=torch.bfloat16, device=device)
    expected = norm.layer_norm(x)
    norm.layer_norm(x, out=x)
    assert_bitwise(x, expected)
    assert norm.layer_norm(x[:0]).shape == (0, 200)
