"""Gated MLP: ``down(activation(gate(x)) * up(x))``; gate and up separate, or halves of one matrix.

Found by form: three linear layers of fitting shapes (or two, the first twice as wide as the second
reads) and one activation. Which part is the gate is proposed both ways and settled by the proof.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Any

import torch
from torch import nn

from .. import kernels
from ..products import project, project_all
from ..region import Region
from .base import MAX_FUSED_ROWS, PROOF_WIDTH, Fast, Groups, Refusal, Spec, Structure, Survey
from .forms import activations, few_owners, takes_one_tensor, with_activation
from .linear import LinearSpec, leaf_specs
from .spec import activation_value


@dataclass(frozen=True)
class GatedMlpSpec(Spec):
    """``up`` is ``None`` where ``gate`` holds both as halves of its rows."""

    gate: LinearSpec
    up: LinearSpec | None
    down: LinearSpec
    activation: str
    gate_first: bool = True


class GatedMlp(Structure):
    """``[..., D] -> [..., D]``."""

    name = "gated_mlp"
    families = ("activation", "linear")
    multiplies = True
    unary = True
    reads = frozenset({"approximate"})

    def propose(self, region: Region, survey: Survey) -> tuple[GatedMlpSpec, ...] | Refusal | None:
        ways: list[Way] = []
        for parts in linear_parts(region, 3):
            if len(parts) > 1:
                ways += (_separate if len(parts) == 3 else _halves)(region, parts)
        if not ways:
            return None
        names = activations(region)
        if isinstance(names, Refusal):
            return names
        return with_activation(
            names, lambda name: [GatedMlpSpec(g, u, d, name, first) for g, u, d, first in ways]
        )

    def width(self, spec: GatedMlpSpec, module: nn.Module) -> int:
        return int(spec.gate.tensors(module)[0].shape[1])

    def crop(self, spec: GatedMlpSpec, module: nn.Module) -> dict[str, tuple[int, ...]]:
        width = min(PROOF_WIDTH, self.width(spec, module))
        inner = min(PROOF_WIDTH, spec.down.tensors(module)[0].shape[1])
        rows = inner if spec.up is not None else 2 * inner
        shapes = spec.gate.shapes(module, rows, width) | spec.down.shapes(module, width, inner)
        return shapes if spec.up is None else shapes | spec.up.shapes(module, rows, width)

    def reference(
        self, spec: GatedMlpSpec, module: nn.Module, *args: Any, dtype: torch.dtype, **kwargs: Any
    ) -> torch.Tensor:
        x = args[0].to(dtype)
        gate = spec.gate.wide(module, x)
        if spec.up is not None:
            up = spec.up.wide(module, x)
        else:
            gate, up = gate.chunk(2, dim=-1) if spec.gate_first else gate.chunk(2, dim=-1)[::-1]
        return spec.down.wide(module, activation_value(spec.activation, gate) * up)

    def weights(self, spec: GatedMlpSpec, module: nn.Module) -> Groups:
        if spec.up is not None:
            return ((spec.gate.part, spec.up.part), (spec.down.part,))
        half = spec.gate.tensors(module)[0].shape[0] // 2
        return ((replace(spec.gate.part, cuts=(half,)),), (spec.down.part,))

    def bind(self, spec: GatedMlpSpec) -> Fast:
        return _bind_halves(spec) if spec.up is None else _bind_separate(spec, spec.up)


def linear_parts(region: Region, limit: int) -> list[tuple[LinearSpec, ...]]:
    """Specs of all tensor-owning modules of a region, if all have the form of a linear layer.

    One tuple for each reading: a square matrix may be stored either way round.
    """
    paths = few_owners(region.module, limit)
    if not paths or "" in paths or not takes_one_tensor(region.module):
        return []
    ways = [leaf_specs(region.module.get_submodule(path), path) for path in paths]
    return list(product(*ways))


def sizes(part: LinearSpec, region: Region) -> tuple[int, int]:
    """Rows N and columns K of a part's matrix."""
    rows, columns = part.tensors(region.module)[0].shape
    return rows, columns


Way = tuple[LinearSpec, "LinearSpec | None", LinearSpec, bool]


def _separate(region: Region, parts: tuple[LinearSpec, ...]) -> Iterator[Way]:
    for gate, up, down in permutations(parts):
        inner, _ = sizes(gate, region)
        if sizes(gate, region) == sizes(up, region) and inner == sizes(down, region)[1]:
            yield gate, up, down, True


def _halves(region: Region, parts: tuple[LinearSpec, ...]) -> Iterator[Way]:
    both, down = parts
    if sizes(both, region)[0] == 2 * sizes(down, region)[1]:
        yield both, None, down, True
        yield both, None, down, False


def _bind_separate(spec: GatedMlpSpec, up_spec: LinearSpec) -> Fast:
    linear, gated_linear = kernels.family("linear").linear, kernels.family("linear").gated_linear
    gated = kernels.family("activation").gated
    name = spec.activation

    def fast(self: nn.Module, x: torch.Tensor) -> Any:
        gate, up, down = spec.gate.bound(self), up_spec.bound(self), spec.down.bound(self)
        if x.numel() <= MAX_FUSED_ROWS * x.shape[-1]:
            hidden = gated_linear(x, gate.weight, up.weight, gate.bias, up.bias, activation=name)
            return linear(hidden, down.weight, down.bias)
        return project(gated(*project_all(x, (gate, up)), activation=name), down)

    return fast


def _bind_halves(spec: GatedMlpSpec) -> Fast:
    linear, gated_linear = kernels.family("linear").linear, kernels.family("linear").gated_linear
    gated_packed = kernels.family("activation").gated_packed
    name, first = spec.activation, spec.gate_first

    def fast(self: nn.Module, x: torch.Tensor) -> Any:
        down = spec.down.bound(self)
        if x.numel() <= MAX_FUSED_ROWS * x.shape[-1]:
            halves = spec.gate.halves(self)
            gate, up = halves if first else halves[::-1]
            hidden = gated_linear(x, gate.weight, up.weight, gate.bias, up.bias, activation=name)
            return linear(hidden, down.weight, down.bias)
        hidden = gated_packed(project(x, spec.gate.bound(self)), activation=name, gate_first=first)
        return project(hidden, down)

    return fast
