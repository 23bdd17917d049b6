"""The same functions for more rows than one launch takes, on torch's own matrix products.

Prologues round where the kernel rounds. Epilogues are what eager torch computes: each step in the
dtype of the output, in place, fused with the product where torch offers that (bias, residual).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from . import packed_products, reference
from ._common.activations import apply_activation
from .steps import Epilogue, Prologue


def apply(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor | None],
    biases: Sequence[torch.Tensor | None],
    prologue: Prologue,
    epilogue: Epilogue,
    dtype: torch.dtype,
    out: torch.Tensor | None,
    element: torch.dtype,
    input_scale: torch.Tensor | None,
) -> list[torch.Tensor]:
    """The function of csrc/linear.h for any number of rows, also none.

    Args:
        x: of dtype ``element``, or E4M3 with ``input_scale`` and no prologue.
        weights, scales: plain weights and None, or ``data`` and ``scale`` of quantised ones.
        prologue, epilogue: checked.

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
    if scales[0] is None:
        results = _results(
            lambda i: packed_products.plain_product(x, weights[i], biases[i], dtype),
            len(weights),
            epilogue,
            (x, weights[0]) if biases[0] is None and dtype != torch.float32 else None,
        )
    else:
        x, x_scale = packed_products.prepare(x, input_scale, weights, scales, element)
        results = _results(
            lambda i: packed_products.product(x, x_scale, weights[i], scales[i], biases[i], dtype),
            len(weights),
            epilogue,
            None,
        )
    if out is not None:
        columns = _matrix(out).split([result.shape[1] for result in results], dim=1)
        for column, result in zip(columns, results, strict=True):
            column.copy_(result)
    return results


def _matrix(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.dim() == 2 else rows.view(-1, rows.shape[-1])


def _results(
    product: Callable[[int], torch.Tensor],
    count: int,
    epilogue: Epilogue,
    factors: tuple[torch.Tensor, torch.Tensor] | None,
) -> list[torch.Tensor]:
    """Steps 3 to 5 of csrc/linear.h; a residual comes with one weight only.

    Args:
        product: ``x @ W_i.T + bias_i`` for each i up to ``count``.
        factors: x and the weight where the product is nothing but theirs.
    """
    residual, activation, gated, scale, soft_cap = epilogue
    if residual is not None:
        residual = _matrix(residual)
    if gated:
        return [apply_activation(product(0), activation).mul_(product(1))]
    if residual is not None and factors is not None and activation == 0 and not soft_cap:
        x, weight = factors
        return [torch.addmm(residual, x, weight.t(), alpha=scale)]
    results = []
    for i in range(count):
        y = apply_activation(product(i), activation)
        if scale != 1.0:
            y = y.mul_(scale)
        if soft_cap:
            y = y.div_(soft_cap).tanh_().mul_(soft_cap)
        results.append(y if residual is None else y.add_(residual))
    return results
