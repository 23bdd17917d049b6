"""Argument checks that every family's public functions share.

A failed check raises with one sentence: ``"op: argument must rule, got value"``. The message is
built only on failure; a check that passes costs a few hundred nanoseconds and traces under
``torch.compile(fullgraph=True)``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

import torch

LARGEST = sys.float_info.max


def fail(op: str, argument: str, rule: str, value: object) -> NoReturn:
    """Raise ``ValueError("op: argument must rule, got value")``."""
    raise ValueError(f"{op}: {argument} must {rule}, got {value}")


def short_dtype(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def inference_only(op: str, *tensors: torch.Tensor | None) -> None:
    """Refuse what autograd would record: the ops have no backward."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                raise RuntimeError(
                    f"{op}: has no backward and an input requires grad; "
                    "call it under torch.no_grad() or torch.inference_mode()"
                )


def dtype_in(op: str, argument: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        names = " or ".join(short_dtype(dtype) for dtype in allowed)
        fail(op, argument, f"be {names}", short_dtype(tensor.dtype))


def same_device(op: str, argument: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        fail(op, argument, f"be on {device}", tensor.device)


def dims_at_least(op: str, argument: str, tensor: torch.Tensor, count: int) -> None:
    if tensor.dim() < count:
        fail(op, argument, f"have at least {count} dims", f"shape {tuple(tensor.shape)}")


def shape_is(op: str, argument: str, tensor: torch.Tensor, shape: Sequence[int]) -> None:
    if tensor.shape != shape and tensor.shape != torch.Size(shape):  # a tuple compares at once
        fail(op, argument, f"have shape {tuple(shape)}", tuple(tensor.shape))


def unit_stride(op: str, argument: str, tensor: torch.Tensor) -> None:
    """The last dim is contiguous (a last dim of one element always is)."""
    strides = tensor.stride()
    if strides[-1] != 1 and tensor.shape[-1] > 1:
        dim = len(strides) - 1
        fail(op, argument, f"have unit stride in dim {dim}", f"strides {strides}")


def contiguous(op: str, argument: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        fail(op, argument, "be contiguous", f"strides {tensor.stride()}")


def output(
    op: str,
    argument: str,
    tensor: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """A caller's output: shape, dtype, device, a contiguous last dim, no element written twice."""
    shape_is(op, argument, tensor, shape)
    if tensor.dtype != dtype:
        fail(op, argument, f"be {short_dtype(dtype)}", short_dtype(tensor.dtype))
    same_device(op, argument, tensor, device)
    strides = tensor.stride()
    if strides and strides[-1] != 1:
        unit_stride(op, argument, tensor)
    if 0 in strides and any(
        step == 0 and size > 1 for step, size in zip(strides, shape, strict=True)
    ):
        fail(op, argument, "not be expanded", f"strides {strides}")


def one_of(op: str, argument: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        fail(op, argument, f"be one of {', '.join(choices)}", repr(value))


def not_negative(op: str, argument: str, value: float) -> None:
    """``value >= 0`` and finite (a NaN fails too)."""
    if not 0.0 <= value <= LARGEST:
        fail(op, argument, "be finite and not negative", value)
