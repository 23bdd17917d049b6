"""What the capture tests share: small hosts, and how results are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from flash_rt.structures.capture import CapturedForward


class Host(nn.Module):
    """Two linears and an option; counts how often Python ran."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 16)
        self.outer = nn.Linear(16, 8)
        self.register_buffer("shift", torch.full((8,), 0.25))
        self.register_buffer("gain", torch.tensor(1.5))
        self.calls = 0

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float = 1.0
    ) -> torch.Tensor:
        self.calls += 1
        y = self.outer(torch.tanh(self.inner(x))) * self.gain * scale + self.shift
        return y if mask is None else y * mask


def host(device: torch.device) -> Host:
    torch.manual_seed(0)
    return Host().to(device).eval()


def batch(device: torch.device, rows: int = 3, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=generator).to(device)


def same(actual: Any, expected: Any) -> None:
    """Bitwise, in value, dtype and shape."""
    assert actual.dtype is expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(actual, expected)


def captured(m: nn.Module, **options: Any) -> CapturedForward:
    return CapturedForward(m, m.forward, **options)


def counts(c: CapturedForward) -> tuple[int, int, int]:
    return c.stats.captures, c.stats.replays, sum(c.stats.fallbacks.values())


def reasons(c: CapturedForward) -> list[str]:
    return list(c.stats.fallbacks)


class Custom(nn.Module):
    """A host whose forward is any function of (module, tensors...)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 2.0))
        self.register_buffer("count", torch.zeros(8))
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def custom(device: torch.device, function: Callable[..., Any]) -> tuple[Custom, CapturedForward]:
    m = Custom(function).to(device).eval()
    return m, captured(m)


def agree(device: torch.device, function: Any, make: Any, calls: int = 3) -> Any:
    """Captured and host agree bitwise on ``make(seed)``, the arguments of each call."""
    _, c = custom(device, function)
    m, _ = custom(device, function)
    for seed in range(calls):
        got, want = c(*make(seed)), m(*make(seed))
        same(got, want.detach())
    return c
