"""quantize_nvfp4, its reverse and its nibbles: bits against a search written out, fidelity."""

import pytest
import quant_cases as cases
import torch
from _common.buffers import Guarded, gapped_copy, offset_copy
from _common.family import DTYPES
from _common.tolerance import assert_bitwise


def bits(tensor):
    return tensor.view(torch.uint8).cpu()


def assert_same(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert_bitwise(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 15), (3, 16), (2, 33), (5, 64), (1, 127)])
@pytest.mark.parametrize("weighted", [False, True])
def test_search(quant, device, dtype, shape, weighted):
    weight = cases.rows(*shape, dtype=dtype, device=device)
    importance = torch.rand(shape[1], device=device) if weighted else None
    codes, scales, global_scale = cases.nvfp4(weight, importance)
    actual = quant.quantize_nvfp4(weight, importance=importance)
    assert actual.global_scale.item() == global_scale
    assert_bitwise(bits(actual.block_scales), scales)
    assert_bitwise(actual.codes.cpu(), quant.pack_nibbles(codes))


def test_the_search_beats_the_largest_magnitude(quant, device):
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).to(device)
    found = quant.quantize_nvfp4(weight)
    error = quant.dequantize_nvfp4(*found, dtype=torch.float32) - weight
    blocks = (weight / found.global_scale).view(64, -1, 16)
    plain = (blocks.abs().amax(-1) / 6).to(torch.float8_e4m3fn).float()[..., None]
    grid = torch.tensor(cases.E2M1, device=device)
    codes = cases.nearest(blocks / plain, cases.E2M1).to(device)
    rounded = grid[codes].copysign(blocks) * plain * found.global_scale
    baseline = rounded.view_as(weight) - weight
    assert error.square().mean() < 0.87 * baseline.square().mean()


def test_ties_saturation_and_signs(quant, device):
    """A block whose largest value is 6 keeps the scale 1, for which every value is exact."""
    exact = [6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.5, 0.0, -6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, -0.0]
    weight = torch.tensor([exact], device=device)
    one = torch.ones(1, device=device)
    found = quant.quantize_nvfp4(weight, global_scale=one)
    assert found.block_scales.float().tolist() == [[1.0]]
    codes = quant.unpack_nibbles(found.codes)
    assert codes.tolist() == [[7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8]]
    assert_bitwise(quant.dequantize_nvfp4(*found, dtype=torch.float32), weight)
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0]
    codes, scales, _ = cases.nvfp4(torch.tensor([[2688.0, *ties]]))
    weight = torch.tensor([[2688.0, *ties]], device=device)
    found = quant.quantize_nvfp4(weight)
    assert_bitwise(bits(found.block_scales), scales)
    assert_bitwise(found.codes.cpu(), quant.pack_nibbles(codes))
    saturated = quant.quantize_nvfp4(torch.full((1, 16), 1e6, device=device), global_scale=one)
    assert quant.dequantize_nvfp4(*saturated).float().tolist() == [[2688.0] * 16]


def test_zero_blocks_and_subnormal_scales(quant, device):
    weight = torch.zeros(2, 64, device=device)
    weight[0, 0] = 2688.0
    weight[0, 16:32] = 2.0**-9 * 3  # half of the smallest scale times 6
    weight[0, 33] = -1e-6  # rounds to nothing
    weight[1] = -0.0
    found = quant.quantize_nvfp4(weight)
    scales = found.block_scales.float().cpu()
    assert found.global_scale.item() == 1.0
    assert 0 < scales[0, 1] <= 2.0**-8
    assert scales[0, 2:].tolist() == [0.0, 0.0]
    assert scales[1].tolist() == [0.0] * 4
    assert not found.codes[0, 16:].any()
    assert not found.codes[1].any()
    values = quant.dequantize_nvfp4(*found, dtype=torch.float32)
    assert_bitwise(values[0, 16:32], weight[0, 16:32])


@pytest.mark.parametrize("size", [64, 65, 1000])
def test_bits_do_not_depend_on_the_layout(quant, device, size):
    weight = cases.rows(6, size, dtype=torch.bfloat16, device=device)
    expected = quant.quantize_nvfp4(weight)
    for view in (offset_copy(weight), gapped_copy(weight, 3), gapped_copy(weight, 8)):
        assert_same(quant.quantize_nvfp4(view), expected)
    same = quant.quantize_nvfp4(weight[::2], global_scale=expected.global_scale)
    assert_same(same[:2], [part[::2].contiguous() for part in expected[:2]])
    assert_same(quant.quantize_nvfp4(weight.float()), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 16, 65, 1000])
@pytest.mark.parametrize("offset,row_gap", [(0, 0), (1, 0), (0, 8), (3, 5)])
@pytest.mark.parametrize("per_row", [False, True])
def test_dequantize(quant, device, dtype, size, offset, row_gap, per_row):
    found = quant.quantize_nvfp4(cases.rows(3, size, device=device))
    scale = torch.rand(3 if per_row else 1, device=device) + 0.5
    out = Guarded((3, size), dtype, device, offset=offset, row_gap=row_gap)
    arguments = (found.codes, found.block_scales, scale)
    assert quant.dequantize_nvfp4(*arguments, columns=size, out=out.view) is out.view
    out.assert_intact()
    codes = quant.unpack_nibbles(found.codes, columns=size)
    grid = torch.tensor(cases.E2M1, device=device)
    values = grid[(codes & 7).long()] * torch.where(codes > 7, -1.0, 1.0)
    values = values * found.block_scales.float().repeat_interleave(16, 1)[:, :size]
    assert_bitwise(out.view, (values * scale[:, None]).to(dtype))
    assert_bitwise(quant.dequantize_nvfp4(*arguments, columns=size, dtype=dtype), out.view)


def test_nibbles(quant, device):
    codes = torch.randint(0, 16, (3, 5, 7), dtype=torch.uint8, device=device)
    packed = quant.pack_nibbles(codes)
    assert packed.shape == (3, 5, 4)
    assert_bitwise(packed[..., :3], codes[..., 0:6:2] + 16 * codes[..., 1:6:2])
    assert_bitwise(packed[..., 3], codes[..., 6])
    assert_bitwise(quant.unpack_nibbles(packed, columns=7), codes)
    assert_bitwise(quant.pack_nibbles(codes.transpose(0, 1)), packed.transpose(0, 1))
    every = torch.arange(256, dtype=torch.uint8, device=device)
    assert_bitwise(quant.pack_nibbles(quant.unpack_nibbles(every)), every)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0, 0)])
def test_empty(quant, device, shape):
    found = quant.quantize_nvfp4(torch.empty(shape, device=device))
    assert found.codes.shape == (shape[0], shape[1] // 2)
    assert found.global_scale.tolist() == [1.0]
    assert quant.dequantize_nvfp4(*found).shape == shape
    tiles = quant.tile_nvfp4(found.codes, found.block_scales)
    assert quant.untile_nvfp4(tiles, shape)[0].shape == found.codes.shape
    assert quant.dequantize_nvfp4_tiles(tiles, found.global_scale, shape).shape == shape
