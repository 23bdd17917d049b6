"""What the public functions ask of quantised weights and of an input that is quantised already."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._common import checks
from ._common.fp8 import FP8
from .packed import BLOCK, TILE_BYTES, TILE_ROWS, TURN_COLUMNS, PackedWeight, format_of


def check_packed_weights(
    op: str,
    x: torch.Tensor,
    k: int,
    weights: Sequence[PackedWeight],
    biases: Sequence[torch.Tensor | None],
    names: tuple[Sequence[str], Sequence[str]],
) -> int:
    """Quantised ``weights[i]`` of shape (N_i, K) and one format; returns the sum of N_i."""
    total = 0
    first = weights[0]
    for i, weight in enumerate(weights):
        name = names[0][i]
        if not isinstance(weight, PackedWeight):
            rule = f"be a PackedWeight, as {names[0][0]} is"
            checks.fail(op, name, rule, type(weight).__name__)
        check_packed(op, name, weight, x.device)
        n = weight.shape[0]
        if weight.shape[1] != k:
            checks.fail(op, name, f"have shape (N, {k})", tuple(weight.shape))
        if weight.data.dtype != first.data.dtype:
            checks.fail(op, name, f"be {first.format}, as {names[0][0]} is", weight.format)
        if weight.scale.dim() != first.scale.dim():
            rule = f"have a scale of {first.scale.dim()} dims, as {names[0][0]} has"
            checks.fail(op, name, rule, weight.scale.dim())
        total += n
        bias = biases[i]
        if bias is not None:
            check_vector(op, names[1][i], bias, n, x)
    return total


def check_packed(op: str, name: str, weight: PackedWeight, device: torch.device) -> None:
    """Data and scale fit the shape and each other, as ``PackedWeight`` says."""
    data, scale, shape = weight
    if len(shape) != 2 or min(shape) < 1:
        checks.fail(op, f"{name}.shape", "be (N, K), both at least 1", tuple(shape))
    n, k = shape
    form = format_of(data)
    if form == "plain":
        checks.dtype_in(op, f"{name}.data", data, (FP8, torch.int8, torch.uint8))
    checks.same_device(op, f"{name}.data", data, device)
    checks.same_device(op, f"{name}.scale", scale, device)
    if form == "nvfp4":
        tiles = (-(-n // TILE_ROWS), -(-k // TURN_COLUMNS), TILE_BYTES)
        checks.shape_is(op, f"{name}.data", data, tiles)
        checks.contiguous(op, f"{name}.data", data)
    else:
        checks.shape_is(op, f"{name}.data", data, (n, k))
        checks.unit_stride(op, f"{name}.data", data)
    checks.dtype_in(op, f"{name}.scale", scale, (torch.float32,))
    grid = (-(-n // BLOCK), -(-k // BLOCK))
    if form != "fp8" or scale.shape != grid:
        checks.shape_is(op, f"{name}.scale", scale, (n,))
    checks.contiguous(op, f"{name}.scale", scale)


def check_input_scale(
    op: str,
    x: torch.Tensor,
    scale: torch.Tensor | None,
    weights: Sequence[torch.Tensor | PackedWeight],
) -> None:
    """``scale`` fp32 ``[1]``, for E4M3 ``x`` of M rows also ``[M]``; ``weights`` are FP8."""
    if scale is None:
        checks.fail(op, "input_scale", "be given with an x of float8_e4m3fn", None)
    if any(not isinstance(w, PackedWeight) or w.format != "fp8" for w in weights):
        name = "x" if x.dtype is FP8 else "input_scale"
        rule = "not be float8_e4m3fn" if x.dtype is FP8 else "not be given"
        checks.fail(op, name, f"{rule} unless all weights are PackedWeight of fp8", "others")
    checks.dtype_in(op, "input_scale", scale, (torch.float32,))
    checks.same_device(op, "input_scale", scale, x.device)
    if x.dtype is not FP8 or scale.shape != (x.shape[:-1].numel(),):
        checks.shape_is(op, "input_scale", scale, (1,))
    checks.contiguous(op, "input_scale", scale)


def check_quantized_input(
    op: str,
    x: torch.Tensor,
    scale: torch.Tensor | None,
    weights: Sequence[torch.Tensor | PackedWeight],
    prologue: Sequence[object],
) -> None:
    """E4M3 ``x [..., K]`` with unit stride along K, and nothing of ``prologue`` before it."""
    checks.dims_at_least(op, "x", x, 1)
    if x.shape[-1] == 0:
        checks.fail(op, "x", "have at least one column", f"shape {tuple(x.shape)}")
    checks.unit_stride(op, "x", x)
    if any(argument is not None for argument in prologue):
        checks.fail(op, "x", "not be quantised before a norm or branch", "float8_e4m3fn")
    check_input_scale(op, x, scale, weights)


def element_dtype(
    x: torch.Tensor, out_dtype: torch.dtype | None, operands: Sequence[torch.Tensor | None]
) -> torch.dtype:
    """What quantised ``x`` would be otherwise: the first 16-bit dtype of the call, else bf16.

    On the CPU fp32 where something of the call is; on CUDA that is a wider result of a bf16 call.
    """
    dtypes = [tensor.dtype for tensor in operands if tensor is not None]
    if out_dtype is not None:
        dtypes.insert(0, out_dtype)
    for dtype in dtypes:
        if dtype in (torch.bfloat16, torch.float16):
            return dtype
    return torch.float32 if dtypes and not x.is_cuda else torch.bfloat16


def stand_in(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the other operands are held against: as ``x``, of ``dtype``, without memory."""
    return torch.empty((), dtype=dtype, device=x.device).expand(x.shape)


def check_vector(op: str, name: str, vector: torch.Tensor, size: int, x: torch.Tensor) -> None:
    """A contiguous ``[size]`` with the dtype and device of ``x``."""
    if vector.shape != (size,) or not vector.is_contiguous():
        checks.shape_is(op, name, vector, (size,))
        checks.contiguous(op, name, vector)
    if vector.dtype is not x.dtype or vector.device != x.device:
        check_like(op, name, vector, x)


def check_like(op: str, name: str, tensor: torch.Tensor, x: torch.Tensor) -> None:
    """The dtype and device of ``x``."""
    if tensor.dtype != x.dtype:
        checks.dtype_in(op, name, tensor, (x.dtype,))
    if tensor.device != x.device:
        checks.same_device(op, name, tensor, x.device)
