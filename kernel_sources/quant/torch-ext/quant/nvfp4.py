"""NVFP4: E2M1 elements, an E4M3 scale for 16 of them along K, one fp32 scale for the tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import arguments, reference
from ._common import checks
from ._common.fp8 import FP8, scale_of
from .reference import BLOCK, NVFP4_MAX
from .refine import refined_nvfp4
from .schemas import ops


class NVFP4(NamedTuple):
    """A weight ``[N, K]`` as ``global_scale * block_scales[n, k // 16] * e2m1(codes[n, k])``."""

    codes: torch.Tensor
    """uint8 ``[N, ceil(K / 2)]``: code of even k in the low nibble, sign at its bit 3."""
    block_scales: torch.Tensor
    """float8_e4m3fn ``[N, ceil(K / 16)]``, not negative."""
    global_scale: torch.Tensor
    """fp32 ``[1]``."""


def quantize_nvfp4(
    weight: torch.Tensor,
    *,
    importance: torch.Tensor | None = None,
    hessian: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
) -> NVFP4:
    """Quantise a weight to NVFP4 with block scales that minimise the squared error.

    ``global = max(abs(weight)) / (6 * 448)`` (1 where that is 0, at least 2**-126). In each block
    of 16 along K, every E4M3 value from 2 below to 6 above ``max(abs(block)) / (6 * global)`` is
    tried as scale ``s``, with ``q = round(weight / global / s)`` to the nearest E2M1, ties to even,
    and the smallest ``sum(importance * (weight / global - s * q)**2)`` is kept, the smallest scale
    among equals. A block of zeros has scale 0; codes under a scale of 0 are 0.

    With ``hessian`` columns are rounded one after the other, and the error of each is passed on to
    those behind it by the inverse of ``hessian`` (damped by 1 % of its mean diagonal), so that
    ``sum((x @ (weight - quantised).T)**2)`` is small rather than each distance; a block's scale is
    searched when its turn comes, with what that leaves of ``importance``.

    Args:
        weight: ``[N, K]`` bf16, fp16 or fp32, finite, last dim contiguous, any N and K.
        importance: fp32 ``[K]``, finite and not negative, contiguous: how much an error in a column
            counts (the mean square of the input that meets it); ``None`` for 1.
        hessian: fp32 ``[K, K]``, symmetric, finite, contiguous: the mean of ``x.T @ x`` over rows
            x of the layer's input; not with ``importance``. Minutes instead of seconds for a large
            model, and the time of nothing else.
        global_scale: fp32 of one element, positive, in place of the one above; what is beyond
            +-2688 of it saturates.

    Returns:
        :class:`NVFP4`. All arithmetic is fp32 in a fixed order, the same bits on every device; but
        with ``hessian``, whose matrix products are the device's own.
        Waits for the device, to refuse what is not finite.

    Raises:
        ValueError: a shape, stride, dtype or device outside the above, or a value that is not
            finite.
        RuntimeError: an input requires grad while grad mode is on.

    Source: NVIDIA 2025, arXiv:2509.25149, section 2 (the format); E2M1: OCP Microscaling Formats
    1.0, section 5.3.3; the passing on of errors: Frantar et al. 2022, arXiv:2210.17323.
    """
    op = "quantize_nvfp4"
    arguments.rows(op, "weight", weight, importance, hessian)
    if weight.dim() != 2:
        checks.fail(op, "weight", "have 2 dims", f"shape {tuple(weight.shape)}")
    N, K = weight.shape
    arguments.finite(op, "weight", weight)
    if hessian is not None:
        if importance is not None:
            checks.fail(op, "importance", "be None when hessian is given", "a tensor")
        arguments.statistic(op, "hessian", hessian, (K, K), weight.device)
        arguments.finite(op, "hessian", hessian)
    if importance is not None:
        arguments.statistic(op, "importance", importance, (K,), weight.device)
        if not bool(((importance >= 0) & importance.isfinite()).all()):
            checks.fail(op, "importance", "be finite and not negative", "a value that is not")
    if global_scale is None:
        global_scale = scale_of(arguments.magnitude(weight), NVFP4_MAX)
    else:
        arguments.one_scale(op, "global_scale", global_scale, weight.device)
        arguments.positive(op, "global_scale", global_scale)
        global_scale = global_scale.reshape(1)
    codes = torch.empty(N, -(-K // 2), dtype=torch.uint8, device=weight.device)
    block_scales = torch.empty(N, -(-K // BLOCK), dtype=FP8, device=weight.device)
    if hessian is not None and weight.numel():
        refined_nvfp4(weight, hessian, global_scale, codes, block_scales)
    else:
        ops.quantize_nvfp4(weight, global_scale, importance, codes, block_scales)
    return NVFP4(codes, block_scales, global_scale)


def dequantize_nvfp4(
    codes: torch.Tensor,
    block_scales: torch.Tensor,
    scale: torch.Tensor,
    *,
    columns: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Values of NVFP4 in its row-major form.

    ``out[n, k] = round(e2m1(codes[n, k]) * block_scales[n, k // 16] * scale[n])``; the first
    product is exact, the second rounds in fp32

    Args:
        codes, block_scales: as in :class:`NVFP4`, contiguous.
        scale: fp32 contiguous, one element (the global scale) or ``[N]``.
        columns: K when it is odd; default ``2 * codes.shape[1]``.
        dtype: of the result: bf16, fp16 or fp32.
        out: ``[N, K]``, any of the three dtypes, last dim contiguous; decides over ``dtype``.

    Returns:
        ``out``, or a new contiguous ``[N, K]``.

    Raises:
        ValueError: a shape, stride, dtype or device outside the above.

    Source: as :func:`quantize_nvfp4`.
    """
    op = "dequantize_nvfp4"
    N, K = arguments.nvfp4_shape(op, codes, block_scales, columns)
    arguments.row_scale(op, scale, N, codes.device)
    out = arguments.dequantized(op, out, (N, K), dtype, codes.device)
    ops.dequantize_nvfp4(codes, block_scales, scale, out)
    return out


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte: ``out[..., i] = codes[..., 2 * i] | codes[..., 2 * i + 1] << 4``.

    Args:
        codes: ``[..., K]`` uint8, values 0..15, any strides; a code beyond an odd K is 0.

    Returns:
        uint8 ``[..., ceil(K / 2)]``, contiguous. Plain torch on any device.

    Raises:
        ValueError: another dtype, or a value above 15 (the check waits for the device).

    Source: the order of compressed-tensors and ModelOpt checkpoints.
    """
    op = "pack_nibbles"
    checks.dims_at_least(op, "codes", codes, 1)
    checks.dtype_in(op, "codes", codes, (torch.uint8,))
    if codes.numel() and int(codes.max()) > 15:
        checks.fail(op, "codes", "be at most 15", int(codes.max()))
    return reference.pack(codes).contiguous()


def unpack_nibbles(packed: torch.Tensor, *, columns: int | None = None) -> torch.Tensor:
    """The reverse of :func:`pack_nibbles`: the low nibble first.

    Args:
        packed: ``[..., P]`` uint8, any strides.
        columns: K, ``2 * P`` (default) or one less.

    Returns:
        uint8 ``[..., K]`` with values 0..15, contiguous. Plain torch on any device.

    Raises:
        ValueError: another dtype, or ``columns`` that does not fit.

    Source: as :func:`pack_nibbles`.
    """
    op = "unpack_nibbles"
    checks.dims_at_least(op, "packed", packed, 1)
    checks.dtype_in(op, "packed", packed, (torch.uint8,))
    K = arguments.columns(op, packed.shape[-1], columns)
    return reference.unpack(packed)[..., :K].contiguous()
