"""The decode layout of NVFP4: tiles of 16 rows and 256 columns, 2304 bytes each.

Tile (i, j) holds rows ``16 * i ..`` and columns ``256 * j ..``; what lies past N or K is zero.

Bytes 0..2047 are ``[segment 2][half 2][lane 32][16 bytes]``. Lane ``4 * g + t`` holds 32 columns,
``256 * j + 128 * segment + 32 * t ..``, of row ``16 * i + 8 * half + g``, as four little-endian
words of 8 elements e0..e7. The low half of a word holds e0, e2, e4, e6 in its slots 0..3 and the
high half e1, e3, e5, e7. Places of sign and magnitude in a half: slot 0: 15 and 11..9; slot 1: 12
and 8..6; slot 2: 14 and 5..3; slot 3: 13 and 2..0. Left shifts and ANDs then bring a pair of
elements to where fp16 has theirs.

Bytes 2048..2303 are block scales ``[lane 32][half 2][2 * segment + block]``, where block counts the
two blocks of 16 in a lane's 32 columns. A byte is ``(field << 3) | mantissa`` for the value
``2**(field - 22) * (1 + mantissa / 8)``: E4M3 with its subnormals normalised, exactly. A block
whose scale is 0 has byte 0, and its codes are 0.
"""

from __future__ import annotations

import torch

from . import arguments
from ._common import checks
from ._common.fp8 import FP8
from .reference import BLOCK, TILE_BYTES, TILE_COLUMNS, TILE_ROWS
from .schemas import ops


def tile_nvfp4(
    codes: torch.Tensor, block_scales: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Bring NVFP4 from row-major into the decode layout, without changing a value.

    Args:
        codes: uint8 ``[N, P]`` contiguous, two codes a byte, the even one low; K is ``2 * P``, or
            one less when the last high nibbles are 0.
        block_scales: float8_e4m3fn ``[N, ceil(K / 16)]`` contiguous, not negative, no NaN.
        out: uint8 ``[ceil(N / 16), ceil(K / 256), 2304]`` contiguous.

    Returns:
        ``out``, or a new tensor of that shape. Waits for the device, to refuse a NaN or a negative
        scale.

    Raises:
        ValueError: a shape, stride, dtype, device or scale outside the above.

    Source: the layout is this project's; see the head of this file.
    """
    op = "tile_nvfp4"
    N, K = arguments.nvfp4_shape(op, codes, block_scales, None)
    # A sign or the NaN 0x7f: a byte above 0x7e.
    if block_scales.numel() and int(block_scales.view(torch.uint8).max()) > 0x7E:
        checks.fail(op, "block_scales", "be neither negative nor NaN", "a value that is")
    out = arguments.output(op, "out", out, tile_shape(N, K), torch.uint8, codes.device)
    checks.contiguous(op, "out", out)
    ops.tile_nvfp4(codes, block_scales, out)
    return out


def untile_nvfp4(tiles: torch.Tensor, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The reverse of :func:`tile_nvfp4`; codes under a scale of 0 come back as 0.

    Args:
        tiles: uint8 ``[ceil(N / 16), ceil(K / 256), 2304]`` contiguous.
        shape: (N, K).

    Returns:
        ``(codes, block_scales)``: uint8 ``[N, ceil(K / 2)]`` and float8_e4m3fn
        ``[N, ceil(K / 16)]``.

    Raises:
        ValueError: a shape, stride or dtype outside the above.

    Source: as :func:`tile_nvfp4`.
    """
    N, K = _check_tiles("untile_nvfp4", tiles, shape)
    codes = torch.empty(N, -(-K // 2), dtype=torch.uint8, device=tiles.device)
    block_scales = torch.empty(N, -(-K // BLOCK), dtype=FP8, device=tiles.device)
    ops.untile_nvfp4(tiles, codes, block_scales)
    return codes, block_scales


def dequantize_nvfp4_tiles(
    tiles: torch.Tensor,
    scale: torch.Tensor,
    shape: tuple[int, int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Values of NVFP4 straight from its decode layout, for products of many rows.

    ``out[n, k] = round(e2m1(code[n, k]) * block_scale[n, k // 16] * scale[n])``; the first product
    is exact, the second rounds in fp32

    Args:
        tiles: uint8 ``[ceil(N / 16), ceil(K / 256), 2304]`` contiguous.
        scale: fp32 contiguous, one element or ``[N]``.
        shape: (N, K).
        dtype: of the result: bf16, fp16 or fp32.
        out: ``[N, K]``, any of the three dtypes, last dim contiguous; decides over ``dtype``.

    Returns:
        ``out``, or a new contiguous ``[N, K]``.

    Raises:
        ValueError: a shape, stride, dtype or device outside the above.

    Source: as :func:`tile_nvfp4`.
    """
    op = "dequantize_nvfp4_tiles"
    N, K = _check_tiles(op, tiles, shape)
    arguments.row_scale(op, scale, N, tiles.device)
    out = arguments.dequantized(op, out, (N, K), dtype, tiles.device)
    ops.dequantize_nvfp4_tiles(tiles, scale, out)
    return out


def tile_shape(N: int, K: int) -> tuple[int, int, int]:
    """Shape of the tiles of a weight ``[N, K]``."""
    return -(-N // TILE_ROWS), -(-K // TILE_COLUMNS), TILE_BYTES


def _check_tiles(op, tiles, shape):
    checks.dtype_in(op, "tiles", tiles, (torch.uint8,))
    if len(shape) != 2 or min(shape) < 0:
        checks.fail(op, "shape", "be (N, K), neither negative", tuple(shape))
    checks.shape_is(op, "tiles", tiles, tile_shape(*shape))
    checks.contiguous(op, "tiles", tiles)
    return tuple(shape)
