"""Schemas and fakes of the `quant` ops. Each writes outputs that its public function allocates."""

from __future__ import annotations

from . import reference
from ._common.operators import define
from ._ops import ops

_SCHEMAS = (
    "quantize_rows(Tensor x, Tensor? static_scale, Tensor(a!) out, Tensor(b!)? scale_out) -> ()",
    "dequantize(Tensor data, Tensor scale, Tensor(a!) out) -> ()",
    "quantize_nvfp4(Tensor x, Tensor global_scale, Tensor? importance, Tensor(a!) codes, "
    "Tensor(b!) block_scales) -> ()",
    "dequantize_nvfp4(Tensor codes, Tensor block_scales, Tensor scale, Tensor(a!) out) -> ()",
    "tile_nvfp4(Tensor codes, Tensor block_scales, Tensor(a!) tiles) -> ()",
    "untile_nvfp4(Tensor tiles, Tensor(a!) codes, Tensor(b!) block_scales) -> ()",
    "dequantize_nvfp4_tiles(Tensor tiles, Tensor scale, Tensor(a!) out) -> ()",
)


__all__ = ["ops"]


for _schema in _SCHEMAS:
    define(_schema, getattr(reference, _schema.partition("(")[0]))
