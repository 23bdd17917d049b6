"""The norms with FP8 output, for products of many rows in FP8."""

from __future__ import annotations

import torch

from ._common import checks
from ._common.fp8 import fp8_outputs, scale_used
from .ops import check, check_residual, ops


def rms_norm_fp8(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    static_scale: torch.Tensor | None = None,
    weights_static: bool = False,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`ops.rms_norm`, quantised to E4M3 in the same launch.

    ``y = rms_norm(x, weight, ...)``, rounded to the dtype of ``x``;
    ``out = round(y / s)`` to nearest even, at most +-448, with ``s = static_scale`` or, for each
    row, ``max(abs(y)) / 448`` (1 where that is 0, at least 2**-126)

    Args:
        x, weight, eps, zero_centered, scale, shift, weights_static: as in :func:`ops.rms_norm`.
        static_scale: fp32 of one element, positive, not checked for it; ``None`` for a scale of
            each row.
        out: float8_e4m3fn, shape of ``x``, last dim contiguous; may not overlap an input.
        scale_out: fp32 contiguous, ``x.shape[:-1]``; not with ``static_scale``.

    Returns:
        ``(out, s)``: ``s`` is ``static_scale`` or fp32 ``x.shape[:-1]``. The bits of a row depend
        on that row alone. Never waits for the device: a row with a NaN or an infinity in ``y``
        becomes NaN, scale and all; under a static scale a NaN stays one and an infinity saturates.

    Raises:
        ValueError: a shape, stride, dtype, device or range outside the above.
        RuntimeError: an input requires grad while grad mode is on.

    Source: as :func:`ops.rms_norm`; E4M3: Micikevicius et al. 2022, arXiv:2209.05433.
    """
    op = "rms_norm_fp8"
    check(op, x, eps, weight, None, scale, shift)
    out, scale_out = fp8_outputs(op, x.shape, x.device, static_scale, out, scale_out)
    ops.rms_norm_fp8(
        x, weight, scale, shift, eps, zero_centered, weights_static, static_scale, out, scale_out
    )
    return out, scale_used(static_scale, scale_out)


def add_rms_norm_fp8(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    static_scale: torch.Tensor | None = None,
    weights_static: bool = False,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`ops.add_rms_norm`, its norm quantised to E4M3 in the same launch.

    ``y, r' = add_rms_norm(x, residual, weight, ...)``;  ``out = round(y / s)`` as in
    :func:`rms_norm_fp8`

    Args:
        x, residual, weight, eps, zero_centered, weights_static: as in :func:`ops.add_rms_norm`.
        static_scale, out, scale_out: as in :func:`rms_norm_fp8`.
        residual_out: shape and dtype of ``x``, last dim contiguous; may be ``x`` or ``residual``
            itself, and must not overlap them otherwise.

    Returns:
        ``(out, s, r')``; see :func:`rms_norm_fp8`.

    Raises:
        ValueError: a shape, stride, dtype, device or range outside the above.
        RuntimeError: an input requires grad while grad mode is on.

    Source: as :func:`rms_norm_fp8`.
    """
    op = "add_rms_norm_fp8"
    check(op, x, eps, weight, None, None, None)
    check_residual(op, residual, x)
    out, scale_out = fp8_outputs(op, x.shape, x.device, static_scale, out, scale_out)
    if residual_out is None:
        residual_out = x.new_empty(x.shape)
    checks.output(op, "residual_out", residual_out, x.shape, x.dtype, x.device)
    flags = (eps, zero_centered, weights_static, static_scale)
    ops.add_rms_norm_fp8(x, residual, weight, *flags, out, scale_out, residual_out)
    return out, scale_used(static_scale, scale_out), residual_out


def layer_norm_fp8(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    static_scale: torch.Tensor | None = None,
    weights_static: bool = False,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`ops.layer_norm`, quantised to E4M3 in the same launch.

    ``y = layer_norm(x, weight, bias, ...)``;  ``out = round(y / s)`` as in :func:`rms_norm_fp8`

    Args:
        x, weight, bias, eps, scale, shift, weights_static: as in :func:`ops.layer_norm`.
        static_scale, out, scale_out: as in :func:`rms_norm_fp8`.

    Returns:
        ``(out, s)``; see :func:`rms_norm_fp8`.

    Raises:
        ValueError: a shape, stride, dtype, device or range outside the above.
        RuntimeError: an input requires grad while grad mode is on.

    Source: as :func:`ops.layer_norm` and :func:`rms_norm_fp8`.
    """
    op = "layer_norm_fp8"
    check(op, x, eps, weight, bias, scale, shift)
    out, scale_out = fp8_outputs(op, x.shape, x.device, static_scale, out, scale_out)
    flags = (eps, weights_static, static_scale)
    ops.layer_norm_fp8(x, weight, bias, scale, shift, *flags, out, scale_out)
    return out, scale_used(static_scale, scale_out)
