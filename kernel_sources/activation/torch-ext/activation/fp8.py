"""The activations with FP8 output, for products of many rows in FP8."""

from __future__ import annotations

import torch

from ._common import checks
from ._common.activations import activation_number
from ._common.fp8 import fp8_outputs, scale_used
from .ops import check_input, check_up, half_shape, ops


def activate_fp8(
    x: torch.Tensor,
    *,
    activation: str,
    static_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`ops.activate`, quantised to E4M3 in the same launch.

    ``y = activation(x)``, rounded to the dtype of ``x``;
    ``out = round(y / s)`` to nearest even, at most +-448, with ``s = static_scale`` or, for each
    row, ``max(abs(y)) / 448`` (1 where that is 0, at least 2**-126)

    Args:
        x, activation: as in :func:`ops.activate`.
        static_scale: fp32 of one element, positive, not checked for it; ``None`` for a scale of
            each row.
        out: float8_e4m3fn, shape of ``x``, last dim contiguous; may not overlap an input.
        scale_out: fp32 contiguous, ``x.shape[:-1]``; not with ``static_scale``.

    Returns:
        ``(out, s)``: ``s`` is ``static_scale`` or fp32 ``x.shape[:-1]``. Never waits for the
        device: a row with a NaN or an infinity in ``y`` becomes NaN, scale and all; under a static
        scale a NaN stays one and an infinity saturates.

    Raises:
        ValueError: an unknown activation, or a shape, stride, dtype or device outside the above.
        RuntimeError: an input requires grad while grad mode is on.

    Source: as :func:`ops.activate`; E4M3: Micikevicius et al. 2022, arXiv:2209.05433.
    """
    op = "activate_fp8"
    number = activation_number(op, activation)
    checks.inference_only(op, x)
    check_input(op, "x", x)
    out, scale_out = fp8_outputs(op, x.shape, x.device, static_scale, out, scale_out)
    ops.activate_fp8(x, number, static_scale, out, scale_out)
    return out, scale_used(static_scale, scale_out)


def gated_fp8(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    activation: str = "silu",
    static_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`ops.gated`, quantised to E4M3 in the same launch.

    ``y = activation(gate) * up``, rounded;  ``out = round(y / s)`` as in :func:`activate_fp8`

    Args:
        gate, up, activation: as in :func:`ops.gated`.
        static_scale, out, scale_out: as in :func:`activate_fp8`.

    Returns:
        ``(out, s)``; see :func:`activate_fp8`.

    Raises:
        ValueError: an unknown activation, or a shape, stride, dtype or device outside the above.
        RuntimeError: an input requires grad while grad mode is on.

    Source: as :func:`ops.gated` and :func:`activate_fp8`.
    """
    op = "gated_fp8"
    number = activation_number(op, activation)
    checks.inference_only(op, gate, up)
    check_input(op, "gate", gate)
    check_up(op, up, gate)
    out, scale_out = fp8_outputs(op, gate.shape, gate.device, static_scale, out, scale_out)
    ops.gated_fp8(gate, up, number, static_scale, out, scale_out)
    return out, scale_used(static_scale, scale_out)


def gated_packed_fp8(
    x: torch.Tensor,
    *,
    activation: str = "silu",
    gate_first: bool = True,
    static_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`ops.gated_packed`, quantised to E4M3 in the same launch.

    ``y = activation(x[..., :D]) * x[..., D:]``, rounded, the halves swapped without
    ``gate_first``;  ``out = round(y / s)`` as in :func:`activate_fp8`

    Args:
        x, activation, gate_first: as in :func:`ops.gated_packed`.
        static_scale: as in :func:`activate_fp8`.
        out: float8_e4m3fn ``[..., D]``, last dim contiguous; may not overlap ``x``.
        scale_out: fp32 contiguous, ``x.shape[:-1]``; not with ``static_scale``.

    Returns:
        ``(out, s)``; see :func:`activate_fp8`.

    Raises:
        ValueError: an unknown activation, an odd last dim, or a shape, stride, dtype or device
            outside the above.
        RuntimeError: an input requires grad while grad mode is on.

    Source: as :func:`ops.gated_packed` and :func:`activate_fp8`.
    """
    op = "gated_packed_fp8"
    number = activation_number(op, activation)
    checks.inference_only(op, x)
    check_input(op, "x", x)
    shape = torch.Size(half_shape(op, x))
    out, scale_out = fp8_outputs(op, shape, x.device, static_scale, out, scale_out)
    ops.gated_packed_fp8(x, number, gate_first, static_scale, out, scale_out)
    return out, scale_used(static_scale, scale_out)
