"""quantize_fp8, quantize_int8 and their reverse: bits, layouts, special values."""

import pytest
import quant_cases as cases
import torch
from _common.buffers import Guarded, gapped_copy, offset_copy
from _common.family import DTYPES
from _common.tolerance import assert_bitwise

FP8 = torch.float8_e4m3fn


def bits(tensor):
    return tensor.view(torch.uint8).cpu()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", cases.SIZES)
def test_fp8_rows(quant, device, dtype, size):
    x = cases.rows(5, size, dtype=dtype, device=device)
    data, scale = quant.quantize_fp8(x)
    assert_bitwise(scale, cases.row_scale(x, 448))
    assert_bitwise(bits(data), cases.fp8_bytes(x, scale[:, None]))
    assert (data.float().abs().amax(-1) == 448).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_tensor(quant, device, dtype):
    x = cases.rows(5, 100, dtype=dtype, device=device)
    data, scale = quant.quantize_fp8(x, per="tensor")
    assert_bitwise(scale, cases.row_scale(x.reshape(1, -1), 448))
    assert_bitwise(bits(data), cases.fp8_bytes(x, scale))


@pytest.mark.parametrize("shape", [(), (1,), (4, 3)])
def test_fp8_given_scale(quant, device, shape):
    x = cases.rows(4, 3, 70, dtype=torch.bfloat16, device=device)
    scale = torch.rand(shape, device=device) * 0.01 + 0.001  # small enough that some saturate
    data, same = quant.quantize_fp8(x, scale=scale)
    assert same is scale
    wide = scale if scale.numel() == 1 else scale[..., None]
    assert_bitwise(bits(data), cases.fp8_bytes(x, wide))
    assert (data.float().abs() == 448).any()


def test_fp8_every_value_and_every_tie(quant, device):
    grid = torch.tensor(cases.E4M3)
    middles = (grid[1:] + grid[:-1]) / 2
    values = torch.cat((grid, middles, middles.nextafter(grid[1:]), middles.nextafter(grid[:-1])))
    values = torch.cat((values, -values, torch.tensor([1e9, -1e9, 464.0, 480.0, 2.0**-10])))
    one = torch.ones(1, device=device)
    data, _ = quant.quantize_fp8(values.to(device), scale=one)
    assert_bitwise(bits(data), cases.fp8_bytes(values, torch.ones(1)))
    assert_bitwise(bits(data)[: len(grid)], torch.arange(0x7F, dtype=torch.uint8))
    back = quant.dequantize_fp8(data, one, dtype=torch.float32)
    assert_bitwise(back[: len(grid)].cpu(), grid)


def test_fp8_zeros_and_signs(quant, device):
    x = torch.tensor([[0.0, -0.0, 0.0], [1.0, -0.0, -1e-9]], device=device)
    data, scale = quant.quantize_fp8(x)
    assert scale.tolist() == [1.0, pytest.approx(1 / 448)]
    assert bits(data).tolist() == [[0, 0x80, 0], [0x7E, 0x80, 0x80]]


def test_smallest_magnitudes_keep_a_scale(quant, device):
    x = torch.tensor([[1e-45, 0.0], [2.0**-120, -(2.0**-121)]], device=device)
    for quantise, largest in ((quant.quantize_fp8, 448), (quant.quantize_int8, 127)):
        data, scale = quantise(x)
        assert_bitwise(scale.cpu(), torch.tensor([2.0**-126, max(2.0**-120 / largest, 2.0**-126)]))
        expected = [[0, 0], [64, -32]]
        assert data.float().tolist() == expected


def test_without_the_check_a_nan_poisons_its_row_alone(quant, device):
    x = cases.rows(4, 65, dtype=torch.bfloat16, device=device)
    expected, scales = quant.quantize_fp8(x)
    x[1, 64] = float("nan")
    x[2, 0] = float("-inf")
    data, scale = quant.quantize_fp8(x, check_finite=False)
    assert scale.isnan().tolist() == [False, True, True, False]
    assert (bits(data)[1:3] == 0x7F).all()
    for row in (0, 3):
        assert_bitwise(bits(data)[row], bits(expected)[row])
        assert_bitwise(scale[row], scales[row])
    data, _ = quant.quantize_fp8(x, scale=scales[:1], check_finite=False)
    assert bits(data)[1, 64] == 0x7F
    assert bits(data)[2, 0] == 0xFE


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", cases.SIZES)
def test_int8_rows(quant, device, dtype, size):
    x = cases.rows(5, size, dtype=dtype, device=device)
    data, scale = quant.quantize_int8(x)
    assert_bitwise(scale, cases.row_scale(x, 127))
    assert_bitwise(data, (x.float() / scale[:, None]).round().clamp(-127, 127).to(torch.int8))
    assert (data.abs().amax(-1) == 127).all()


def test_int8_ties_go_to_even(quant, device):
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5]], device=device)
    data, scale = quant.quantize_int8(x)
    assert scale.item() == 1.0
    assert data.tolist() == [[127, 0, 2, 2, 0, -2, -126]]


@pytest.mark.parametrize("name", ["quantize_fp8", "quantize_int8"])
@pytest.mark.parametrize("size", [64, 65, 1000])
def test_bits_do_not_depend_on_the_layout(quant, device, name, size):
    quantise = getattr(quant, name)
    x = cases.rows(4, 3, size, dtype=torch.bfloat16, device=device)
    expected = quantise(x)
    for view in (offset_copy(x), gapped_copy(x, 3), gapped_copy(x, 8)):
        for actual, wanted in zip(quantise(view), expected, strict=True):
            assert_bitwise(actual, wanted)
    for actual, wanted in zip(quantise(x.transpose(0, 1)), expected, strict=True):
        assert_bitwise(actual.transpose(0, 1), wanted)
    for actual, wanted in zip(quantise(x[1:3, ::2]), expected, strict=True):
        assert_bitwise(actual, wanted[1:3, ::2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 16, 65, 1000])
@pytest.mark.parametrize("offset,row_gap", [(0, 0), (1, 0), (0, 8), (3, 5)])
def test_out(quant, device, dtype, size, offset, row_gap):
    x = cases.rows(3, size, dtype=dtype, device=device)
    for name, kind in (("fp8", FP8), ("int8", torch.int8)):
        quantise = getattr(quant, f"quantize_{name}")
        dequantise = getattr(quant, f"dequantize_{name}")
        out = Guarded((3, size), kind, device, offset=offset, row_gap=row_gap)
        scale = Guarded((3,), torch.float32, device)
        data, scales = quantise(x)
        assert quantise(x, out=out.view, scale_out=scale.view)[0] is out.view
        out.assert_intact()
        scale.assert_written()
        assert_bitwise(bits(out.view.contiguous()), bits(data))
        assert_bitwise(scale.view, scales)
        back = Guarded((3, size), dtype, device, offset=offset, row_gap=row_gap)
        assert dequantise(out.view, scale.view, out=back.view) is back.view
        back.assert_intact()
        assert_bitwise(back.view, (data.float() * scales[:, None]).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 300), (300, 257), (40, 1000)])
def test_blocks(quant, device, dtype, shape):
    data, _ = quant.quantize_fp8(cases.rows(*shape, device=device))
    blocks = [-(-size // 128) for size in shape]
    scale = torch.rand(blocks, device=device) + 0.5
    actual = quant.dequantize_fp8(data, scale, dtype=dtype)
    for i in range(blocks[0]):
        for j in range(blocks[1]):
            part = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            assert_bitwise(actual[part], (data[part].float() * scale[i, j]).to(dtype))


@pytest.mark.parametrize("name", ["fp8", "int8"])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_dequantize_scales(quant, device, name, shape):
    data, _ = getattr(quant, f"quantize_{name}")(cases.rows(2, 3, 50, device=device))
    scale = torch.rand(shape, device=device) + 0.5
    wide = scale if scale.numel() == 1 else scale[..., None]
    actual = getattr(quant, f"dequantize_{name}")(data, scale, dtype=torch.float16)
    assert_bitwise(actual, (data.float() * wide).half())


@pytest.mark.parametrize("shape", [(0,), (0, 64), (2, 0, 64), (3, 0)])
def test_empty(quant, device, shape):
    x = torch.empty(shape, device=device)
    for name in ("fp8", "int8"):
        data, scale = getattr(quant, f"quantize_{name}")(x)
        assert data.shape == shape
        assert_bitwise(scale, torch.ones(shape[:-1], device=device))
        assert getattr(quant, f"dequantize_{name}")(data, scale).shape == shape
    assert quant.quantize_fp8(x, per="tensor")[1].tolist() == [1.0]
