"""What the capture tests share: devices, small hosts, and how results are compared."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def require(device: str) -> torch.device:
    """The device, or a skip that FLASH_RT_REQUIRE_GPU=1 turns into a failure."""
    if device == "cuda" and not torch.cuda.is_available():
        if os.environ.get("FLASH_RT_REQUIRE_GPU") == "1":
            pytest.fail("FLASH_RT_REQUIRE_GPU=1, but torch sees no CUDA GPU")
        pytest.skip("needs a CUDA GPU")
    return torch.device(device, 0) if device == "cuda" else torch.device(device)


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
