"""Inputs and fp64 truths that the activation tests share."""

import math

import torch

SLOPE = math.sqrt(2 / math.pi)
FORMULAS = {
    "identity": lambda x: x,
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x * torch.special.ndtr(x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(SLOPE * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "tanh": torch.tanh,
}


def values(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    """Both signs, from the linear middle of every activation to its flat ends."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 3).to(dtype).to(device)
