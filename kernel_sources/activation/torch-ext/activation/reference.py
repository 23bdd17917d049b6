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


def gated_packed(x: torch.Tensor, activation: int, gate_first: bool) -> torch.Tensor:
    out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    return gated_packed_out(x, activation, gate_first, out)


def gated_packed_out(
    x: torch.Tensor, activation: int, gate_first: bool, out: torch.Tensor
) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1) if x.shape[-1] > 0 else (x, x)
    gate, up = (first, second) if gate_first else (second, first)
    return gated_out(gate, up, activation, out)
