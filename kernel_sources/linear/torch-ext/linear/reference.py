"""The ``linear`` family in plain torch: the CPU implementation, and the ground truth of the tests.

Sums, norms and the whole epilogue are fp32; a value is rounded to the element type only where
csrc/linear.h says so. Products and epilogues go row by row, so that here too a row's bits do not
depend on the rows beside it: torch picks other instructions for other shapes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import packed
from ._common.activations import apply_activation
from .overlap import check_overlap

# Numbered as in csrc/linear.h.
NO_NORM, RMS_NORM, ZERO_CENTERED_RMS_NORM = range(3)

_BLOCK_ELEMENTS = 1 << 19  # of a weight widened to fp32 at a time: 2 MB, which stays in cache


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, kind: int) -> torch.Tensor:
    """``x * rsqrt(mean(x**2) + eps) * w``, or ``* (1 + w)`` by ``kind``: fp32, rounded once."""
    wide = x.float()
    scale = weight.float() + 1.0 if kind == ZERO_CENTERED_RMS_NORM else weight.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * scale).to(x.dtype)


def add_branch(
    x: torch.Tensor,
    branch: torch.Tensor,
    branch_norm_weight: torch.Tensor | None,
    branch_norm_eps: float,
    branch_norm_kind: int,
) -> torch.Tensor:
    """The new residual: ``x`` plus ``branch``, the latter normed first if it has a norm weight."""
    if branch_norm_weight is not None:
        branch = rms_norm(branch, branch_norm_weight, branch_norm_eps, branch_norm_kind)
    return x + branch


def _products(
    rows: list[torch.Tensor],
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> list[torch.Tensor]:
    """``row @ weight.T + bias`` in fp32, for each row; a scale for each row of W comes after."""
    n, k = packed.row_count(weight, scale), rows[0].shape[0]
    step = n if weight.dtype == torch.float32 else max(1, _BLOCK_ELEMENTS // k)
    parts = []
    for first in range(0, n, step):
        if scale is None:
            wide = weight[first : first + step].float()
        else:
            block = torch.arange(first, min(first + step, n))
            wide = packed.values(weight, scale, block, k)
        parts.append([F.linear(row, wide) for row in rows])
    products = [torch.cat(row_parts) for row_parts in zip(*parts, strict=True)]
    if scale is not None and scale.dim() == 1:
        products = [y * scale for y in products]
    return products if bias is None else [y + bias.float() for y in products]


def linear(
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
    """``linear`` of csrc/linear.h without a branch: ``x [..., K]`` gives ``[..., N]``."""
    leading = x.shape[:-1]
    x = x.reshape(-1, x.shape[-1])
    if residual is not None:
        residual = residual.reshape(-1, residual.shape[-1])
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, norm_eps, norm_kind)
    inputs = [row.clone() for row in x.float()]  # each aligned like every other
    operands = ((w0, scale0, b0), (w1, scale1, b1), (w2, scale2, b2))
    products = [
        _products(inputs, weight, weight_scale, bias)
        for weight, weight_scale, bias in operands
        if weight is not None
    ]
    rows = []
    for m, parts in enumerate(zip(*products, strict=True)):
        if gated:
            y = apply_activation(parts[0], activation) * parts[1]
        else:
            y = apply_activation(torch.cat(parts), activation)
        if scale != 1.0:
            y = y * scale
        if soft_cap:
            y = torch.tanh(y / soft_cap) * soft_cap
        rows.append(y if residual is None else residual[m].float() + y)
    y = torch.stack(rows).to(torch.float32 if fp32_out else x.dtype)
    return y.view(*leading, y.shape[-1])


def linear_out(
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
    branch: torch.Tensor | None,
    branch_norm_weight: torch.Tensor | None,
    branch_norm_eps: float,
    branch_norm_kind: int,
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
) -> None:
    """``linear`` of csrc/linear.h into ``out`` and, with a branch, ``residual_out``."""
    check_overlap(out, residual_out, x, branch, residual)
    if branch is not None and residual_out is not None:
        branch = branch.reshape(x.shape)
        x = add_branch(x, branch, branch_norm_weight, branch_norm_eps, branch_norm_kind)
        residual_out.copy_(x.view(residual_out.shape))
    result = linear(
        x,
        w0,
        w1,
        w2,
        scale0,
        scale1,
        scale2,
        b0,
        b1,
        b2,
        norm_weight,
        norm_eps,
        norm_kind,
        residual,
        activation,
        gated,
        scale,
        soft_cap,
        weights_static,
        out.dtype == torch.float32,
    )
    out.copy_(result.view(out.shape))


def embedding(
    ids: torch.Tensor, table: torch.Tensor, scale: float, weights_static: bool
) -> torch.Tensor:
    """``scale * table[ids]`` for ``ids [...]``, rounded once; an id outside is an IndexError."""
    rows = F.embedding(ids, table)
    return rows if scale == 1.0 else (rows.float() * scale).to(table.dtype)


def embedding_out(
    out: torch.Tensor,
    ids: torch.Tensor,
    table: torch.Tensor,
    table_scale: torch.Tensor | None,
    scale: float,
    weights_static: bool,
) -> None:
    """``embedding`` into ``out [..., D]``, which has its own dtype where the table is quantised."""
    if table_scale is None:
        out.copy_(embedding(ids, table, scale, weights_static))
        return
    count = packed.row_count(table, table_scale)
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        raise IndexError(f"embedding: ids must be in [0, {count})")
    rows = packed.dequantized(table, table_scale, ids.reshape(-1), out.shape[-1])
    out.copy_((rows if scale == 1.0 else rows * scale).view(out.shape))
