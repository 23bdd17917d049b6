"""The decode layout of NVFP4: each bit in its place, and back."""

import pytest
import quant_cases as cases
import torch
from _common.buffers import Guarded
from _common.family import DTYPES
from _common.tolerance import assert_bitwise

SHAPES = [(1, 2), (16, 256), (17, 300), (5, 18), (40, 512), (33, 1000)]


def random_weight(N, K, device, seed=0):
    """Every code and every scale byte, a tenth of the scales zero."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (N, K), generator=generator, dtype=torch.uint8)
    scales = torch.randint(1, 0x7F, (N, -(-K // 16)), generator=generator, dtype=torch.uint8)
    scales[torch.rand(scales.shape, generator=generator) < 0.1] = 0
    codes[scales.repeat_interleave(16, 1)[:, :K] == 0] = 0
    return codes.to(device), scales.to(device)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_bit_has_its_place(quant, device, shape):
    codes, scales = random_weight(*shape, device)
    packed, block_scales = quant.pack_nibbles(codes), scales.view(torch.float8_e4m3fn)
    tiles = quant.tile_nvfp4(packed, block_scales)
    assert_bitwise(tiles.cpu(), cases.tile(codes.cpu(), scales.cpu()))
    back, back_scales = quant.untile_nvfp4(tiles, shape)
    assert_bitwise(back, packed)
    assert_bitwise(back_scales.view(torch.uint8), scales)


@pytest.mark.parametrize("shape", [(3, 1), (17, 301), (20, 255)])
def test_odd_columns(quant, device, shape):
    codes, scales = random_weight(*shape, device)
    packed, block_scales = quant.pack_nibbles(codes), scales.view(torch.float8_e4m3fn)
    tiles = quant.tile_nvfp4(packed, block_scales)
    assert_bitwise(tiles.cpu(), cases.tile(codes.cpu(), scales.cpu()))
    back, back_scales = quant.untile_nvfp4(tiles, shape)
    assert_bitwise(back, packed)
    assert_bitwise(back_scales.view(torch.uint8), scales)
    one = torch.ones(1, device=device)
    assert_bitwise(
        quant.dequantize_nvfp4_tiles(tiles, one, shape),
        quant.dequantize_nvfp4(packed, block_scales, one, columns=shape[1]),
    )


def test_codes_under_a_zero_scale_become_zero(quant, device):
    packed = torch.full((16, 128), 0xFF, dtype=torch.uint8, device=device)
    scales = torch.zeros(16, 16, dtype=torch.uint8, device=device)
    scales[:, 0] = 1
    tiles = quant.tile_nvfp4(packed, scales.view(torch.float8_e4m3fn))
    back, _ = quant.untile_nvfp4(tiles, (16, 256))
    assert (back[:, :8] == 0xFF).all()
    assert not back[:, 8:].any()


def test_every_scale_is_exact(quant, device):
    scales = torch.arange(0x7F, dtype=torch.uint8, device=device).view(1, -1)
    codes = torch.full((1, 0x7F * 8), 0x22, dtype=torch.uint8, device=device)  # 1.0 everywhere
    tiles = quant.tile_nvfp4(codes, scales.view(torch.float8_e4m3fn))
    _, back = quant.untile_nvfp4(tiles, (1, 0x7F * 16))
    assert_bitwise(back.view(torch.uint8), scales)
    one = torch.ones(1, device=device)
    values = quant.dequantize_nvfp4_tiles(tiles, one, (1, 0x7F * 16), dtype=torch.float32)
    assert_bitwise(values[0, ::16].cpu(), torch.tensor(cases.E4M3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("offset,row_gap", [(0, 0), (1, 0), (3, 5)])
@pytest.mark.parametrize("per_row", [False, True])
def test_dequantize_tiles(quant, device, dtype, shape, offset, row_gap, per_row):
    codes, scales = random_weight(*shape, device)
    packed, block_scales = quant.pack_nibbles(codes), scales.view(torch.float8_e4m3fn)
    scale = torch.rand(shape[0] if per_row else 1, device=device) * 0.01 + 1e-4
    tiles = quant.tile_nvfp4(packed, block_scales)
    out = Guarded(shape, dtype, device, offset=offset, row_gap=row_gap)
    assert quant.dequantize_nvfp4_tiles(tiles, scale, shape, out=out.view) is out.view
    out.assert_intact()
    expected = quant.dequantize_nvfp4(packed, block_scales, scale, dtype=dtype)
    assert_bitwise(out.view, expected)


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-149, 2.0**110])
def test_extreme_scales(quant, device, scale):
    codes, scales = random_weight(16, 256, device)
    packed, block_scales = quant.pack_nibbles(codes), scales.view(torch.float8_e4m3fn)
    factor = torch.full((1,), scale, device=device)
    actual = quant.dequantize_nvfp4_tiles(
        quant.tile_nvfp4(packed, block_scales), factor, (16, 256), dtype=torch.float32
    )
    expected = quant.dequantize_nvfp4(packed, block_scales, factor, dtype=torch.float32)
    assert_bitwise(actual, expected)


def test_tile_out(quant, device):
    codes, scales = random_weight(17, 300, device)
    packed, block_scales = quant.pack_nibbles(codes), scales.view(torch.float8_e4m3fn)
    out = Guarded((2, 2, 2304), torch.uint8, device)
    assert quant.tile_nvfp4(packed, block_scales, out=out.view) is out.view
    out.assert_intact()
    assert_bitwise(out.view, quant.tile_nvfp4(packed, block_scales))
