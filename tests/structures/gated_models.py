"""A small model of two gated MLPs and norms, written as anyone would."""

from __future__ import annotations

import torch
import zoo
from torch import nn

from flash_rt import structures


class Mlp(nn.Module):
    """A gated MLP as anyone would write it."""

    def __init__(self, width: int = 32, inner: int = 48, bias: bool = True) -> None:
        super().__init__()
        self.a = nn.Linear(width, inner, bias=bias)
        self.b = nn.Linear(width, inner, bias=bias)
        self.c = nn.Linear(inner, width, bias=bias)
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.act(self.a(x)) * self.b(x))


class Model(nn.Module):
    """Two MLPs with norms, so that a region is never the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.first = Mlp()
        self.second = Mlp(bias=False)
        self.last = nn.RMSNorm(32, eps=1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(self.norm(x))
        return self.last(x + self.second(x))


def model() -> nn.Module:
    return zoo.redraw(Model())


def rows(plan: structures.Plan) -> dict[str, object]:
    return {row.path: row for row in plan.decisions}
