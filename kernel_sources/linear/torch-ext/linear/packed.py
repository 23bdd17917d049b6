"""Quantised weights: what they are, and their values in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._common.fp8 import FP8

BLOCK = 128  # rows and columns that share a scale where the scales are a grid
# The tile layout of "nvfp4", see PackedWeight.
TILE_ROWS, TURN_COLUMNS, TILE_BYTES, CODE_BYTES = 16, 256, 2304, 2048
# A 16-bit half of a tile's word holds four elements: where each has its sign, e1, e0 and m.
_SLOTS = ((15, 11, 10, 9), (12, 8, 7, 6), (14, 5, 4, 3), (13, 2, 1, 0))
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FORMATS = {FP8: "fp8", torch.int8: "int8", torch.uint8: "nvfp4"}


class PackedWeight(NamedTuple):
    """A quantised weight: ``W[n, k] = scale[n] * value(data)[n, k]``, ``shape`` being ``(N, K)``.

    The dtype of ``data`` says the format:

    - ``float8_e4m3fn [N, K]``, unit stride along K; ``scale`` fp32 ``[N]``, or for blocks of 128 by
      128 ``[ceil(N/128), ceil(K/128)]``;
    - ``int8 [N, K]``, unit stride along K; ``scale`` fp32 ``[N]``;
    - ``uint8 [ceil(N/16), ceil(K/256), 2304]``, contiguous: NVFP4 (E2M1 with an E4M3 scale for each
      16 columns) in tiles; ``scale`` fp32 ``[N]``, the tensor's own scale for each row.

    Tile ``[i, j]`` holds rows ``16i..16i+15`` and columns ``256j..256j+255``, zeros past N and K:

    - bytes 0..2047 are ``[segment 2][half 2][lane 32][16]``. Lane ``4g + t`` has row ``8 half + g``
      and columns ``128 segment + 32 t`` to ``+31`` of the tile: four little-endian 32-bit words of
      eight columns each. The low half of a word has the even columns in slots 0..3, the high half
      the odd ones. Bits of a slot (sign; e1 e0 m): 0: 15; 11 10 9. 1: 12; 8 7 6. 2: 14; 5 4 3.
      3: 13; 2 1 0.
    - bytes 2048..2303 are ``[lane 32][half 2][segment 2][2]``: the scales of the lane's two blocks
      of 16 columns, as ``field << 3 | mantissa`` of value ``2**(field - 22) * (1 + mantissa / 8)``;
      byte 0 is zero.
    """

    data: torch.Tensor
    scale: torch.Tensor
    shape: tuple[int, int]

    @property
    def format(self) -> str:
        """fp8, int8 or nvfp4."""
        return format_of(self.data)


def format_of(data: torch.Tensor) -> str:
    """fp8, int8 or nvfp4 by the dtype of ``data``; anything else is plain."""
    return _FORMATS.get(data.dtype, "plain")


def row_count(data: torch.Tensor, scale: torch.Tensor | None) -> int:
    """N of a weight as the operators take it; ``scale`` is None for a plain one."""
    return data.shape[0] if scale is None or scale.dim() == 2 else scale.shape[0]


def values(
    data: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, columns: int
) -> torch.Tensor:
    """Rows ``rows [R]`` of the weight in fp32 without ``scale[n]``: exact but for a grid of scales.

    Returns:
        ``[R, columns]``; a grid's scales are multiplied in, with the rounding of one fp32 product.
    """
    if data.dtype == torch.uint8:
        return _tile_values(data, rows, columns)
    wide = data.view(torch.uint8).index_select(0, rows).view(data.dtype).float()
    if scale.dim() == 1:
        return wide
    grid = scale.index_select(0, rows // BLOCK).repeat_interleave(BLOCK, dim=1)
    return wide * grid[:, :columns]


def dequantized(
    data: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor, columns: int
) -> torch.Tensor:
    """Rows ``rows [R]`` of the weight in fp32: one rounding, of the product with its scale."""
    exact = values(data, scale, rows, columns)
    return exact if scale.dim() == 2 else exact * scale.index_select(0, rows).unsqueeze(1)


def _tile_values(tiles: torch.Tensor, rows: torch.Tensor, columns: int) -> torch.Tensor:
    """Rows of NVFP4 tiles, block scales included: exact in fp32."""
    turns = tiles.shape[1]
    tile, half, g = rows // TILE_ROWS, rows % TILE_ROWS // 8, rows % 8
    codes = tiles[:, :, :CODE_BYTES].unflatten(-1, (2, 2, 8, 4, 16))
    codes = codes[tile, :, :, half, g].contiguous()  # [R, turns, segment, t, 16 bytes]
    words = codes.view(torch.int16).to(torch.int32)  # [.., word and half of a word]
    slots = []
    for sign, *magnitude in _SLOTS:
        e1, e0, m = ((words >> bit) & 1 for bit in magnitude)
        slots.append((((words >> sign) & 1) << 3) | (e1 << 2) | (e0 << 1) | m)
    codes = torch.stack(slots, -1).unflatten(-2, (4, 2)).transpose(-1, -2)  # [.., word, slot, half]
    table = torch.tensor(_E2M1, device=tiles.device)
    magnitudes = table[(codes & 7).long()]
    numbers = torch.where(codes >= 8, -magnitudes, magnitudes)

    images = tiles[:, :, CODE_BYTES:].unflatten(-1, (8, 4, 2, 2, 2))
    images = images[tile, :, g, :, half].to(torch.int32)  # [R, turns, t, segment, block]
    # The image's exponent and mantissa at the places of fp32's, and the difference of the biases.
    scales = ((images << 20) + ((127 - 22) << 23)).view(torch.float32)
    scales = torch.where(images == 0, 0.0, scales).transpose(2, 3)
    numbers = numbers.reshape(len(rows), turns, 2, 4, 2, 16) * scales.unsqueeze(-1)
    return numbers.flatten(1)[:, :columns]
