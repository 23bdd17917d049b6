"""The same functions for more rows than one launch takes, on torch's own matrix products.

Prologues round where the kernel rounds. Epilogues are what eager torch computes: each step in the
dtype of the output, fused with the product where torch offers that (bias, residual).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from . import reference
from ._common.activations import apply_activation


def prologue(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    branch_norm_weight: torch.Tensor | None,
    branch_norm_eps: float,
    residual_out: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    norm_kind: int,
) -> torch.Tensor:
    """``x'`` of csrc/linear.h; the new residual goes to ``residual_out``."""
    if branch is not None and residual_out is not None:
        x = reference.add_branch(x, branch, branch_norm_weight, branch_norm_eps, norm_kind)
        residual_out.copy_(x)
    if norm_weight is not None:
        x = reference.rms_norm(x, norm_weight, norm_eps, norm_kind)
    return x


def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, fp32_out: bool
) -> torch.Tensor:
    if not fp32_out or x.dtype == torch.float32:
        return F.linear(x, weight, bias)
    if x.is_cuda:
        y = torch.mm(x, weight.t(), out_dtype=torch.float32)
    else:
        y = F.linear(x.float(), weight.float())
    return y if bias is None else y + bias


def products(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    epilogue: tuple[torch.Tensor | None, int, bool, float, float],
    fp32_out: bool,
) -> list[torch.Tensor]:
    """Steps 3 to 5 of csrc/linear.h for ``x [M, K]`` of any M, also 0: one ``[M, N_i]`` a weight.

    ``epilogue`` is residual, activation number, gated, scale, soft cap; gated gives one result, and
    a residual comes with one weight only.
    """
    residual, activation, gated, scale, soft_cap = epilogue
    if gated:
        y = apply_activation(_product(x, weights[0], biases[0], fp32_out), activation)
        return [y * _product(x, weights[1], biases[1], fp32_out)]
    plain = activation == 0 and not soft_cap and not fp32_out and biases[0] is None
    if residual is not None and plain:
        return [torch.addmm(residual, x, weights[0].t(), alpha=scale)]
    results = []
    for weight, bias in zip(weights, biases, strict=True):
        y = apply_activation(_product(x, weight, bias, fp32_out), activation)
        if scale != 1.0:
            y = y * scale
        if soft_cap:
            y = torch.tanh(y / soft_cap) * soft_cap
        results.append(y if residual is None else residual + y)
    return results
