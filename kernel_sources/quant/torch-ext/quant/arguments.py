"""Checks that only this family needs; what all families need is in _common/checks.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._common import checks
from ._common.fp8 import FP8
from .reference import BLOCK

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rows(op: str, name: str, x: torch.Tensor, *others: torch.Tensor | None) -> None:
    """``x`` has rows: bf16, fp16 or fp32, unit stride in its last dim."""
    checks.inference_only(op, x, *others)
    checks.dims_at_least(op, name, x, 1)
    checks.dtype_in(op, name, x, DTYPES)
    checks.unit_stride(op, name, x)


def static_scale(
    op: str, scale: torch.Tensor, scale_out: torch.Tensor | None, x: torch.Tensor
) -> None:
    if scale_out is not None:
        checks.fail(op, "scale_out", "be None when scale is given", "a tensor")
    checks.dtype_in(op, "scale", scale, (torch.float32,))
    checks.same_device(op, "scale", scale, x.device)
    checks.contiguous(op, "scale", scale)
    if scale.numel() != 1 and scale.shape != x.shape[:-1]:
        rule = f"have one element or shape {tuple(x.shape[:-1])}"
        checks.fail(op, "scale", rule, tuple(scale.shape))


def output(
    op: str,
    name: str,
    out: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """The caller's output, checked, or a new contiguous one."""
    if out is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    checks.output(op, name, out, shape, dtype, device)
    return out


def dequantized(
    op: str,
    out: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Where dequantised values go: ``out``, whatever its dtype, or a new tensor of ``dtype``."""
    if out is None and dtype not in DTYPES:
        names = " or ".join(checks.short_dtype(allowed) for allowed in DTYPES)
        checks.fail(op, "dtype", f"be {names}", checks.short_dtype(dtype))
    if out is not None:
        checks.dtype_in(op, "out", out, DTYPES)
        dtype = out.dtype
    return output(op, "out", out, shape, dtype, device)


def magnitude(x: torch.Tensor) -> torch.Tensor:
    """``max(abs(x))`` as fp32 ``[1]``, 0 when empty, NaN when there is one; waits for nothing."""
    if x.numel() == 0:
        return torch.zeros(1, device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(low.abs(), high.abs()).float().reshape(1)


def finite(op: str, name: str, x: torch.Tensor) -> None:
    if not bool(magnitude(x).isfinite()):
        _refuse(op, name)


def finite_source(op: str, scale: torch.Tensor) -> None:
    """Refuse ``x`` when a scale made from it is not finite, as one NaN or infinity makes it."""
    if not bool(scale.isfinite().all()):
        _refuse(op, "x")


def positive(op: str, name: str, scale: torch.Tensor) -> None:
    if not bool(((scale > 0) & scale.isfinite()).all()):
        checks.fail(op, name, "be positive and finite", "a value that is not")


def _refuse(op, name):
    checks.fail(op, name, "be finite", "a NaN or an infinity")


def one_scale(op: str, name: str, scale: torch.Tensor, device: torch.device) -> None:
    checks.dtype_in(op, name, scale, (torch.float32,))
    checks.same_device(op, name, scale, device)
    if scale.numel() != 1:
        checks.fail(op, name, "have one element", f"shape {tuple(scale.shape)}")


def row_scale(op: str, scale: torch.Tensor, N: int, device: torch.device) -> None:
    """fp32 on ``device``, contiguous, one element or ``[N]``."""
    checks.dtype_in(op, "scale", scale, (torch.float32,))
    checks.same_device(op, "scale", scale, device)
    checks.contiguous(op, "scale", scale)
    if scale.numel() != 1 and tuple(scale.shape) != (N,):
        checks.fail(op, "scale", f"have one element or shape ({N},)", tuple(scale.shape))


def columns(op: str, packed_columns: int, columns: int | None) -> int:
    """K of ``packed_columns`` bytes of two codes."""
    if columns is None:
        return 2 * packed_columns
    if columns != 2 * packed_columns and columns != 2 * packed_columns - 1:
        rule = f"be {2 * packed_columns} or {2 * packed_columns - 1}"
        checks.fail(op, "columns", rule, columns)
    return columns


def nvfp4_shape(
    op: str, codes: torch.Tensor, block_scales: torch.Tensor, K: int | None
) -> tuple[int, int]:
    """(N, K) of a row-major NVFP4 weight whose parts fit each other."""
    checks.dtype_in(op, "codes", codes, (torch.uint8,))
    if codes.dim() != 2:
        checks.fail(op, "codes", "have 2 dims", f"shape {tuple(codes.shape)}")
    checks.contiguous(op, "codes", codes)
    K = columns(op, codes.shape[1], K)
    N = codes.shape[0]
    checks.shape_is(op, "block_scales", block_scales, (N, -(-K // BLOCK)))
    checks.dtype_in(op, "block_scales", block_scales, (FP8,))
    checks.same_device(op, "block_scales", block_scales, codes.device)
    checks.contiguous(op, "block_scales", block_scales)
    return N, K


def statistic(
    op: str, name: str, tensor: torch.Tensor, shape: Sequence[int], device: torch.device
) -> None:
    """Something measured of a layer's input: fp32 of that shape, contiguous, on ``device``."""
    checks.shape_is(op, name, tensor, shape)
    checks.dtype_in(op, name, tensor, (torch.float32,))
    checks.same_device(op, name, tensor, device)
    checks.contiguous(op, name, tensor)
