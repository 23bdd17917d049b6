"""The ops of this family in plain torch: their CPU implementation and the truth of their tests."""

from __future__ import annotations

import torch

from ._common.activations import apply_activation


def activate(x: torch.Tensor, activation: int) -> torch.Tensor:
    return activate_out(x, activation, x.new_empty(x.shape))


def activate_out(x: torch.Tensor, activation: int, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(apply_activation(x.float(), activation))


def gated(gate: torch.Tensor, up: torch.Tensor, activation: int) -> torch.Tensor:
    return gated_out(gate, up, activation, gate.new_empty(gate.shape))


def gated_out(
    gate: torch.Tensor, up: torch.Tensor, activation: int, out: torch.Tensor
) -> torch.Tensor:
    return out.copy_(apply_activation(gate.float(), activation) * up.float())
