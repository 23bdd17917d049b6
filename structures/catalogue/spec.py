"""What a region computes, read from the host: its parameters' names, its formula's scalars.

A spec holds paths relative to its region and no tensors, so it stays true when the host's
parameters move, and one spec describes every region of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeGuard, cast

import torch
from torch import nn

from ..binding import host_class
from ..weights import BoundLinear, bound_linear, copy_of
from .base import Part, Spec


class NotThisForm(Exception):
    """The module is not of the form asked for; the message is the rule and the value."""


def module_at(region: nn.Module, path: str) -> nn.Module:
    """The module at a dotted ``path``; ``""`` is the region. Cheaper than ``get_submodule``."""
    for name in path.split(".") if path else ():
        region = region._modules[name]  # type: ignore[assignment]
    return region


@dataclass(frozen=True)
class Rows(Spec):
    """A linear layer at ``path``, weight ``[N, K]``, bias ``[N]``, or its rows ``start:stop``."""

    path: str
    start: int | None = None
    stop: int | None = None

    def tensors(self, region: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of these rows: views, never copies."""
        parameters: Any = module_at(region, self.path)._parameters
        weight, bias = parameters["weight"], parameters.get("bias")
        if self.start is None:
            return weight, bias
        rows = slice(self.start, self.stop)
        return weight[rows], None if bias is None else bias[rows]

    @property
    def part(self) -> Part:
        """The weight that these rows are of."""
        return Part(self.path, cuts=tuple(c for c in (self.start, self.stop) if c is not None))

    def bound(self, region: nn.Module) -> BoundLinear:
        """What a bound forward reads for these rows: the host's tensors, or a packed copy."""
        parameters: Any = module_at(region, self.path)._parameters
        weight, bias = parameters["weight"], parameters.get("bias")
        return bound_linear(weight, bias, start=self.start, stop=self.stop)

    def count(self, region: nn.Module) -> int:
        """N."""
        return int(self.tensors(region)[0].shape[0])

    def wide(self, region: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """The product in the dtype of ``x``; what references use."""
        weight, bias = self.tensors(region)
        bias = None if bias is None else bias.to(x.dtype)
        out: torch.Tensor = nn.functional.linear(x, weight.to(x.dtype), bias)
        return out


def whole(region: nn.Module, *parts: Rows) -> BoundLinear | None:
    """The layer that ``parts`` are consecutive rows of; None when they are or were packed apart."""
    for before, after in pairwise(parts):
        if before.path != after.path or before.stop is None or before.stop != after.start:
            return None
    copy = copy_of(module_at(region, parts[0].path)._parameters["weight"])  # type: ignore[arg-type]
    return None if copy is not None and not copy.whole else Rows(parts[0].path).bound(region)


@dataclass(frozen=True)
class Norm(Spec):
    """``x * rsqrt(mean(x^2) + eps) * w``, or ``1 + w`` when zero-centred; ``w`` is at ``path``."""

    path: str
    eps: float
    zero_centered: bool

    def weight(self, region: nn.Module) -> torch.Tensor:
        return cast(torch.Tensor, module_at(region, self.path)._parameters["weight"])

    def wide(self, region: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """The norm over the last dim in the dtype of ``x``; what references use."""
        weight = self.weight(region).to(x.dtype)
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        out: torch.Tensor = scaled * (1 + weight if self.zero_centered else weight)
        return out


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether ``module`` computes ``x @ W.T + b`` through ``nn.Linear``'s own forward.

    A weight that is computed (weight norm, pruning) is no parameter and makes it another form.
    """
    return (
        isinstance(module, nn.Linear)
        and host_class(module).forward is nn.Linear.forward
        and isinstance(module._parameters.get("weight"), nn.Parameter)
    )


def child_named(children: Mapping[str, nn.Module], names: Iterable[str]) -> str | None:
    """The one key of ``children`` that is in ``names``; None when there is none.

    Raises:
        NotThisForm: several are.
    """
    found = [name for name in children if name in set(names)]
    if len(found) > 1:
        raise NotThisForm(f"children {found} play the same part")
    return found[0] if found else None


ACTIVATIONS = (
    "silu",
    "gelu",
    "gelu_tanh",
    "quick_gelu",
    "relu",
    "relu2",
    "sigmoid",
    "tanh",
    "identity",
)


def activation_value(name: str, x: torch.Tensor) -> torch.Tensor:
    """The activation ``name`` of the kernel families, in plain torch."""
    functional: Any = torch.nn.functional
    values: dict[str, Callable[[], torch.Tensor]] = {
        "silu": lambda: functional.silu(x),
        "gelu": lambda: functional.gelu(x),
        "gelu_tanh": lambda: functional.gelu(x, approximate="tanh"),
        "quick_gelu": lambda: x * torch.sigmoid(1.702 * x),
        "relu": lambda: functional.relu(x),
        "relu2": lambda: functional.relu(x).square(),
        "sigmoid": lambda: torch.sigmoid(x),
        "tanh": lambda: torch.tanh(x),
        "identity": lambda: x,
    }
    return values[name]()


def read_activation(function: object, where: str) -> str:
    """The name of the activation whose values ``function`` has on [-12, 12].

    Raises:
        NotThisForm: none of ``ACTIVATIONS`` agrees to 1e-6.
    """
    if not callable(function):
        raise NotThisForm(f"{where}: no activation function")
    x = torch.linspace(-12, 12, 4801)
    with torch.no_grad():
        out = function(x)
    for name in ACTIVATIONS:
        if torch.allclose(out, activation_value(name, x), rtol=1e-6, atol=1e-6):
            return name
    raise NotThisForm(
        f"{where}: activation {type(function).__name__} is none of {', '.join(ACTIVATIONS)}"
    )
