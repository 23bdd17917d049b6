"""What only a GPU can show: equal bits on both devices, graph replay, launch order, large sizes."""

import pytest
import quant_cases as cases
import torch
from _common.family import replayed, write_late
from _common.tolerance import assert_bitwise

FP8 = torch.float8_e4m3fn


def same(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert_bitwise(one.view(torch.uint8).cpu(), other.view(torch.uint8).cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(33, 4096), (257, 1000), (3, 70_001)])
def test_both_devices_give_the_same_bits(quant, cuda, dtype, shape):
    x = cases.rows(*shape, dtype=dtype)
    far = x.to(cuda)
    same(quant.quantize_fp8(far), quant.quantize_fp8(x))
    same(quant.quantize_fp8(far, per="tensor"), quant.quantize_fp8(x, per="tensor"))
    same(quant.quantize_int8(far), quant.quantize_int8(x))
    importance = torch.rand(shape[1])
    for given in (None, importance):
        found = quant.quantize_nvfp4(x, importance=given)
        moved = None if given is None else given.to(cuda)
        same(quant.quantize_nvfp4(far, importance=moved), found)
    tiles = quant.tile_nvfp4(found.codes, found.block_scales)
    far_tiles = quant.tile_nvfp4(found.codes.to(cuda), found.block_scales.to(cuda))
    assert_bitwise(far_tiles.cpu(), tiles)
    same(quant.untile_nvfp4(far_tiles, shape), quant.untile_nvfp4(tiles, shape))
    for out in (torch.bfloat16, torch.float16, torch.float32):
        scale = torch.rand(shape[0]) * 1e-3
        values = quant.dequantize_nvfp4_tiles(tiles, scale, shape, dtype=out)
        actual = quant.dequantize_nvfp4_tiles(far_tiles, scale.to(cuda), shape, dtype=out)
        assert_bitwise(actual.cpu(), values)


def test_replay_equals_eager(quant, cuda):
    x = cases.rows(4, 4096, dtype=torch.bfloat16, device=cuda)
    weight = quant.quantize_nvfp4(cases.rows(64, 4096, device=cuda))
    tiles = quant.tile_nvfp4(weight.codes, weight.block_scales)

    def chain(data, scale, values, back):
        quant.quantize_fp8(x, check_finite=False, out=data, scale_out=scale)
        quant.dequantize_fp8(data, scale, out=back)
        quant.dequantize_nvfp4_tiles(tiles, weight.global_scale, (64, 4096), out=values)

    def outputs():
        return (
            torch.zeros(4, 4096, device=cuda).to(FP8),
            torch.zeros(4, device=cuda),
            torch.zeros(64, 4096, device=cuda, dtype=torch.bfloat16),
            torch.zeros_like(x),
        )

    expected, actual = outputs(), outputs()
    chain(*expected)
    replayed(lambda: chain(*actual))
    same(actual, expected)


def test_inputs_may_have_a_producer_in_flight(quant, cuda):
    x = cases.rows(16, 4096, dtype=torch.bfloat16, device=cuda)
    found = quant.quantize_nvfp4(x)
    tiles = quant.tile_nvfp4(found.codes, found.block_scales)
    data, scale = quant.quantize_fp8(x)
    one = torch.ones(1, device=cuda)
    calls = (
        (x, lambda late: quant.quantize_fp8(late, check_finite=False)[0].view(torch.uint8)),
        (data, lambda late: quant.dequantize_fp8(late, scale)),
        (scale, lambda late: quant.dequantize_fp8(data, late)),
        (found.codes, lambda late: quant.dequantize_nvfp4(late, found.block_scales, one)),
        (tiles, lambda late: quant.dequantize_nvfp4_tiles(late, one, (16, 4096))),
        (tiles, lambda late: quant.untile_nvfp4(late, (16, 4096))[0]),
    )
    for operand, call in calls:
        expected = call(operand)
        late = torch.zeros_like(operand)
        torch.cuda.synchronize()
        write_late(late, operand)
        assert_bitwise(call(late), expected)


def test_a_successor_does_not_read_early(quant, cuda):
    """Quantising a large weight, then reading its last rows in the next kernel."""
    weight = cases.rows(20_000, 4096, dtype=torch.bfloat16, device=cuda)
    expected = weight.float()
    data, scale = quant.quantize_int8(weight)
    torch.cuda.synchronize()
    data.zero_()
    quant.quantize_int8(weight, out=data, scale_out=scale)
    actual = quant.dequantize_int8(data[-8:], scale[-8:], dtype=torch.float32)
    error = (actual - expected[-8:]).abs().amax(-1)
    assert (error <= scale[-8:] * 0.5001).all()


@pytest.mark.parametrize("rows,size", [(70_001, 64), (2_003, 4096)])
def test_many_rows(quant, cuda, rows, size):
    x = cases.rows(rows, size, dtype=torch.bfloat16, device=cuda)
    for quantise, dequantise in (
        (quant.quantize_fp8, quant.dequantize_fp8),
        (quant.quantize_int8, quant.dequantize_int8),
    ):
        data, scale = quantise(x)
        last, last_scale = quantise(x[-1:])
        same((last, last_scale), (data[-1:], scale[-1:]))
        expected = (data.float() * scale[:, None]).to(torch.bfloat16)
        assert_bitwise(dequantise(data, scale), expected)


def test_runs_on_the_current_stream(quant, cuda):
    x = cases.rows(2, 4096, dtype=torch.bfloat16, device=cuda)
    expected = quant.quantize_fp8(x)
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        write_late(late, x)
        actual = quant.quantize_fp8(late, check_finite=False)
    side.synchronize()
    same(actual, expected)
