"""Schemas and fakes of the `quant` ops. Each writes outputs that its public function allocates."""

from __future__ import annotations

import torch

from . import reference
from ._ops import add_op_namespace_prefix, ops

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


def _nothing(*arguments):
    return None


_LIB = torch.library.Library(add_op_namespace_prefix("").rstrip(":"), "DEF")
for _schema in _SCHEMAS:
    _name = _schema.partition("(")[0]
    _LIB.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIB.impl(_name, getattr(reference, _name), "CPU")
    torch.library.register_fake(add_op_namespace_prefix(_name), _nothing, lib=_LIB)
