"""Turns what discovery found into the rows of a plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from . import kernels
from .decision import Bound, Cost, Decision, Kept, Refused
from .discover import Candidate, Rejected
from .numbers import Verdict, place, region_dtype
from .prove import Disproof
from .region import Region, owns_tensors
from .weights import copy_of

PRECISION_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def decide(
    model: nn.Module,
    found: Iterable[Candidate | Rejected | Region],
    verdicts: dict[str, Verdict],
    costs: dict[Any, tuple[Cost, Cost]],
) -> tuple[Decision, ...]:
    """One row for each candidate and rejection, and one for each owner that is left."""
    book = _Book(model)
    default = place(model)[0]
    rows: list[Decision] = []
    for item in found:
        if isinstance(item, Candidate):
            error = verdicts[item.region.path]
            assert not isinstance(error, Disproof)
            cost, host_cost = costs[item.fast]
            rows.append(
                Bound(
                    **book.facts(item.region, item.region.owners()),
                    reason="meaning and numbers proven",
                    structure=item.structure.name,
                    precision=stored_precision(item.region, default),
                    kernels=tuple(kernels.label(f) for f in item.structure.families),
                    error=error,
                    cost=cost,
                    host_cost=host_cost,
                )
            )
        elif isinstance(item, Rejected):
            made = Kept if item.keep else Refused
            facts = book.facts(item.region, [item.region])
            rows.append(made(**facts, reason=item.reason, structure=item.structure.name))
        elif owns_tensors(item.module) and not book.has(item.module):
            reason = f"no structure has the form of {type(item.module).__name__}"
            rows.append(Kept(**book.facts(item, [item]), reason=reason))
    return tuple(rows)


def stored_precision(region: Region, default: torch.dtype) -> str:
    """What a region's weights are stored in: their dtype, or the formats that they came in."""
    packed = (copy_of(tensor) for _, tensor in region.tensors())
    formats = dict.fromkeys(found.precision for found in packed if found is not None)
    return ", ".join(formats) or PRECISION_NAMES[region_dtype(region, default)]


class _Book:
    """Paths of a model's modules and parameters, and which modules a row answers for already."""

    def __init__(self, model: nn.Module) -> None:
        self._taken: set[int] = set()
        self._modules: dict[int, list[str]] = {}
        self._parameters: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self._modules.setdefault(id(module), []).append(name)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._parameters.setdefault(id(parameter), []).append(name)

    def has(self, module: nn.Module) -> bool:
        """Whether a row covers ``module``."""
        return id(module) in self._taken

    def facts(self, region: Region, owners: Iterable[Region]) -> dict[str, Any]:
        """The fields that all decisions have; takes the owners that no row has yet."""
        covers = [o for o in owners if owns_tensors(o.module) and not self.has(o.module)]
        self._taken.update(id(o.module) for o in covers)
        return {
            "path": region.path,
            "covers": tuple(o.path for o in covers),
            "aliases": tuple(p for p in self._modules[id(region.module)] if p != region.path),
            "tied": self._tied(region, covers),
            "kind": type(region.module).__name__,
        }

    def _tied(self, region: Region, covers: list[Region]) -> tuple[str, ...]:
        """Paths outside the region to parameters that the covered modules own."""
        inside = tuple(f"{p}." if p else "" for p in self._modules[id(region.module)])
        names = [
            name
            for owner in covers
            for parameter in owner.module._parameters.values()
            if parameter is not None
            for name in self._parameters[id(parameter)]
        ]
        return tuple(dict.fromkeys(n for n in names if not n.startswith(inside)))
