"""Plain MLP: ``down(activation(up(x)))``, found by form: two linear layers of fitting shapes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import nn

from .. import kernels
from ..products import is_plain, project
from ..region import Region
from .base import MAX_FUSED_ROWS, Fast, Groups, Refusal, Spec, Structure, Survey
from .forms import activations, with_activation
from .gated_mlp import linear_parts, sizes
from .linear import LinearSpec
from .spec import activation_value


@dataclass(frozen=True)
class MlpSpec(Spec):
    """The two layers in the order in which they run."""

    up: LinearSpec
    down: LinearSpec
    activation: str


class Mlp(Structure):
    """``[..., D] -> [..., D]``."""

    name = "mlp"
    families = ("activation", "linear")
    multiplies = True
    unary = True
    reads = frozenset({"approximate"})

    def propose(self, region: Region, survey: Survey) -> tuple[MlpSpec, ...] | Refusal | None:
        ways = [
            (up, down)
            for parts in linear_parts(region, 2)
            if len(parts) == 2
            for up, down in permutations(parts)
            if sizes(up, region)[0] == sizes(down, region)[1]
        ]
        if not ways:
            return None
        names = activations(region)
        if isinstance(names, Refusal):
            return names
        return with_activation(names, lambda name: [MlpSpec(up, down, name) for up, down in ways])

    def width(self, spec: MlpSpec, module: nn.Module) -> int:
        return int(spec.up.tensors(module)[0].shape[1])

    def reference(
        self, spec: MlpSpec, module: nn.Module, *args: Any, dtype: torch.dtype, **kwargs: Any
    ) -> torch.Tensor:
        hidden = activation_value(spec.activation, spec.up.wide(module, args[0].to(dtype)))
        return spec.down.wide(module, hidden)

    def weights(self, spec: MlpSpec, module: nn.Module) -> Groups:
        return ((spec.up.part,), (spec.down.part,))

    def bind(self, spec: MlpSpec) -> Fast:
        linear, activate = kernels.family("linear").linear, kernels.family("activation").activate
        name = spec.activation
        stored_by_rows = not spec.up.transposed and not spec.down.transposed

        def fast(self: nn.Module, x: torch.Tensor) -> Any:
            up, down = spec.up.bound(self), spec.down.bound(self)
            fused = stored_by_rows or not (is_plain(up) or is_plain(down))
            if fused and x.numel() <= MAX_FUSED_ROWS * x.shape[-1]:
                hidden = linear(x, up.weight, up.bias, activation=name)
                return linear(hidden, down.weight, down.bias)
            return project(activate(project(x, up), activation=name), down)

        return fast
