"""Products of many rows: through torch for the host's own weights, else the ``linear`` family."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

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


def project(x: Tensor, linear: BoundLinear) -> Tensor:
    """``x @ weight.T + bias`` for ``x [..., K]``."""
    if isinstance(linear.weight, Tensor):
        return F.linear(x, linear.weight, linear.bias)
    [y] = _packed(x, (linear,))
    return y


def project_all(x: Tensor, linears: Sequence[BoundLinear]) -> tuple[Tensor, ...]:
    """The product of ``x`` with each of one to three layers; ``x`` is quantised once at most."""
    if all(map(is_plain, linears)):
        return tuple(project(x, linear) for linear in linears)
    return _packed(x, linears)


def project_added(x: Tensor, linear: BoundLinear, residual: Tensor, scale: float) -> Tensor:
    """``residual + scale * (x @ weight.T + bias)`` for ``x [M, K]``."""
    if not isinstance(linear.weight, Tensor):
        if _as_decoded.get():
            return torch.add(residual, project(x, linear), alpha=scale)
        y: Tensor = kernels.family("linear").linear(
            x,
            linear.weight,
            linear.bias,
            residual=residual,
            scale=scale,
            input_scale=linear.input_scale,
        )
        return y
    if linear.bias is None:
        return torch.addmm(residual, x, linear.weight.t(), alpha=scale)
    return torch.add(residual, project(x, linear), alpha=scale)


def _packed(x: Tensor, linears: Sequence[BoundLinear]) -> tuple[Tensor, ...]:
    family = kernels.family("linear")
    weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
    if _as_decoded.get() and x.is_cuda:
        rows = x.reshape(-1, x.shape[-1]).split(MAX_FUSED_ROWS)
        found = [family.linear_split(part, weights, biases) for part in rows]
        return tuple(torch.cat(parts).view(*x.shape[:-1], -1) for parts in zip(*found, strict=True))
    split: tuple[Tensor, ...] = family.linear_split(
        x, weights, biases, input_scale=linears[0].input_scale
    )
    return split
