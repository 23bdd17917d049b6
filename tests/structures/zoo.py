"""Tiny random models of many architectures, and an input for each."""

from __future__ import annotations

import functools
from typing import Any

import torch
import zoo_language  # noqa: F401  enters its animals into the zoo
import zoo_others  # noqa: F401
from torch import nn
from zoo_base import TEXT, VISION, VOCAB, ZOO, Animal, causal, draw, ids, redraw

__all__ = [
    "TEXT",
    "VISION",
    "VOCAB",
    "ZOO",
    "Animal",
    "causal",
    "draw",
    "ids",
    "inputs",
    "make",
    "redraw",
    "shared",
]


def make(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Module:
    """A fresh redrawn model."""
    torch.manual_seed(0)
    return redraw(ZOO[name].build()).to(dtype).to(device)


def inputs(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, Any]:
    """Arguments of one forward call, floats in ``dtype``."""

    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else value.dtype)

    return {name: place(value) for name, value in ZOO[name].inputs().items()}


@functools.cache
def shared(name: str, device: str = "cpu") -> nn.Module:
    """One fp32 model for all tests that put back what they change."""
    return make(name, device=device)
