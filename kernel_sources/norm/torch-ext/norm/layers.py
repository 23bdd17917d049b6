"""Layers for ``kernels.kernelize``: they borrow the host's parameters and its forward signature."""

from __future__ import annotations

import torch
from torch import nn

from . import ops


class RMSNorm(nn.Module):
    """``x * rsqrt(mean(x**2) + eps) * weight``; see :func:`ops.rms_norm`.

    For hosts with ``weight`` and either ``variance_epsilon`` or ``eps``.
    """

    can_torch_compile = True
    has_backward = False
    weight: torch.Tensor

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(hidden_states, self.weight, eps=_epsilon(self))


class RMSNormZeroCentered(nn.Module):
    """``x * rsqrt(mean(x**2) + eps) * (1 + weight)``; see :func:`ops.rms_norm`."""

    can_torch_compile = True
    has_backward = False
    weight: torch.Tensor

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(hidden_states, self.weight, eps=_epsilon(self), zero_centered=True)


class LayerNorm(nn.Module):
    """``nn.LayerNorm`` over the last dim; see :func:`ops.layer_norm`."""

    can_torch_compile = True
    has_backward = False
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return ops.layer_norm(input, self.weight, self.bias, eps=self.eps)


def _epsilon(host: nn.Module) -> float:
    """The host's epsilon, under whichever of its two usual names it has."""
    attributes = host.__dict__
    return attributes["variance_epsilon"] if "variance_epsilon" in attributes else attributes["eps"]
