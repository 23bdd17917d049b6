"""The ops of this family in plain torch: their CPU implementation and the truth of their tests."""

from __future__ import annotations

import torch

from ._common.activations import apply_activation
from ._common.fp8 import write_fp8

Optional = torch.Tensor | None


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


def activate_fp8(
    x: torch.Tensor,
    activation: int,
    static_scale: Optional,
    out: torch.Tensor,
    scale_out: Optional,
) -> None:
    write_fp8(activate(x, activation), static_scale, out, scale_out)


def gated_fp8(
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: int,
    static_scale: Optional,
    out: torch.Tensor,
    scale_out: Optional,
) -> None:
    write_fp8(gated(gate, up, activation), static_scale, out, scale_out)


def gated_packed_fp8(
    x: torch.Tensor,
    activation: int,
    gate_first: bool,
    static_scale: Optional,
    out: torch.Tensor,
    scale_out: Optional,
) -> None:
    write_fp8(gated_packed(x, activation, gate_first), static_scale, out, scale_out)
