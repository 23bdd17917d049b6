"""Layers for ``kernels.kernelize``, under the names that transformers gives its activations."""

from __future__ import annotations

import torch
from torch import nn

from . import ops


class SiLU(nn.Module):
    """``x * sigmoid(x)``."""

    can_torch_compile = True
    has_backward = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return ops.activate(input, activation="silu")


class GeLU(nn.Module):
    """GELU by the error function."""

    can_torch_compile = True
    has_backward = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return ops.activate(input, activation="gelu")


class GeluTanh(nn.Module):
    """GELU, tanh approximation."""

    can_torch_compile = True
    has_backward = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return ops.activate(input, activation="gelu_tanh")


class NewGELU(GeluTanh):
    """The tanh approximation as GPT-2 writes it."""


class FastGELU(GeluTanh):
    """The tanh approximation as GPT-J writes it."""


class QuickGELU(nn.Module):
    """``x * sigmoid(1.702 * x)``."""

    can_torch_compile = True
    has_backward = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return ops.activate(input, activation="quick_gelu")
