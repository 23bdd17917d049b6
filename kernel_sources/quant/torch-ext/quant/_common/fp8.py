"""FP8 E4M3 in plain torch: the scale of a row, and rounding to nearest even that saturates.

Source: Micikevicius et al. 2022, arXiv:2209.05433, table 1 (E4M3: at most 448, one NaN a sign, no
infinity).
"""

from __future__ import annotations

import torch

from . import checks

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SMALLEST_SCALE = 2.0**-126  # the smallest normal fp32: a scale is never 0 and never loses bits


def largest_magnitude(values: torch.Tensor) -> torch.Tensor:
    """``max(abs(values), dim=-1)`` in fp32, 0 for an empty last dim; a NaN makes it NaN."""
    if values.shape[-1] == 0:
        return values.new_zeros(values.shape[:-1], dtype=torch.float32)
    low, high = torch.aminmax(values, dim=-1)
    return torch.maximum(low.abs(), high.abs()).float()


def scale_of(magnitude: torch.Tensor, largest: float = FP8_MAX) -> torch.Tensor:
    """``magnitude / largest``, at least 2**-126; 1 for 0 and NaN for what is not finite."""
    # By a tensor: torch on CUDA divides by a number as it multiplies by its rounded reciprocal.
    scale = (magnitude / torch.full_like(magnitude, largest)).clamp(min=SMALLEST_SCALE)
    scale = torch.where(magnitude == 0, torch.ones_like(scale), scale)
    return torch.where(magnitude.isfinite(), scale, torch.full_like(scale, torch.nan))


def to_fp8(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``values / scale`` (fp32) to the nearest E4M3, ties to even, at most +-448; NaN is 0x7f."""
    quotient = values.float() / scale
    quotient = torch.where(quotient.isnan(), torch.nan, quotient)  # one NaN, whatever its sign
    return quotient.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def quantize_rows_fp8(
    values: torch.Tensor, static_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 of ``values`` and the scale used: the given one, or ``max(abs(row)) / 448`` per row."""
    if static_scale is not None:
        return to_fp8(values, static_scale.reshape(())), static_scale
    scale = scale_of(largest_magnitude(values))
    return to_fp8(values, scale.unsqueeze(-1)), scale


def write_fp8(
    values: torch.Tensor,
    static_scale: torch.Tensor | None,
    out: torch.Tensor,
    scale_out: torch.Tensor | None,
) -> None:
    """``quantize_rows_fp8`` into ``out`` and, where rows have their own scales, ``scale_out``."""
    data, scale = quantize_rows_fp8(values, static_scale)
    out.copy_(data)
    if scale_out is not None:
        scale_out.copy_(scale)


def scale_used(static_scale: torch.Tensor | None, scale_out: torch.Tensor | None) -> torch.Tensor:
    """The scale of an FP8 output: that of its rows, or the caller's."""
    scale = static_scale if scale_out is None else scale_out
    assert scale is not None
    return scale


def fp8_outputs(
    op: str,
    shape: torch.Size,
    device: torch.device,
    static_scale: torch.Tensor | None,
    out: torch.Tensor | None,
    scale_out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What an op with FP8 output writes: its own tensors, or the caller's ones, checked.

    Args:
        op: for the errors.
        shape: of the output; a scale per row has ``shape[:-1]``.
        device: of everything.
        static_scale: fp32 of one element, in place of ``scale_out``.
        out: float8_e4m3fn, last dim contiguous.
        scale_out: fp32 contiguous.
    """
    if out is None:
        out = torch.empty(shape, dtype=FP8, device=device)
    else:
        checks.output(op, "out", out, shape, FP8, device)
    if static_scale is not None:
        if scale_out is not None:
            checks.fail(op, "scale_out", "be None when static_scale is given", "a tensor")
        checks.dtype_in(op, "static_scale", static_scale, (torch.float32,))
        checks.same_device(op, "static_scale", static_scale, device)
        if static_scale.numel() != 1:
            shown = f"shape {tuple(static_scale.shape)}"
            checks.fail(op, "static_scale", "have one element", shown)
        return out, None
    if scale_out is None:
        return out, torch.empty(shape[:-1], dtype=torch.float32, device=device)
    checks.output(op, "scale_out", scale_out, shape[:-1], torch.float32, device)
    checks.contiguous(op, "scale_out", scale_out)
    return out, scale_out
