"""Products of more rows than one launch takes with quantised weights, on torch's own products.

FP8 with a scale for each row of W, on GPUs whose tensor cores take it (compute capability 8.9 and
later): x is quantised too and the product runs in FP8. Anything else: a part of W at a time is
dequantised into the dtype of x.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._common.fp8 import FP8, quantize_rows_fp8
from .packed import row_count
from .schema import ops

_PART_BYTES = 128 << 20  # of a weight dequantised at a time
_ALIGNMENT = 16  # torch._scaled_mm: bytes of an address, and what N and K are multiples of


def dequantize_rows(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``scale * x`` for E4M3 ``x [M, K]`` and ``scale [M]`` or ``[1]``, rounded once."""
    return (x.float() * scale.reshape(-1, 1)).to(dtype)


def prepare(
    x: torch.Tensor,
    input_scale: torch.Tensor | None,
    weights: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    element: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The input of ``product``: E4M3 with its scale ``[M, 1]``, or of dtype ``element`` with None.

    Args:
        x: ``[M, K]`` of dtype ``element``, or E4M3 with ``input_scale [M]`` or ``[1]``.
    """
    if x.shape[0] <= 8 or not multiplies_in_fp8(x, weights, scales):
        if x.dtype != FP8:
            return x, None
        assert input_scale is not None
        return dequantize_rows(x, input_scale, element), None
    if x.dtype != FP8:
        x, input_scale = quantize_rows_fp8(x, input_scale)
    elif not x.is_contiguous() or not _aligned(x):
        x = x.clone(memory_format=torch.contiguous_format)
    assert input_scale is not None
    return x, input_scale.reshape(-1, 1).expand(x.shape[0], 1).contiguous()


def multiplies_in_fp8(
    x: torch.Tensor, weights: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]
) -> bool:
    """Whether the GPU of ``x`` has E4M3 products and all weights are as torch._scaled_mm asks."""
    for weight, scale in zip(weights, scales, strict=True):
        if weight.dtype is not FP8 or scale.dim() != 1 or not weight.is_contiguous():
            return False
        if any(size % _ALIGNMENT != 0 for size in weight.shape) or not _aligned(weight):
            return False
    return x.is_cuda and _has_fp8_products(x.get_device())


def product(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``x @ W.T + bias``, rounded to ``dtype``, for ``x`` and ``x_scale`` as ``prepare`` gives."""
    if x_scale is not None:
        return _fp8_product(x, x_scale, weight, scale, bias, dtype)
    n, k = row_count(weight, scale), x.shape[1]
    step = max(1, _PART_BYTES // (k * x.element_size()))
    parts = []
    for first in range(0, n, step):
        rows = torch.arange(first, min(first + step, n), device=x.device)
        part = x.new_empty((rows.shape[0], k))
        ops.embedding_out(part, rows, weight, scale, 1.0, False)
        part_bias = None if bias is None else bias[first : first + step]
        parts.append(plain_product(x, part, part_bias, dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def plain_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """``x @ weight.T + bias``, rounded to fp32 or to the dtype of x."""
    if dtype == x.dtype:
        return torch.nn.functional.linear(x, weight, bias)
    if x.is_cuda:
        y = torch.mm(x, weight.t(), out_dtype=dtype)
    else:
        y = torch.nn.functional.linear(x.float(), weight.float())
    return y if bias is None else y + bias


def _fp8_product(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """W8A8 on tensor cores: fp32 sums, then both scales."""
    if dtype == torch.bfloat16:
        return torch._scaled_mm(
            x,
            weight.t(),
            scale_a=x_scale,
            scale_b=scale.unsqueeze(0),
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=True,
        )
    # A scale a row and column is for bf16 results only in torch 2.11.
    one = torch.ones((), device=x.device)
    y = torch._scaled_mm(
        x, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=True
    )
    y = y.mul_(x_scale).mul_(scale)
    if bias is not None:
        y = y.add_(bias)
    return y.to(dtype)


def _aligned(tensor: torch.Tensor) -> bool:
    """Whether a view starts on a multiple of 16 bytes; a graph being traced cannot ask."""
    return torch.compiler.is_compiling() or tensor.storage_offset() % _ALIGNMENT == 0


@torch.compiler.assume_constant_result
def _has_fp8_products(device_index: int) -> bool:
    properties = torch.cuda.get_device_properties(device_index)
    return (properties.major, properties.minor) >= (8, 9)
