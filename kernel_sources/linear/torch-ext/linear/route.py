"""One call of a public function: checks, then the kernel for up to 8 rows or torch for more.

Rows of more than ``MAX_COLUMNS`` elements go to torch too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from . import arguments, many_rows
from ._common import checks
from .reference import NO_NORM, RMS_NORM, ZERO_CENTERED_RMS_NORM
from .schema import ops

MAX_ROWS = 8  # kMaxRows in csrc/linear.h
# One row of x beside a block's sums within the 99 KB of shared memory that every supported GPU has.
MAX_COLUMNS = 48 * 1024

Maybe: TypeAlias = "torch.Tensor | None"


def apply(
    op: str,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[Maybe],
    names: tuple[Sequence[str], Sequence[str]],
    norm: tuple[Maybe, float | None, bool],
    add: tuple[Maybe, Maybe, float | None, Maybe],
    epilogue: tuple[Maybe, int, bool, float, float],
    weights_static: bool,
    out_dtype: torch.dtype | None,
    out: Maybe,
) -> Sequence[torch.Tensor]:
    """Check everything and compute.

    Args:
        names: of ``weights`` and ``biases`` in messages.
        norm: weight, eps, zero-centred.
        add: branch, its norm's weight and eps, residual_out.
        epilogue: residual, activation number, gated, scale, soft cap (0: none).

    Returns:
        One ``[..., N]`` (``out`` if given), or beyond 8 rows perhaps one ``[..., N_i]`` a weight.
    """
    norm_weight, norm_eps, zero_centered = norm
    branch, branch_norm_weight, branch_norm_eps, residual_out = add
    residual, activation, gated, scale, soft_cap = epilogue

    k = arguments.check_input(op, x)
    n = arguments.check_weights(op, x, k, weights, biases, names)
    if torch.is_grad_enabled():
        inputs = (x, *weights, *biases, norm_weight, branch, branch_norm_weight, residual)
        checks.inference_only(op, *inputs)
    if not (norm_weight is norm_eps is None):
        arguments.check_norm(op, "norm", norm_weight, norm_eps, x)
    if not (branch is branch_norm_weight is branch_norm_eps is residual_out is None):
        arguments.check_norm(op, "branch_norm", branch_norm_weight, branch_norm_eps, x)
        branch, residual_out = arguments.branch_rows(op, branch, residual_out, x)
    if gated:
        n = n // 2
    dtype, target = x.dtype, out
    if out is not None or out_dtype is not None:
        dtype = arguments.output_dtype(op, x, out_dtype, out)
    if out is not None or residual is not None:
        shape = (*x.shape[:-1], n)
        if residual is not None:
            residual = arguments.operand_rows(op, "residual", residual, x, shape)
        if out is not None:
            target = arguments.output_rows(op, "out", out, x, shape, dtype)

    kind = ZERO_CENTERED_RMS_NORM if zero_centered else RMS_NORM
    norm_eps = norm_eps or 0.0
    branch_args = (branch, branch_norm_weight, branch_norm_eps or 0.0)
    rows = arguments.rows_of(x)
    results: Sequence[torch.Tensor]
    if 0 < x.numel() <= MAX_ROWS * k and k <= MAX_COLUMNS:
        operands = (
            rows,
            *_three(weights),
            *_three(biases),
            norm_weight,
            norm_eps,
            NO_NORM if norm_weight is None else kind,
            residual,
            activation,
            gated,
            scale,
            soft_cap,
            weights_static,
        )
        if target is None and branch is None:
            results = (ops.linear(*operands, dtype is torch.float32),)
        else:
            if target is None:
                target = rows.new_empty((*rows.shape[:-1], n), dtype=dtype)
            branch_kind = NO_NORM if branch_norm_weight is None else kind
            ops.linear_out(target, residual_out, *branch_args, branch_kind, *operands)
            results = (target,)
    else:
        prologue = (*branch_args, residual_out, norm_weight, norm_eps, kind)
        epilogue = (residual, activation, gated, scale, soft_cap)
        results = many_rows.apply(rows, weights, biases, prologue, epilogue, dtype, target)
    if out is not None:
        return (out,)
    if results[0].dim() == x.dim():
        return results
    return [result.view(*x.shape[:-1], result.shape[-1]) for result in results]


def _three(tensors: Sequence[Maybe]) -> tuple[Maybe, Maybe, Maybe]:
    """Padded with None to the three operands of the schema."""
    if len(tensors) == 1:
        return tensors[0], None, None
    return tensors[0], tensors[1], tensors[2] if len(tensors) == 3 else None
