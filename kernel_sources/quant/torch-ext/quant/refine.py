"""NVFP4 with rounding errors passed on to columns that can still make up for them."""

from __future__ import annotations

import torch

from .reference import BLOCK, E2M1_MAX, NVFP4_MAX, pack, to_e2m1
from .schemas import ops

DAMPING = (0.01, 0.1, 1.0)  # of the mean diagonal, tried in turn until the factorisation succeeds
LAZY = 128  # columns between two products with all columns behind them


def refined_nvfp4(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    global_scale: torch.Tensor,
    codes: torch.Tensor,
    block_scales: torch.Tensor,
) -> None:
    """Fill ``codes`` and ``block_scales``; see ``quantize_nvfp4``."""
    K = weight.shape[1]
    columns = block_scales.shape[1] * BLOCK
    pad = (0, columns - K)
    values = torch.nn.functional.pad(weight.float() / global_scale, pad)
    upper = torch.eye(columns, device=weight.device)
    upper[:K, :K] = _inverse_factor(hessian)
    weights = upper.diagonal().square().reciprocal()
    weights = (weights / weights.mean()).contiguous()
    scales = torch.empty(weight.shape[0], columns // BLOCK, device=weight.device)
    for start in range(0, columns, LAZY):
        stop = min(start + LAZY, columns)
        errors = _round_columns(values, upper, weights, scales, block_scales, start, stop)
        values[:, stop:] -= errors @ upper[start:stop, stop:]
    factor = scales.repeat_interleave(BLOCK, 1)
    found = torch.where(factor == 0, 0, to_e2m1(values / factor))
    codes.copy_(pack(found)[:, : codes.shape[1]])


def _round_columns(values, upper, weights, scales, block_scales, start, stop):
    """Round columns ``start:stop`` in place; returns their errors, each by its own diagonal."""
    errors = torch.empty(values.shape[0], stop - start, device=values.device)
    scale = scales[:, 0]
    for column in range(start, stop):
        block = column // BLOCK
        if column % BLOCK == 0:
            scales[:, block] = _search(values, weights, block_scales, block)
            scale = scales[:, block]
        exact = values[:, column].clone()
        near = _nearest(exact, scale)
        error = (exact - near) / upper[column, column]
        ahead = slice(column + 1, stop)
        values[:, ahead] -= error[:, None] * upper[column, ahead]
        values[:, column] = near
        errors[:, column - start] = error
    return errors


def _search(values, weights, block_scales, block):
    """The scale of each row's block ``block`` as it is now, stored as E4M3, returned as fp32."""
    part = slice(BLOCK * block, BLOCK * block + BLOCK)
    unused = torch.empty(values.shape[0], BLOCK // 2, dtype=torch.uint8, device=values.device)
    found = torch.empty_like(block_scales[:, :1], memory_format=torch.contiguous_format)
    one = torch.ones(1, device=values.device)
    ops.quantize_nvfp4(values[:, part], one, weights[part].contiguous(), unused, found)
    block_scales[:, block : block + 1] = found
    return found[:, 0].float()


def _nearest(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``scale * e2m1(values / scale)``, ties to even; see ``reference._error`` for the rounding."""
    near = (values.clamp(-NVFP4_MAX, NVFP4_MAX).abs() / scale).clamp(max=E2M1_MAX)
    power = near.clamp(min=1.0)
    power.view(torch.int32).bitwise_and_(0x7F800000)
    power.mul_(1.5 * 2**22)
    near = near.add_(power).sub_(power).mul_(scale).copysign_(values)
    return torch.where(scale == 0, 0.0, near)


def _inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """Upper triangular U with ``U.T @ U = inverse(hessian + damping)``.

    Raises:
        ValueError: no damping makes it positive definite.
    """
    mean = hessian.diagonal().mean()
    eye = torch.eye(len(hessian), device=hessian.device)
    if float(mean) <= 0.0:
        return eye
    for damping in DAMPING:
        lower, failed = torch.linalg.cholesky_ex(hessian + damping * mean * eye)
        if int(failed) == 0:
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if int(failed) == 0:
                return upper
    raise ValueError("quantize_nvfp4: hessian must be positive semidefinite, got one that is not")
