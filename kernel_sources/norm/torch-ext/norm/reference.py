"""The ops of this family in plain torch: their CPU implementation and the truth of their tests."""

from __future__ import annotations

import torch

from ._common.fp8 import write_fp8

Optional = torch.Tensor | None


def rms_norm(
    x: torch.Tensor,
    weight: Optional,
    scale: Optional,
    shift: Optional,
    eps: float,
    zero_centered: bool,
    weights_static: bool,
) -> torch.Tensor:
    values = x.float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        factor = weight.float()
        values = values * (1.0 + factor if zero_centered else factor)
    return _modulate(values, scale, shift).to(x.dtype)


def rms_norm_out(
    x: torch.Tensor,
    weight: Optional,
    scale: Optional,
    shift: Optional,
    eps: float,
    zero_centered: bool,
    weights_static: bool,
    out: torch.Tensor,
) -> None:
    out.copy_(rms_norm(x, weight, scale, shift, eps, zero_centered, weights_static))


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: Optional,
    eps: float,
    zero_centered: bool,
    weights_static: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, None, None, eps, zero_centered, weights_static), total


def add_rms_norm_out(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: Optional,
    eps: float,
    zero_centered: bool,
    weights_static: bool,
    out: torch.Tensor,
    residual_out: torch.Tensor,
) -> None:
    normed, total = add_rms_norm(x, residual, weight, eps, zero_centered, weights_static)
    out.copy_(normed)
    residual_out.copy_(total)


def layer_norm(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    scale: Optional,
    shift: Optional,
    eps: float,
    weights_static: bool,
) -> torch.Tensor:
    values = torch.nn.functional.layer_norm(
        x.float(),
        x.shape[-1:],
        None if weight is None else weight.float(),
        None if bias is None else bias.float(),
        eps,
    )
    return _modulate(values, scale, shift).to(x.dtype)


def layer_norm_out(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    scale: Optional,
    shift: Optional,
    eps: float,
    weights_static: bool,
    out: torch.Tensor,
) -> None:
    out.copy_(layer_norm(x, weight, bias, scale, shift, eps, weights_static))


def rms_norm_fp8(
    x: torch.Tensor,
    weight: Optional,
    scale: Optional,
    shift: Optional,
    eps: float,
    zero_centered: bool,
    weights_static: bool,
    static_scale: Optional,
    out: torch.Tensor,
    scale_out: Optional,
) -> None:
    y = rms_norm(x, weight, scale, shift, eps, zero_centered, weights_static)
    write_fp8(y, static_scale, out, scale_out)


def add_rms_norm_fp8(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: Optional,
    eps: float,
    zero_centered: bool,
    weights_static: bool,
    static_scale: Optional,
    out: torch.Tensor,
    scale_out: Optional,
    residual_out: torch.Tensor,
) -> None:
    y, total = add_rms_norm(x, residual, weight, eps, zero_centered, weights_static)
    residual_out.copy_(total)
    write_fp8(y, static_scale, out, scale_out)


def layer_norm_fp8(
    x: torch.Tensor,
    weight: Optional,
    bias: Optional,
    scale: Optional,
    shift: Optional,
    eps: float,
    weights_static: bool,
    static_scale: Optional,
    out: torch.Tensor,
    scale_out: Optional,
) -> None:
    y = layer_norm(x, weight, bias, scale, shift, eps, weights_static)
    write_fp8(y, static_scale, out, scale_out)


def _modulate(values: torch.Tensor, scale: Optional, shift: Optional) -> torch.Tensor:
    if scale is not None:
        values = values * (1.0 + scale.float())
    if shift is not None:
        values = values + shift.float()
    return values
