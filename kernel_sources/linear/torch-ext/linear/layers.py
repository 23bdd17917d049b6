"""Layers for ``kernels.kernelize``: nothing but a ``forward`` with the host's signature.

They read the host's own children, so its parameters stay where they are. A host that computes
something else (another activation, a child that is not a plain ``nn.Linear``) gets a TypeError,
never another result.
"""

from __future__ import annotations

import torch
from torch import nn

from .ops import gated_linear, linear

# What activation classes of torch and transformers, and the names in configurations, compute.
_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "silu": "silu",
    "swish": "silu",
    "GELUActivation": "gelu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
}


class SwiGLUMLP(nn.Module):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))`` for hosts with these three children."""

    can_torch_compile = True
    has_backward = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _gated_mlp(self, x, _activation(self, ("silu",), "silu"))


class GeGLUMLP(nn.Module):
    """``down_proj(gelu(gate_proj(x)) * up_proj(x))``, exact or tanh GELU as the host says.

    The host says it by ``act_fn`` (module or function), ``hidden_act`` or ``hidden_activation``.
    """

    can_torch_compile = True
    has_backward = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _gated_mlp(self, x, _activation(self, ("gelu", "gelu_tanh"), None))


class Linear(nn.Module):
    """``nn.Linear``."""

    can_torch_compile = True
    has_backward = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


def _gated_mlp(module: nn.Module, x: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up, down = module.gate_proj, module.up_proj, module.down_proj
    for child in (gate, up, down):
        if type(child) is not nn.Linear:
            name = type(child).__name__
            raise TypeError(f"gated MLP: projections must be nn.Linear, got {name}")
    hidden = gated_linear(x, gate.weight, up.weight, gate.bias, up.bias, activation=activation)
    return linear(hidden, down.weight, down.bias)


def _activation(module: nn.Module, allowed: tuple[str, ...], default: str | None) -> str:
    """The activation of the host, one of ``allowed``; ``default`` where it names none."""
    said = None
    for attribute in ("act_fn", "hidden_act", "hidden_activation"):
        said = getattr(module, attribute, None)
        if said is not None:
            break
    if isinstance(said, nn.GELU):
        name = "gelu_tanh" if said.approximate == "tanh" else "gelu"
    elif said is None:
        name = default
    elif isinstance(said, str):
        name = _ACTIVATIONS.get(said)
    else:
        name = _ACTIVATIONS.get(getattr(said, "__name__", type(said).__name__))
    if name not in allowed:
        raise TypeError(f"gated MLP: act_fn must be {' or '.join(allowed)}, got {said!r}")
    return name
