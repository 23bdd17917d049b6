"""The operators: schemas, CPU implementations and fakes. CUDA is in torch_binding.cpp.

A weight is plain (its scale is None) or the data and scale of a ``packed.PackedWeight``; K is that
of ``x``, or of ``out`` for a table.
"""

from __future__ import annotations

import torch

from . import reference
from ._common.operators import define
from ._ops import ops
from .packed import row_count

__all__ = ["ops"]

_INPUTS = (
    "Tensor x, Tensor w0, Tensor? w1, Tensor? w2, "
    "Tensor? scale0, Tensor? scale1, Tensor? scale2, Tensor? b0, Tensor? b1, Tensor? b2, "
    "Tensor? norm_weight, float norm_eps, int norm_kind, "
    "Tensor? residual, int activation, bool gated, float scale, float soft_cap, bool weights_static"
)
_BRANCH = "Tensor? branch, Tensor? branch_norm_weight, float branch_norm_eps, int branch_norm_kind"


def _linear_fake(  # the schema's arguments
    x: torch.Tensor,
    w0: torch.Tensor,
    w1: torch.Tensor | None,
    w2: torch.Tensor | None,
    scale0: torch.Tensor | None,
    scale1: torch.Tensor | None,
    scale2: torch.Tensor | None,
    b0: torch.Tensor | None,
    b1: torch.Tensor | None,
    b2: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    norm_kind: int,
    residual: torch.Tensor | None,
    activation: int,
    gated: bool,
    scale: float,
    soft_cap: float,
    weights_static: bool,
    fp32_out: bool,
) -> torch.Tensor:
    columns = row_count(w0, scale0)
    if not gated:
        pairs = ((w0, scale0), (w1, scale1), (w2, scale2))
        columns = sum(row_count(weight, scales) for weight, scales in pairs if weight is not None)
    return x.new_empty((*x.shape[:-1], columns), dtype=torch.float32 if fp32_out else x.dtype)


def _embedding_fake(
    ids: torch.Tensor, table: torch.Tensor, scale: float, weights_static: bool
) -> torch.Tensor:
    return table.new_empty((*ids.shape, table.shape[1]))


define(f"linear({_INPUTS}, bool fp32_out) -> Tensor", reference.linear, _linear_fake)
define(
    f"linear_out(Tensor(a!) out, Tensor(b!)? residual_out, {_BRANCH}, {_INPUTS}) -> ()",
    reference.linear_out,
)
define(
    "embedding(Tensor ids, Tensor table, float scale, bool weights_static) -> Tensor",
    reference.embedding,
    _embedding_fake,
)
define(
    "embedding_out(Tensor(a!) out, Tensor ids, Tensor table, Tensor? table_scale, float scale, "
    "bool weights_static) -> ()",
    reference.embedding_out,
)
