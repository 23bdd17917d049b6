"""The ops of this family in plain torch: their CPU implementation and the truth of their tests.

Every step is one fp32 operation that rounds to nearest even, in an order that is written down, so
the CUDA kernels give the same bits.
"""

from __future__ import annotations

import math

import torch

from ._common.fp8 import FP8, FP8_MAX, largest_magnitude, scale_of, to_fp8

BLOCK = 16  # elements of K that share an NVFP4 block scale
FP8_BLOCK = 128  # rows and columns that share a scale of block-scaled FP8
E2M1_MAX = 6.0
NVFP4_MAX = E2M1_MAX * FP8_MAX
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TILE_ROWS, TILE_COLUMNS, TILE_BYTES, TILE_CODE_BYTES = 16, 256, 2304, 2048
# Block scales that the search tries, in steps of the E4M3 code around max(abs(block)) / 6. An
# octave has 8 codes: 2 below clips the largest element a little, 6 above puts it on 4 or 3 and its
# neighbours on a finer part of the E2M1 grid. Further ones are never chosen.
SEARCH_BELOW, SEARCH_ABOVE = 2, 6
CHUNK_ELEMENTS = 1 << 17  # of a weight at a time, to stay in cache
# (bit in a 16-bit half, bit of the code) for the code in each of its four slots.
SLOT_BITS = (
    ((15, 3), (11, 2), (10, 1), (9, 0)),
    ((12, 3), (8, 2), (7, 1), (6, 0)),
    ((14, 3), (5, 2), (4, 1), (3, 0)),
    ((13, 3), (2, 2), (1, 1), (0, 0)),
)


def quantize_rows(
    x: torch.Tensor,
    static_scale: torch.Tensor | None,
    out: torch.Tensor,
    scale_out: torch.Tensor | None,
) -> None:
    largest = FP8_MAX if out.dtype == FP8 else 127.0
    if static_scale is not None:
        scale = static_scale.reshape(()) if static_scale.numel() == 1 else static_scale[..., None]
    else:
        assert scale_out is not None
        scale_out.copy_(scale_of(largest_magnitude(x), largest))
        scale = scale_out[..., None]
    if out.dtype == FP8:
        out.copy_(to_fp8(x, scale))
    else:
        rounded = (x.float() / scale).round().clamp(-largest, largest)
        out.copy_(torch.nan_to_num(rounded).to(torch.int8))


def dequantize(data: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    if scale.numel() == 1:
        factor = scale.reshape(())
    elif scale.dim() == data.dim():
        rows, columns = data.shape
        factor = scale.repeat_interleave(FP8_BLOCK, 0)[:rows]
        factor = factor.repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    else:
        factor = scale[..., None]
    out.copy_((data.float() * factor).to(out.dtype))


def to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 code (uint8, sign at bit 3) of fp32 values, ties to even, at most +-6."""
    size = values.abs()
    code = (size > 0.25).to(torch.uint8)
    code += size >= 0.75
    code += size > 1.25
    code += size >= 1.75
    code += size > 2.5
    code += size >= 3.5
    code += size > 5.0
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def from_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of E2M1 codes 0..15."""
    table = torch.tensor(E2M1_VALUES, device=codes.device)
    return torch.cat((table, -table))[codes.long()]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes ``[..., K]`` two a byte, the even one low; a missing last one is 0."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The reverse of :func:`pack`, always an even number of codes."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def quantize_nvfp4(
    x: torch.Tensor,
    global_scale: torch.Tensor,
    importance: torch.Tensor | None,
    codes: torch.Tensor,
    block_scales: torch.Tensor,
) -> None:
    columns = block_scales.shape[1] * BLOCK
    pad = (0, columns - x.shape[1])
    weight = None
    if importance is not None:
        weight = torch.nn.functional.pad(importance, pad).view(-1, BLOCK)
    rows = max(1, CHUNK_ELEMENTS // max(1, columns))
    for start in range(0, x.shape[0], rows):
        part = slice(start, start + rows)
        values = (x[part].float() / global_scale).clamp(-NVFP4_MAX, NVFP4_MAX)
        values = torch.nn.functional.pad(values, pad).unflatten(1, (-1, BLOCK))
        scale = _search(values, weight)
        block_scales[part] = scale
        factor = scale.float().unsqueeze(-1)
        found = torch.where(factor == 0, 0, to_e2m1(values / factor))
        codes[part] = pack(found.flatten(1))[:, : codes.shape[1]]


def _search(values: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """E4M3 scales ``[N, blocks]`` with the least squared error of blocks ``[N, blocks, 16]``.

    Candidates are tried in ascending order and the first of the smallest error is kept.
    """
    sizes = values.abs().flatten(0, 1).t().contiguous()  # [16, N * blocks]: signs do not matter
    if importance is not None:
        importance = importance.t().repeat(1, values.shape[0])
    center = (sizes.amax(0) / E2M1_MAX).clamp(max=FP8_MAX).to(FP8).view(torch.uint8).int()
    best = torch.full(center.shape, math.inf, device=values.device)
    kept = center
    for step in range(-SEARCH_BELOW, SEARCH_ABOVE + 1):
        candidate = (center + step).clamp(0, 126)
        error = _error(sizes, candidate.to(torch.uint8).view(FP8).float(), importance)
        better = error < best
        best = torch.where(better, error, best)
        kept = torch.where(better, candidate, kept)
    return kept.to(torch.uint8).view(FP8).view(values.shape[:2])


def _error(
    sizes: torch.Tensor, scale: torch.Tensor, importance: torch.Tensor | None
) -> torch.Tensor:
    """Sum over a block of ``importance * (size - quantised)**2``, element after element."""
    near = (sizes / scale).clamp_(max=E2M1_MAX)
    # To two significant bits, and to halves below 1, nearest even: add and subtract 1.5 * 2**22
    # times the power of two below, at which fp32 has half that power as its last place.
    power = near.clamp(min=1.0)
    power.view(torch.int32).bitwise_and_(0x7F800000)
    power.mul_(1.5 * 2**22)
    distance = near.add_(power).sub_(power).mul_(scale).sub_(sizes)
    # Under a scale of 0 everything is 0; the quotients above are infinite or NaN.
    distance = torch.where(scale == 0, sizes, distance)
    terms = distance.square_()
    if importance is not None:
        terms = terms.mul_(importance)
    total = torch.zeros_like(scale)
    for term in terms:
        total += term
    return total


def dequantize_nvfp4(
    codes: torch.Tensor, block_scales: torch.Tensor, scale: torch.Tensor, out: torch.Tensor
) -> None:
    rows = max(1, CHUNK_ELEMENTS // max(1, out.shape[1]))
    scale = scale.reshape(-1, 1).expand(out.shape[0], 1)
    for start in range(0, out.shape[0], rows):
        part = slice(start, start + rows)
        values = from_e2m1(unpack(codes[part]))[:, : out.shape[1]]
        factor = block_scales[part].float().repeat_interleave(BLOCK, 1)[:, : out.shape[1]]
        out[part] = (values * factor * scale[part]).to(out.dtype)


def tile_nvfp4(codes: torch.Tensor, block_scales: torch.Tensor, tiles: torch.Tensor) -> None:
    if tiles.numel() == 0:
        return
    turns_i, turns_j = tiles.shape[:2]
    rows, columns = turns_i * TILE_ROWS, turns_j * TILE_COLUMNS
    pad = (0, columns // 2 - codes.shape[1], 0, rows - codes.shape[0])
    packed = torch.nn.functional.pad(codes, pad)
    pad = (0, columns // BLOCK - block_scales.shape[1], 0, rows - block_scales.shape[0])
    scales = torch.nn.functional.pad(block_scales.view(torch.uint8), pad)
    packed = torch.where(scales.repeat_interleave(BLOCK // 2, 1) == 0, 0, packed)
    # [i, half, g, j, segment, t, word, byte]
    split = packed.view(turns_i, 2, 8, turns_j, 2, 4, 4, 4).int()
    words = torch.zeros_like(split[..., 0])
    for slot, bits in enumerate(SLOT_BITS):
        for to, bit in bits:
            words |= ((split[..., slot] >> bit) & 1) << to
            words |= ((split[..., slot] >> (bit + 4)) & 1) << (to + 16)
    # to [i, j, segment, half, g, t, word]
    words = words.permute(0, 3, 4, 1, 2, 5, 6).reshape(turns_i, turns_j, -1)
    tiles[..., :TILE_CODE_BYTES] = words.view(torch.uint8)
    # [i, half, g, j, segment, t, block] to [i, j, g, t, half, segment, block]
    images = _e5m3(scales).view(turns_i, 2, 8, turns_j, 2, 4, 2).permute(0, 3, 2, 5, 1, 4, 6)
    tiles[..., TILE_CODE_BYTES:] = images.reshape(turns_i, turns_j, -1)


def untile_nvfp4(tiles: torch.Tensor, codes: torch.Tensor, block_scales: torch.Tensor) -> None:
    if tiles.numel() == 0:
        return
    turns_i, turns_j = tiles.shape[:2]
    rows, columns = turns_i * TILE_ROWS, turns_j * TILE_COLUMNS
    words = tiles[..., :TILE_CODE_BYTES].contiguous().view(torch.int32)
    words = words.view(turns_i, turns_j, 2, 2, 8, 4, 4)
    split = torch.zeros((*words.shape, 4), dtype=torch.int32, device=tiles.device)
    for slot, bits in enumerate(SLOT_BITS):
        for place, bit in bits:
            split[..., slot] |= ((words >> place) & 1) << bit
            split[..., slot] |= ((words >> (place + 16)) & 1) << (bit + 4)
    packed = split.permute(0, 3, 4, 1, 2, 5, 6, 7).reshape(rows, columns // 2).to(torch.uint8)
    codes.copy_(packed[: codes.shape[0], : codes.shape[1]])
    images = tiles[..., TILE_CODE_BYTES:].reshape(turns_i, turns_j, 8, 4, 2, 2, 2)
    images = images.permute(0, 4, 2, 1, 5, 3, 6).reshape(rows, columns // BLOCK)
    scales = _from_e5m3(images[: block_scales.shape[0], : block_scales.shape[1]])
    block_scales.copy_(scales.to(FP8))


def dequantize_nvfp4_tiles(tiles: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    rows, columns = out.shape
    codes = tiles.new_empty(rows, (columns + 1) // 2)
    block_scales = tiles.new_empty(rows, -(-columns // BLOCK)).view(FP8)
    untile_nvfp4(tiles, codes, block_scales)
    dequantize_nvfp4(codes, block_scales, scale, out)


def _e5m3(scales: torch.Tensor) -> torch.Tensor:
    """Bytes of E4M3 to bytes of ``(field << 3) | mantissa`` with ``field = 22 + exponent``.

    A normal number keeps its mantissa and gains 15 in its exponent; a subnormal one, ``m * 2**-9``,
    is normalised; zero is 0.
    """
    values = scales.view(FP8).float()
    bits = values.view(torch.int32)
    # fp32 has the field 127 + exponent and the three mantissa bits at 22..20.
    image = (((bits >> 23) - 127 + 22) << 3) | ((bits >> 20) & 7)
    return torch.where(values == 0, 0, image).to(torch.uint8)


def _from_e5m3(images: torch.Tensor) -> torch.Tensor:
    wide = images.int()
    bits = (((wide >> 3) - 22 + 127) << 23) | ((wide & 7) << 20)
    return torch.where(wide == 0, 0, bits).view(torch.float32)
