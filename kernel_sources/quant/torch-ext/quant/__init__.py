"""Quantise and dequantise: FP8 (tensor, row, block), INT8 (row), NVFP4 and its decode layout."""

from ._common.exports import unknown_name
from .eight_bit import dequantize_fp8, dequantize_int8, quantize_fp8, quantize_int8
from .nvfp4 import NVFP4, dequantize_nvfp4, pack_nibbles, quantize_nvfp4, unpack_nibbles
from .tiles import dequantize_nvfp4_tiles, tile_nvfp4, untile_nvfp4

__all__ = [
    "NVFP4",
    "dequantize_fp8",
    "dequantize_int8",
    "dequantize_nvfp4",
    "dequantize_nvfp4_tiles",
    "pack_nibbles",
    "quantize_fp8",
    "quantize_int8",
    "quantize_nvfp4",
    "tile_nvfp4",
    "unpack_nibbles",
    "untile_nvfp4",
]

__getattr__ = unknown_name("quant", __all__)
