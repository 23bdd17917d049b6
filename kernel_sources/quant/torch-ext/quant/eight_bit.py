"""FP8 and INT8: one scale for a tensor, a row, or (read only) a block of 128 x 128."""

from __future__ import annotations

import torch

from . import arguments
from ._common import checks
from ._common.fp8 import FP8, scale_of
from .reference import FP8_BLOCK
from .schemas import ops


def quantize_fp8(
    x: torch.Tensor,
    *,
    per: str = "row",
    scale: torch.Tensor | None = None,
    check_finite: bool = True,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to E4M3, each row (or the whole tensor) by its own or a given scale.

    ``scale = max(abs(x)) / 448`` over a row or the tensor (1 where that is 0, at least 2**-126);
    ``q = round(x / scale)`` to nearest even, at most +-448; ``x`` is close to ``q * scale``

    A row is a token of an activation, or an output channel of a weight.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32, last dim contiguous, leading dims at any strides, any K.
        per: ``"row"`` or ``"tensor"``: over what a scale is taken. Not read when ``scale`` is
            given.
        scale: fp32, positive: one element for all of ``x``, or ``x.shape[:-1]``, contiguous.
        check_finite: refuse a NaN or an infinity in ``x`` or ``scale``, which waits for the device.
            Without it nothing waits: a NaN becomes the NaN of E4M3; an infinity saturates under a
            given scale, and otherwise makes its scale and all that it scales NaN.
        out: float8_e4m3fn, shape of ``x``, last dim contiguous.
        scale_out: fp32 contiguous, ``x.shape[:-1]`` (``[1]`` per tensor); not with ``scale``.

    Returns:
        ``(q, scale)``; the scale is fp32 ``x.shape[:-1]``, ``[1]`` per tensor, or the given one.

    Raises:
        ValueError: a shape, stride, dtype or device outside the above, or a value that is not
            finite.
        RuntimeError: ``x`` requires grad while grad mode is on.

    Source: Micikevicius et al. 2022, arXiv:2209.05433, section 3.
    """
    op = "quantize_fp8"
    arguments.rows(op, "x", x, scale)
    checks.one_of(op, "per", per, ("row", "tensor"))
    out = arguments.output(op, "out", out, x.shape, FP8, x.device)
    if scale is not None:
        arguments.static_scale(op, scale, scale_out, x)
        if check_finite:
            arguments.finite(op, "x", x)
            arguments.positive(op, "scale", scale)
        ops.quantize_rows(x, scale, out, None)
        return out, scale
    shape = x.shape[:-1] if per == "row" else (1,)
    scale_out = arguments.output(op, "scale_out", scale_out, shape, torch.float32, x.device)
    checks.contiguous(op, "scale_out", scale_out)
    if per == "row":
        ops.quantize_rows(x, None, out, scale_out)
    else:
        scale_out.copy_(scale_of(arguments.magnitude(x)))
        ops.quantize_rows(x, scale_out, out, None)
    if check_finite:
        arguments.finite_source(op, scale_out)
    return out, scale_out


def dequantize_fp8(
    data: torch.Tensor,
    scale: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply E4M3 by its scale.

    ``out = round(data * scale)``, the product in fp32

    Args:
        data: ``[..., K]`` float8_e4m3fn, last dim contiguous, leading dims at any strides.
        scale: fp32 contiguous: one element for all; ``data.shape[:-1]``, one for each row; or, for
            ``data`` of two dims ``[N, K]``, ``[ceil(N / 128), ceil(K / 128)]``, one for each block.
        dtype: of the result: bf16, fp16 or fp32.
        out: shape of ``data``, any of the three dtypes, last dim contiguous; decides over
            ``dtype``.

    Returns:
        ``out``, or a new contiguous tensor.

    Raises:
        ValueError: a shape, stride, dtype or device outside the above.

    Source: Micikevicius et al. 2022, arXiv:2209.05433; blocks: DeepSeek-AI 2024, arXiv:2412.19437,
    section 3.3.2.
    """
    op = "dequantize_fp8"
    _check_data(op, data, FP8)
    blocks: tuple[int, ...] = ()
    if data.dim() == 2:
        blocks = tuple(-(-size // FP8_BLOCK) for size in data.shape)
    _check_scale(op, scale, data, blocks)
    return _dequantized(op, data, scale, dtype, out)


def quantize_int8(
    x: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row to symmetric INT8.

    ``scale = max(abs(row)) / 127`` (1 where that is 0, at least 2**-126); ``q = round(x / scale)``
    to nearest even, within +-127

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32, finite, last dim contiguous, leading dims at any
            strides, any K.
        out: int8, shape of ``x``, last dim contiguous.
        scale_out: fp32 contiguous, ``x.shape[:-1]``.

    Returns:
        ``(q, scale)``. Waits for the device, to refuse what is not finite.

    Raises:
        ValueError: a shape, stride, dtype or device outside the above, or a value that is not
            finite.
        RuntimeError: ``x`` requires grad while grad mode is on.

    Source: Jacob et al. 2018, arXiv:1712.05877, section 2.1, with zero point 0.
    """
    op = "quantize_int8"
    arguments.rows(op, "x", x, None)
    out = arguments.output(op, "out", out, x.shape, torch.int8, x.device)
    shape = x.shape[:-1]
    scale_out = arguments.output(op, "scale_out", scale_out, shape, torch.float32, x.device)
    checks.contiguous(op, "scale_out", scale_out)
    ops.quantize_rows(x, None, out, scale_out)
    arguments.finite_source(op, scale_out)
    return out, scale_out


def dequantize_int8(
    data: torch.Tensor,
    scale: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply INT8 by its scale: ``out = round(data * scale)``, the product in fp32.

    Args:
        data: ``[..., K]`` int8, last dim contiguous, leading dims at any strides.
        scale: fp32 contiguous: one element for all, or ``data.shape[:-1]``, one for each row.
        dtype, out: as in :func:`dequantize_fp8`.

    Returns:
        ``out``, or a new contiguous tensor.

    Raises:
        ValueError: a shape, stride, dtype or device outside the above.

    Source: Jacob et al. 2018, arXiv:1712.05877, eq. 1, with zero point 0.
    """
    op = "dequantize_int8"
    _check_data(op, data, torch.int8)
    _check_scale(op, scale, data, ())
    return _dequantized(op, data, scale, dtype, out)


def _check_data(op, data, dtype):
    checks.dims_at_least(op, "data", data, 1)
    checks.dtype_in(op, "data", data, (dtype,))
    checks.unit_stride(op, "data", data)


def _check_scale(op, scale, data, blocks):
    checks.dtype_in(op, "scale", scale, (torch.float32,))
    checks.same_device(op, "scale", scale, data.device)
    checks.contiguous(op, "scale", scale)
    shape = tuple(scale.shape)
    if scale.numel() == 1 or shape == tuple(data.shape[:-1]) or (blocks and shape == blocks):
        return
    rule = f"have one element or shape {tuple(data.shape[:-1])}"
    checks.fail(op, "scale", rule + (f" or {blocks}" if blocks else ""), shape)


def _dequantized(op, data, scale, dtype, out):
    out = arguments.dequantized(op, out, data.shape, dtype, data.device)
    ops.dequantize(data, scale, out)
    return out
