"""What a region computes, read from the host: paths of its parameters and the scalars of its formula.

A spec holds paths relative to its region and no tensors, so it stays true when the host's parameters move, and one
spec describes every region of the same kind. ``bind`` in ``layer_math`` turns it into tensors for one region.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn


class NotThisForm(Exception):
    """The module is not of the form asked for; the message is the rule and the value that decided."""


@dataclass(frozen=True)
class Rows:
    """Rows ``start:stop`` of the weight ``[N, K]`` and bias ``[N]`` of the linear layer at ``path``."""

    path: str
    start: int
    stop: int
    total: int

    def tensors(self, region: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of these rows: views, never copies."""
        layer = region.get_submodule(self.path)
        weight, bias = layer.weight, layer.bias
        if self.stop - self.start == self.total:
            return weight, bias
        return weight[self.start : self.stop], None if bias is None else bias[
            self.start : self.stop
        ]


@dataclass(frozen=True)
class Norm:
    """``x * rsqrt(mean(x^2) + eps) * (weight, or 1 + weight when zero_centered)`` with the weight at ``path``."""

    path: str
    size: int
    eps: float
    zero_centered: bool


def is_linear(module: nn.Module) -> bool:
    """Whether ``module`` computes ``x @ W.T + b`` through ``nn.Linear``'s own forward and nothing around it."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def linear_rows(region: nn.Module, path: str, start: int = 0, stop: int | None = None) -> Rows:
    """Rows of the linear layer at ``path`` of ``region``; the whole layer by default."""
    total = int(region.get_submodule(path).weight.shape[0])
    return Rows(path, start, total if stop is None else stop, total)


def child_named(children: Mapping[str, nn.Module], names: Iterable[str]) -> str | None:
    """The one key of ``children`` that is in ``names``; None when there is none."""
    found = [name for name in children if name in set(names)]
    if len(found) > 1:
        raise NotThisForm(f"children {found} play the same part")
    return found[0] if found else None


def audit_scalars(module: nn.Module, read: Iterable[str], where: str) -> None:
    """Refuse a region with a number, flag or name in its ``__dict__`` that no structure reads.

    Raises:
        NotThisForm: naming the attribute and its value.
    """
    known = set(read) | {"training"}
    for name, value in vars(module).items():
        if name.startswith("_") or name in known or value is None:
            continue
        if isinstance(value, (bool, int, float, str)):
            raise NotThisForm(f"{where}: no structure reads {name} = {value!r}")


def read_norm(region: nn.Module, path: str) -> Norm:
    """Read the RMS norm at ``path`` by running a copy of it on the CPU against both formulas.

    Raises:
        NotThisForm: no single weight, no epsilon, or values of neither formula.
    """
    module = region.get_submodule(path)
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    if (
        list(parameters) != ["weight"]
        or weight is None
        or weight.ndim != 1
        or list(module.buffers())
    ):
        raise NotThisForm(
            f"{path}: an RMS norm has one weight [D] and nothing else, got {sorted(parameters)}"
        )
    eps = [float(v) for k, v in vars(module).items() if "eps" in k and isinstance(v, float)]
    if len(eps) != 1:
        raise NotThisForm(f"{path}: an RMS norm has one epsilon, got {eps}")
    audit_scalars(module, [k for k in vars(module) if "eps" in k] + _NORM_SCALARS, path)
    size = weight.shape[0]
    x = _probe(5, size) * torch.tensor([1e-3, 0.1, 1.0, 3.0, 30.0])[:, None]
    copied = 0.5 + 0.25 * _probe(1, size)[0]
    out = _run_with_weight(module, copied, x)
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps[0])
    for zero_centered in (False, True):
        expected = scaled * (1 + copied if zero_centered else copied)
        if torch.allclose(out, expected, rtol=1e-5, atol=1e-6):
            return Norm(path, size, eps[0], zero_centered)
    raise NotThisForm(
        f"{path}: {type(module).__name__} is not an RMS norm: error {(out - expected).abs().max():.2e}"
    )


_NORM_SCALARS = ["hidden_size", "dim", "normalized_shape", "elementwise_affine"]


def _probe(rows: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(rows, size, generator=generator)


def _run_with_weight(module: nn.Module, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The module's own forward on the CPU in fp32 with ``weight`` in the place of its weight; the module is untouched."""
    from torch.func import functional_call

    with torch.no_grad():
        out = functional_call(module, {"weight": weight}, (x,))
    if not isinstance(out, torch.Tensor):
        raise NotThisForm(
            f"{type(module).__name__} returns {type(out).__name__}, an RMS norm returns a tensor"
        )
    return out


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
    functional = torch.nn.functional
    if name == "silu":
        return functional.silu(x)
    if name in ("gelu", "gelu_tanh"):
        return functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
    if name == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    if name == "relu2":
        return functional.relu(x).square()
    return {
        "relu": functional.relu,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "identity": lambda y: y,
    }[name](x)


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
