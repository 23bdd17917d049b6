"""The units of precision: linear weights that one kernel reads together and that share a format."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..catalogue.base import Part
from ..catalogue.spec import NotThisForm
from ..discover import Candidate
from ..weights import copy_of, stored_as
from .embedding import embedding_factor
from .formats import packed_size, unpack


@dataclass(frozen=True, eq=False)
class Leaf:
    """One weight: the module that owns it, where it is read, and how.

    Attributes:
        path: of the module, from the model.
        transposed: the host stores ``[K, N]``.
        cuts: rows at which some kernel reads only a part of it.
    """

    path: str
    module: nn.Module
    transposed: bool
    cuts: frozenset[int] = frozenset()

    @property
    def parameter(self) -> torch.Tensor:
        """The host's weight as it is now."""
        found = self.module._parameters["weight"]
        assert found is not None
        return found

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        first, second = self.parameter.shape
        return (second, first) if self.transposed else (first, second)

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        """What the packed copy stands for, in the host's layout, rounded to ``dtype``.

        Raises:
            ValueError: there is none.
        """
        packed = copy_of(self.parameter)
        if packed is None:
            raise ValueError(f"unpacked: {self.path} must have a packed copy, got none")
        values = torch.cat([unpack(run, dtype) for run in packed.runs])
        return values.t() if self.transposed else values


@dataclass(eq=False)
class Unit:
    """Weights with one input and one precision.

    Attributes:
        regions: paths of the bound regions that read them.
        leaves: the weights.
        embeddings: path and factor of every embedding that reads the same weight.
        vocabulary: the weights are a projection to the vocabulary, or the embedding tied to it.
        precision: what they are stored as; ``"auto"`` where the host's own tensors are read.
        reason: why not what was asked for, if so.
    """

    regions: tuple[str, ...]
    leaves: tuple[Leaf, ...]
    vocabulary: bool = False
    precision: str = "auto"
    reason: str = ""
    embeddings: tuple[tuple[str, float], ...] = ()

    @property
    def name(self) -> str:
        """``model.layers.0.self_attn.{q_proj,k_proj,v_proj}``."""
        paths = [leaf.path for leaf in self.leaves]
        heads = {path.rpartition(".")[0] for path in paths}
        if len(paths) == 1 or len(heads) > 1:
            return ",".join(paths)
        tails = ",".join(path.rpartition(".")[2] for path in paths)
        head = heads.pop()
        return f"{head}.{{{tails}}}" if head else f"{{{tails}}}"

    @property
    def short(self) -> str:
        """``q_proj+k_proj+v_proj``."""
        return "+".join(leaf.path.rpartition(".")[2] for leaf in self.leaves)

    @property
    def quantised(self) -> bool:
        """Whether a packed copy is read."""
        return self.precision not in ("auto", "bf16")

    @property
    def elements(self) -> int:
        """Weights in all leaves; tied ones count once."""
        return sum({id(x.parameter): x.parameter.numel() for x in self.leaves}.values())

    def size(self, precision: str) -> int:
        """Bytes in ``precision``, scales included; ``"bf16"`` and ``"auto"`` are the host's own."""
        leaves = {id(leaf.parameter): leaf for leaf in self.leaves}.values()
        return sum(
            packed_size(precision, *leaf.shape, leaf.parameter.element_size()) for leaf in leaves
        )

    @property
    def packed_bytes(self) -> int:
        """Bytes that are read now."""
        return self.size(self.precision)


def find_units(model: nn.Module, candidates: Iterable[Candidate]) -> list[Unit]:
    """The units of all bound regions. Groups that share a parameter become one unit.

    A unit whose weights somebody else reads too, other than as an embedding, has that as its
    ``reason`` and keeps the host's tensors.
    """
    units: list[Unit] = []
    for candidate in candidates:
        region = candidate.region
        for group in candidate.structure.weights(candidate.spec, region.module):
            leaves = _leaves(region.path, region.module, group)
            shared = [unit for unit in units if _share(unit.leaves, leaves)]
            merged = Unit((region.path,), leaves)
            for unit in shared:
                units.remove(unit)
                merged = Unit((*unit.regions, region.path), _united(unit.leaves, merged.leaves))
            units.append(merged)
    readers = _readers(model)
    output = _vocabulary_projection(model)
    for unit in units:
        unit.vocabulary = any(leaf.module is output for leaf in unit.leaves)
        _look_at_readers(model, unit, readers)
        stored = dict.fromkeys(name for leaf in unit.leaves if (name := stored_as(leaf.parameter)))
        if stored:
            unit.reason = f"its checkpoint stores it as {', '.join(stored)}, which is kept"
    return units


def _leaves(path: str, region: nn.Module, group: tuple[Part, ...]) -> tuple[Leaf, ...]:
    found: dict[str, Leaf] = {}
    for part in group:
        where = ".".join(filter(None, (path, part.path)))
        cuts = frozenset(part.cuts)
        if where in found:
            cuts |= found[where].cuts
        found[where] = Leaf(where, region.get_submodule(part.path), part.transposed, cuts)
    return tuple(found.values())


def _share(ones: Iterable[Leaf], others: Iterable[Leaf]) -> bool:
    ids = {id(leaf.parameter) for leaf in ones}
    return any(id(leaf.parameter) in ids for leaf in others)


def _united(ones: tuple[Leaf, ...], others: tuple[Leaf, ...]) -> tuple[Leaf, ...]:
    """All leaves, those at one path once."""
    found = {leaf.path: leaf for leaf in ones}
    for leaf in others:
        before = found.get(leaf.path)
        found[leaf.path] = replace(leaf, cuts=leaf.cuts | before.cuts) if before else leaf
    return tuple(found.values())


def _readers(model: nn.Module) -> dict[int, list[tuple[str, nn.Module]]]:
    """Who owns each parameter, by its identity."""
    found: dict[int, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((path, module))
    return found


def _look_at_readers(
    model: nn.Module, unit: Unit, readers: dict[int, list[tuple[str, nn.Module]]]
) -> None:
    known = {id(leaf.module) for leaf in unit.leaves}
    for leaf in unit.leaves:
        for path, module in readers[id(leaf.parameter)]:
            if id(module) in known:
                continue
            try:
                unit.embeddings = (*unit.embeddings, (path, embedding_factor(model, path)))
                unit.vocabulary = True
            except NotThisForm as reason:
                unit.reason = f"{path} reads {leaf.path}.weight too, and {reason}"
    if len({leaf.shape[1] for leaf in unit.leaves}) > 1:
        unit.reason = "its weights have inputs of different sizes"


def _vocabulary_projection(model: nn.Module) -> nn.Module | None:
    """The projection to the vocabulary, of a transformers model."""
    find: Any = getattr(model, "get_output_embeddings", None)
    if not callable(find):
        return None
    try:
        found = find()
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Module) else None
