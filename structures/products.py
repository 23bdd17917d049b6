"""Products of many rows: through torch for the host's own weights, else the ``linear`` family."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from . import kernels
from .weights import BoundLinear

Tensor = torch.Tensor

MAX_FUSED_ROWS = 8  # rows of one fused kernel; more run on torch's own products

_as_decoded: ContextVar[bool] = ContextVar("flashrt_as_decoded", default=False)


def is_plain(linear: BoundLinear) -> bool:
    """Whether the weight is the host's own."""
    return isinstance(linear.weight, Tensor)


@contextmanager
def as_decoded() -> Iterator[None]:
    """Within, packed weights are multiplied as a decode step does it, also for many rows.

    What a step would give can then be measured in one pass over a text.
    """
    token = _as_decoded.set(True)
    try:
        yield
    finally:
        _as_decoded.reset(token)


class Rows8(NamedTuple):
    """Rows in E4M3: ``data [..., K]`` times ``scale``, ``[...]`` or of one element.

    ``dtype`` is what they were, and what their products are.
    """

    data: Tensor
    scale: Tensor
    dtype: torch.dtype


def in_fp8(x: Tensor, linears: Sequence[BoundLinear]) -> bool:
    """Whether the product of ``x [M, K]`` with all of ``linears`` runs as E4M3 times E4M3."""
    return (
        x.numel() > MAX_FUSED_ROWS * x.shape[-1]
        and not _as_decoded.get()
        and all(map(_is_fp8, linears))
        and has_fp8_products(x.device)
    )


def _is_fp8(linear: BoundLinear) -> bool:
    weight = linear.weight
    if isinstance(weight, Tensor) or weight.data.dtype is not torch.float8_e4m3fn:
        return False
    return weight.scale.dim() == 1 and all(size % 16 == 0 for size in weight.shape)


@functools.cache
def has_fp8_products(device: torch.device) -> bool:
    """Whether ``device`` multiplies E4M3: compute capability 8.9 or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def project(x: Tensor | Rows8, linear: BoundLinear) -> Tensor:
    """``x @ weight.T + bias`` for ``x [..., K]``."""
    if isinstance(x, Tensor) and isinstance(linear.weight, Tensor):
        return F.linear(x, linear.weight, linear.bias)
    [y] = _packed(x, (linear,))
    return y


def project_all(x: Tensor | Rows8, linears: Sequence[BoundLinear]) -> tuple[Tensor, ...]:
    """The product of ``x`` with each of one to three layers; ``x`` is quantised once at most."""
    if all(map(is_plain, linears)):
        return tuple(project(x, linear) for linear in linears)
    return _packed(x, linears)


def project_added(x: Tensor | Rows8, linear: BoundLinear, residual: Tensor, scale: float) -> Tensor:
    """``residual + scale * (x @ weight.T + bias)`` for ``x [M, K]``."""
    if isinstance(linear.weight, Tensor):
        assert isinstance(x, Tensor)
        if linear.bias is None:
            return torch.addmm(residual, x, linear.weight.t(), alpha=scale)
        return torch.add(residual, project(x, linear), alpha=scale)
    if _as_decoded.get():
        return torch.add(residual, project(x, linear), alpha=scale)
    rows = _input(x, (linear,))
    y: Tensor = kernels.family("linear").linear(
        rows.pop("x"), linear.weight, linear.bias, residual=residual, scale=scale, **rows
    )
    return y


def _packed(x: Tensor | Rows8, linears: Sequence[BoundLinear]) -> tuple[Tensor, ...]:
    family = kernels.family("linear")
    weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
    if _as_decoded.get() and isinstance(x, Tensor) and x.is_cuda:
        rows = x.reshape(-1, x.shape[-1]).split(MAX_FUSED_ROWS)
        found = [family.linear_split(part, weights, biases) for part in rows]
        return tuple(torch.cat(parts).view(*x.shape[:-1], -1) for parts in zip(*found, strict=True))
    arguments = _input(x, linears)
    split: tuple[Tensor, ...] = family.linear_split(
        arguments.pop("x"), weights, biases, **arguments
    )
    return split


def _input(x: Tensor | Rows8, linears: Sequence[BoundLinear]) -> dict[str, Any]:
    """The input of a product with packed weights, in E4M3 where that is how it runs."""
    if isinstance(x, Tensor) and in_fp8(x, linears):
        static = linears[0].input_scale
        quantise = kernels.family("quant").quantize_fp8
        data, scale = quantise(x, scale=static, check_finite=False)
        x = Rows8(data, scale, x.dtype)
    if isinstance(x, Tensor):
        return {"x": x}
    return {"x": x.data, "input_scale": x.scale.view(-1), "out_dtype": x.dtype}
