"""The storage formats of weights: names, sizes, packing and unpacking."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .. import kernels
from ..weights import Pack, PackedWeight

QUANTISED = ("fp8", "int8", "nvfp4")
PRECISIONS = ("bf16", *QUANTISED)
# The next precision of a weight that costs too much fidelity. INT8 has the bytes of FP8 and a fifth
# of its error.
CLIMB = {"nvfp4": "fp8", "fp8": "int8", "int8": "bf16"}
# What a vocabulary gets under fp8 and nvfp4: the bytes of fp8, and on SmolLM2-135M, whose embedding
# is tied to it, it takes a third off the loss of the model. Prompts multiply one row of it only.
EIGHT_BITS = "int8"
ROW_SCALE_BYTES = 4
TILE_ROWS, TILE_COLUMNS, TILE_BYTES = 16, 256, 2304


def packed_size(precision: str, rows: int, columns: int, element_bytes: int) -> int:
    """Bytes of a weight ``[rows, columns]``, scales included; ``element_bytes`` as the host's."""
    if precision == "nvfp4":
        tiles = -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS)
        return tiles * TILE_BYTES + rows * ROW_SCALE_BYTES
    if precision in ("fp8", "int8"):
        return rows * columns + rows * ROW_SCALE_BYTES
    return rows * columns * element_bytes


def packer(precision: str, *, importance: torch.Tensor | None = None) -> Pack:
    """What packs a ``[N, K]`` tensor of bf16, fp16 or fp32.

    Args:
        importance: fp32 ``[K]``, how much the error of each column counts in NVFP4's search.
    """
    if precision == "nvfp4":
        return functools.partial(_pack_nvfp4, importance=importance)
    made: Pack = {"fp8": _pack_fp8, "int8": _pack_int8}[precision]
    return made


def _pack_fp8(weight: torch.Tensor) -> PackedWeight:
    data, scale = kernels.family("quant").quantize_fp8(_rows(weight))
    return _made(data, scale, weight)


def _pack_int8(weight: torch.Tensor) -> PackedWeight:
    data, scale = kernels.family("quant").quantize_int8(_rows(weight))
    return _made(data, scale, weight)


def _pack_nvfp4(weight: torch.Tensor, importance: torch.Tensor | None) -> PackedWeight:
    quant = kernels.family("quant")
    found = quant.quantize_nvfp4(_rows(weight), importance=importance)
    tiles = quant.tile_nvfp4(found.codes, found.block_scales)
    scale = found.global_scale.expand(weight.shape[0]).contiguous()
    return _made(tiles, scale, weight)


def _rows(weight: torch.Tensor) -> torch.Tensor:
    return weight if weight.stride(-1) == 1 else weight.contiguous()


def _made(data: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> PackedWeight:
    rows, columns = weight.shape
    made: PackedWeight = kernels.family("linear").PackedWeight(data, scale, (rows, columns))
    return made


def unpack(packed: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """``[N, K]``: what the packed weight stands for, rounded to ``dtype``."""
    quant, data = kernels.family("quant"), packed.data
    if data.dtype == torch.uint8:
        tiles: torch.Tensor = quant.dequantize_nvfp4_tiles(
            data, packed.scale, packed.shape, dtype=dtype
        )
        return tiles
    dequantize: Callable[..., torch.Tensor] = (
        quant.dequantize_int8 if data.dtype == torch.int8 else quant.dequantize_fp8
    )
    return dequantize(data, packed.scale, dtype=dtype)
