"""The same functions for more rows than one launch takes, on torch's own matrix products.

Prologues round where the kernel rounds. Epilogues are what eager torch computes: each step in the
dtype of the output, in place, fused with the product where torch offers that (bias, residual).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from . import reference
from ._common.activations import apply_activation


def apply(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    prologue: tuple[
        torch.Tensor | None,
        torch.Tensor | None,
        float,
        torch.Tensor | None,
        torch.Tensor | None,
        float,
        int,
    ],
    epilogue: tuple[torch.Tensor | None, int, bool, float, float],
    dtype: torch.dtype,
    out: torch.Tensor | None,
) -> list[torch.Tensor]:
    """The function of csrc/linear.h for any number of rows, also none.

    Args:
        prologue: branch, its norm's weight and eps, residual_out, norm weight and eps, norm kind.
        epilogue: residual, activation number, gated, scale, soft cap (0: none).

    Returns:
        ``[M, N_i]`` for each weight, one when gated; ``out`` has them side by side.
    """
    branch, branch_norm_weight, branch_norm_eps, residual_out, norm_weight, norm_eps, kind = (
        prologue
    )
    x = _matrix(x)
    if branch is not None and residual_out is not None:
        x = reference.add_branch(x, _matrix(branch), branch_norm_weight, branch_norm_eps, kind)
        _matrix(residual_out).copy_(x)
    if norm_weight is not None:
        x = reference.rms_norm(x, norm_weight, norm_eps, kind)
    results = _products(x, weights, biases, epilogue, dtype)
    if out is not None:
        columns = _matrix(out).split([result.shape[1] for result in results], dim=1)
        for column, result in zip(columns, results, strict=True):
            column.copy_(result)
    return results


def _matrix(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.dim() == 2 else rows.view(-1, rows.shape[-1])


def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, fp32_out: bool
) -> torch.Tensor:
    """``x @ weight.T + bias``, rounded to fp32 or to the dtype of x."""
    if not fp32_out or x.dtype == torch.float32:
        return F.linear(x, weight, bias)
    if x.is_cuda:
        y = torch.mm(x, weight.t(), out_dtype=torch.float32)
    else:
        y = F.linear(x.float(), weight.float())
    return y if bias is None else y + bias


def _products(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    epilogue: tuple[torch.Tensor | None, int, bool, float, float],
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Steps 3 to 5 of csrc/linear.h; a residual comes with one weight only."""
    residual, activation, gated, scale, soft_cap = epilogue
    fp32_out = dtype == torch.float32
    if residual is not None:
        residual = _matrix(residual)
    if gated:
        y = apply_activation(_product(x, weights[0], biases[0], fp32_out), activation)
        return [y.mul_(_product(x, weights[1], biases[1], fp32_out))]
    plain = activation == 0 and not soft_cap and not fp32_out and biases[0] is None
    if residual is not None and plain:
        return [torch.addmm(residual, x, weights[0].t(), alpha=scale)]
    results = []
    for weight, bias in zip(weights, biases, strict=True):
        y = apply_activation(_product(x, weight, bias, fp32_out), activation)
        if scale != 1.0:
            y = y.mul_(scale)
        if soft_cap:
            y = y.div_(soft_cap).tanh_().mul_(soft_cap)
        results.append(y if residual is None else y.add_(residual))
    return results
