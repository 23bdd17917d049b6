"""What every animal of the zoo is made with: the register, sizes, inputs, redrawn parameters.

Parameters are redrawn: weights N(0, 1/fan_in), vectors N(0.7, 0.4^2), so that norm weights are not
1 and biases not 0, and a structure that ignores one of them cannot go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

VOCAB = 128
TEXT = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
VISION = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=32,
    patch_size=16,
)


@dataclass(frozen=True)
class Animal:
    """One architecture.

    Attributes:
        build: makes the model; weights are redrawn by ``make``.
        inputs: keyword arguments of one forward call.
        generates: whether it is a causal language model with ``generate``.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    generates: bool = False


ZOO: dict[str, Animal] = {}


def animal(inputs: Callable[[], dict[str, Any]], **facts: bool) -> Callable[..., Any]:
    """Enter a builder into the zoo under its own name."""

    def enter(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        ZOO[build.__name__] = Animal(build.__name__, build, inputs, **facts)
        return build

    return enter


def redraw(model: nn.Module, seed: int = 7) -> nn.Module:
    """Give every floating-point parameter a value that initialisation never gives."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.copy_(0.7 + 0.4 * values)
            else:
                parameter.copy_(values * parameter.shape[-1] ** -0.5)
    return model.eval()


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def ids(batch: int = 2, tokens: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, 100, (batch, tokens), generator=generator)


def text() -> dict[str, Any]:
    return {"input_ids": ids()}


def pixels() -> dict[str, Any]:
    return {"pixel_values": draw(1, 3, 32, 32)}


def causal(kind: str, **fields: Any) -> Callable[[], nn.Module]:
    """Enter a causal language model: ``<kind>Config`` and ``<kind>ForCausalLM``."""

    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**{**TEXT, **fields})
        return getattr(transformers, f"{kind}ForCausalLM")(config)

    return build
