"""rms_norm and add_rms_norm: values, layouts, aliases."""

import norm_cases as cases
import pytest
import torch
from _common.buffers import Guarded, gapped_copy, offset_copy
from _common.family import DTYPES
from _common.tolerance import assert_accurate, assert_bitwise


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", cases.SIZES)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_values(norm, device, dtype, size, zero_centered):
    x = cases.rows(3, size, dtype=dtype, device=device)
    weight = cases.parameter(size, dtype=dtype, device=device)
    arguments = dict(eps=1e-5, zero_centered=zero_centered)
    actual = norm.rms_norm(x, weight, **arguments)
    exact = cases.rms_norm(x, weight, **arguments)
    assert_accurate(actual, exact, cases.rms_norm(x, weight, **arguments, to=dtype))


@pytest.mark.parametrize("shape", [(64,), (1, 64), (0, 64), (2, 0, 64), (2, 3, 4, 64)])
def test_leading_dims(norm, device, shape):
    x = cases.rows(*shape, dtype=torch.bfloat16, device=device)
    actual = norm.rms_norm(x, None)
    assert actual.is_contiguous()
    assert_accurate(actual, cases.rms_norm(x), cases.rms_norm(x, to=x.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_in_fp32(norm, device, dtype):
    x = cases.rows(2, 200, dtype=dtype, device=device)
    weight = cases.parameter(200, dtype=torch.float32, device=device)
    eager = cases.rms_norm(x, weight, to=dtype)
    assert_accurate(norm.rms_norm(x, weight), cases.rms_norm(x, weight), eager)


@pytest.mark.parametrize("operand_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(72,), (2, 1, 72), (3, 72), (2, 3, 72), (1, 3, 72)])
def test_modulated(norm, device, operand_dtype, shape):
    x = cases.rows(2, 3, 72, dtype=torch.bfloat16, device=device)
    weight = cases.parameter(72, dtype=torch.bfloat16, device=device)
    scale = cases.rows(*shape, dtype=operand_dtype, device=device, seed=2)
    shift = cases.rows(*shape, dtype=operand_dtype, device=device, seed=3)
    actual = norm.rms_norm(x, weight, scale=scale, shift=shift)
    exact = cases.rms_norm(x, weight, scale=scale, shift=shift)
    eager = cases.rms_norm(x, weight, scale=scale, shift=shift, to=torch.bfloat16)
    assert_accurate(actual, exact, eager)


def test_modulation_from_a_chunked_projection(norm, device):
    x = cases.rows(2, 5, 64, dtype=torch.bfloat16, device=device)
    projected = cases.rows(2, 1, 128, dtype=torch.bfloat16, device=device, seed=4)
    scale, shift = projected.chunk(2, dim=-1)
    actual = norm.rms_norm(x, None, scale=scale, shift=shift)
    expected = norm.rms_norm(x, None, scale=scale.contiguous(), shift=shift.contiguous())
    assert_bitwise(actual, expected)


@pytest.mark.parametrize("size", [64, 65, 1000, 4096])
def test_bits_do_not_depend_on_the_layout(norm, device, size):
    x = cases.rows(4, 3, size, dtype=torch.bfloat16, device=device)
    weight = cases.parameter(size, dtype=torch.bfloat16, device=device)
    expected = norm.rms_norm(x, weight)
    assert_bitwise(norm.rms_norm(offset_copy(x), weight), expected)
    assert_bitwise(norm.rms_norm(x, offset_copy(weight)), expected)
    assert_bitwise(norm.rms_norm(gapped_copy(x, 3), weight), expected)
    assert_bitwise(norm.rms_norm(gapped_copy(x, 8), weight), expected)
    swapped = norm.rms_norm(x.transpose(0, 1), weight)
    assert_bitwise(swapped, expected.transpose(0, 1).contiguous())
    assert_bitwise(norm.rms_norm(x[1:3, ::2], weight), expected[1:3, ::2].contiguous())


@pytest.mark.parametrize("size", [64, 127, 4096, 65600])
def test_bits_of_a_row_depend_on_that_row_alone(norm, device, size):
    x = cases.rows(8, size, dtype=torch.bfloat16, device=device)
    weight = cases.parameter(size, dtype=torch.bfloat16, device=device)
    whole = norm.rms_norm(x, weight)
    for row in range(8):
        assert_bitwise(norm.rms_norm(x[row : row + 1], weight), whole[row : row + 1])
        assert_bitwise(norm.rms_norm(x[row:], weight), whole[row:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 64, 127, 4096, 65600])
@pytest.mark.parametrize("offset,row_gap", [(0, 0), (1, 0), (0, 8), (3, 5)])
def test_out(norm, device, dtype, size, offset, row_gap):
    x = cases.rows(3, size, dtype=dtype, device=device)
    weight = cases.parameter(size, dtype=dtype, device=device)
    buffer = Guarded((3, size), dtype, device, offset=offset, row_gap=row_gap)
    assert norm.rms_norm(x, weight, out=buffer.view) is buffer.view
    buffer.assert_written()
    assert_bitwise(buffer.view, norm.rms_norm(x, weight))


def test_in_place(norm, device):
    x = cases.rows(3, 200, dtype=torch.bfloat16, device=device)
    expected = norm.rms_norm(x, None)
    norm.rms_norm(x, None, out=x)
    assert_bitwise(x, expected)


def test_large_and_small_values(norm, device):
    x = torch.full((2, 512), 1e-3, dtype=torch.float16, device=device)
    x[1] = 6e4  # the square leaves fp16
    eager = torch.ones_like(x)
    assert_accurate(norm.rms_norm(x, None, eps=0.0), cases.rms_norm(x, eps=0.0), eager)


def test_row_of_zeros_is_zero(norm, device):
    x = torch.zeros(2, 48, device=device)
    assert_bitwise(norm.rms_norm(x, None), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", cases.SIZES)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_add_values(norm, device, dtype, size, zero_centered):
    x = cases.rows(3, size, dtype=dtype, device=device)
    residual = cases.rows(3, size, dtype=dtype, device=device, seed=5)
    weight = cases.parameter(size, dtype=dtype, device=device)
    arguments = dict(eps=1e-6, zero_centered=zero_centered)
    actual, total = norm.add_rms_norm(x, residual, weight, **arguments)
    assert_bitwise(total, x + residual)
    assert_bitwise(actual, norm.rms_norm(x + residual, weight, **arguments))


@pytest.mark.parametrize("size", [64, 127, 4096, 65600])
@pytest.mark.parametrize("offset,row_gap", [(0, 0), (1, 0), (3, 5)])
def test_add_out(norm, device, size, offset, row_gap):
    x = cases.rows(3, size, dtype=torch.bfloat16, device=device)
    residual = cases.rows(3, size, dtype=torch.bfloat16, device=device, seed=5)
    out = Guarded((3, size), torch.bfloat16, device, offset=offset, row_gap=row_gap)
    total = Guarded((3, size), torch.bfloat16, device, offset=offset)
    results = norm.add_rms_norm(x, residual, None, out=out.view, residual_out=total.view)
    assert results[0] is out.view
    assert results[1] is total.view
    out.assert_written()
    total.assert_written()
    assert_bitwise(total.view, x + residual)
    assert_bitwise(out.view, norm.rms_norm(x + residual, None))


@pytest.mark.parametrize("size", [64, 65600])
def test_add_in_place(norm, device, size):
    x = cases.rows(3, size, dtype=torch.bfloat16, device=device)
    residual = cases.rows(3, size, dtype=torch.bfloat16, device=device, seed=5)
    expected, total = norm.add_rms_norm(x, residual, None)
    norm.add_rms_norm(x, residual, None, out=x, residual_out=residual)
    assert_bitwise(x, expected)
    assert_bitwise(residual, total)


def test_add_with_one_output_given(norm, device):
    x = cases.rows(3, 64, dtype=torch.bfloat16, device=device)
    expected, total = norm.add_rms_norm(x, x, None)
    given = torch.empty_like(x)
    for arguments in (dict(out=given), dict(residual_out=given)):
        actual, summed = norm.add_rms_norm(x, x, None, **arguments)
        assert_bitwise(actual, expected)
        assert_bitwise(summed, total)
