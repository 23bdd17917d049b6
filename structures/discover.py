"""Finds the regions of a host model: the widest proven structure for every module.

Nothing here changes the model, and no user hook runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from . import kernels
from .catalogue import CATALOGUE
from .catalogue.base import PASSIVE, Fast, Found, Guess, Refusal, Structure
from .catalogue.forms import is_function
from .lending import lent
from .prove import Disproof, prove_meaning
from .quiet import tensors_made_on
from .region import Region
from .weights import copy_of

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# What nn.Module itself and the libraries around it keep in an instance.
FRAMEWORK = frozenset(vars(nn.Module())) | {"_is_hf_initialized", "_compiled_call_impl", "config"}


@dataclass(frozen=True)
class Candidate:
    """A region with the structure whose meaning is proven; its numbers are still to be.

    ``kind`` is equal for regions that one proof of meaning serves.
    """

    region: Region
    structure: Structure
    spec: Any
    fast: Fast
    kind: Any


@dataclass(frozen=True)
class Rejected:
    """A region of a structure's form that cannot be bound; ``keep`` when that is no loss."""

    region: Region
    structure: Structure
    reason: str
    keep: bool = False


@dataclass
class Discovery:
    """Survey of one model; caches what holds for a kind of region, so 36 equal layers cost one.

    Attributes:
        excluded: (path, structure name) -> reason, for candidates that failed their numbers.
        unavailable: what was said about kernel families that cannot be loaded.
        packs: whether the weight of the module at a path will be read from a packed copy. Such a
            region is bound where one with the host's own weight had better be kept.
        device: where regions are lent to for their proof; None proves them where they are.
    """

    packs: Callable[[str], bool] = lambda path: False
    device: torch.device | None = None
    excluded: dict[tuple[str, str], str] = field(default_factory=dict)
    unavailable: list[str] = field(default_factory=list)
    _meanings: dict[Any, Disproof | Fast] = field(default_factory=dict)
    _placed: set[Any] = field(default_factory=set)

    def find(self, region: Region, *names: str) -> Found | Refusal | None:
        """See ``catalogue.base.Survey.find``."""
        first: Refusal | None = None
        for structure in CATALOGUE:
            if structure.name in names:
                found = self.settle(region, structure)
                if isinstance(found, Candidate):
                    return Found(structure, found.spec)
                if found is not None and first is None:
                    first = Refusal(found.reason)
        return first

    def walk(self, region: Region, seen: set[int]) -> Iterator[Candidate | Rejected | Region]:
        """Candidates and rejections from ``region`` downwards, then what no structure has.

        A module that hangs at two places is visited at the first. ``seen`` collects identities.
        """
        if id(region.module) in seen:
            return
        seen.add(id(region.module))
        for structure in CATALOGUE:
            found = self.settle(region, structure)
            if isinstance(found, Candidate):
                seen.update(map(id, region.module.modules()))
                reason = None if self._packed(found) else structure.keep(found.spec)
                yield Rejected(region, structure, reason, keep=True) if reason else found
                return
            if found is not None:
                yield found
        yield region
        for child in region.children():
            yield from self.walk(child, seen)

    def _packed(self, found: Candidate) -> bool:
        groups = found.structure.weights(found.spec, found.region.module)
        paths = [".".join(filter(None, (found.region.path, p.path))) for g in groups for p in g]
        return any(map(self.packs, paths))

    def settle(self, region: Region, structure: Structure) -> Candidate | Rejected | None:
        """Propose, check and prove the meaning of one structure for one region."""
        with tensors_made_on(torch.device("cpu")):
            proposal = structure.propose(region, self)
        if proposal is None:
            return None
        if isinstance(proposal, Refusal):
            return Rejected(region, structure, proposal.reason)
        failed = self.excluded.get((region.path, structure.name))
        if failed is not None:
            return Rejected(region, structure, failed)
        guess = isinstance(proposal, Guess)
        for rule in RULES:
            reason = rule(region, structure)
            if reason is not None:
                rejected = Rejected(region, structure, reason, keep=rule is fp32_on_cuda)
                return None if guess else rejected
        first: str | None = None
        for spec in proposal if isinstance(proposal, tuple) else (proposal,):
            kind, proven = self._meaning(region, structure, spec)
            if not isinstance(proven, Disproof):
                return Candidate(region, structure, spec, proven, kind)
            first = first or proven.reason
        return None if guess else Rejected(region, structure, first or "no proposal")

    def confirm(self, candidates: Iterable[Candidate]) -> bool:
        """Prove each kind once more at its last place: a layer may compute by its own index.

        ``False`` when that failed somewhere; such a kind is from then on proven place by place.
        """
        last: dict[Any, Candidate] = {}
        first: dict[Any, Candidate] = {}
        for candidate in candidates:
            first.setdefault(candidate.kind, candidate)
            last[candidate.kind] = candidate
        good = True
        for kind, candidate in last.items():
            modules = first[kind].region.module, candidate.region.module
            if _places(modules[0]) == _places(modules[1]):
                continue
            structure, spec = candidate.structure, candidate.spec
            with lent(modules[1], self.device):
                disproof = prove_meaning(structure, spec, modules[1], candidate.fast)
            if disproof is not None:
                self._placed.add(kind)
                good = False
        return good

    def _meaning(
        self, region: Region, structure: Structure, spec: Any
    ) -> tuple[Any, Disproof | Fast]:
        """The kind of a region, and its bound forward if the proof holds."""
        kind = (structure.name, spec, fingerprint(region.module))
        key = (kind, _places(region.module)) if kind in self._placed else kind
        if key not in self._meanings:
            try:
                fast = structure.bind(spec)
                with lent(region.module, self.device):
                    disproof = prove_meaning(structure, spec, region.module, fast)
            except kernels.KernelUnavailable as error:
                self.unavailable.append(str(error))
                self._meanings[key] = Disproof(str(error))
            else:
                self._meanings[key] = fast if disproof is None else disproof
        return key, self._meanings[key]


def fingerprint(module: nn.Module) -> tuple[Any, ...]:
    """What makes two modules the same kind: classes, forwards, scalars and parameter shapes."""
    parts: list[Any] = []
    for name, inner in module.named_modules():
        scalars = tuple((k, v) for k, v in own_attributes(inner) if _is_plain(v) and k not in PLACE)
        shapes = tuple((k, None if p is None else p.shape) for k, p in inner._parameters.items())
        parts.append((name, type(inner), type(inner).forward, scalars, shapes))
    return tuple(parts)


def _places(module: nn.Module) -> tuple[Any, ...]:
    """Values of the attributes that say where in its model a module is."""
    return tuple(
        value
        for inner in module.modules()
        for name, value in own_attributes(inner)
        if name in PLACE
    )


PLACE = frozenset({"layer_idx"})


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float, str, bool, torch.dtype, type(None)))


def own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Attributes that the host's class added to an instance."""
    for name, value in vars(module).items():
        if name not in FRAMEWORK:
            yield name, value


def unread_scalar(region: Region, structure: Structure) -> str | None:
    """A scalar that no structure reads would be ignored, so it refuses the region.

    An int that equals a dimension of the region's parameters is a size and not a scalar. Dropout
    does nothing in eval mode; functions are activations, which the structures read.
    """
    known = structure.reads | structure.passive | PASSIVE
    sizes = {s for _, t in region.tensors() for s in t.shape}
    for name, module in region.module.named_modules():
        if name and is_function(module):
            continue
        for attribute, value in own_attributes(module):
            if attribute in known or value is None or "dropout" in attribute:
                continue
            if callable(value) or (type(value) is int and value in sizes):
                continue
            where = f"{name}.{attribute}" if name else attribute
            return f"attribute {where} = {str(value)[:60]} is not one that {structure.name} reads"
    return None


def training(region: Region, structure: Structure) -> str | None:
    """Training needs gradients, dropout and the host's own code."""
    for name, module in region.module.named_modules():
        if module.training:
            return f"module {name or region.path!r} is in training mode; call model.eval()"
    return None


def foreign_forward(region: Region, structure: Structure) -> str | None:
    """A forward set on an instance, or a hook inside the region, would no longer run."""
    for name, module in region.module.named_modules():
        if "forward" in vars(module):
            where = name or region.path
            return f"module {where!r} carries its own instance forward (a hook, or kernelize)"
        if name and (module._forward_hooks or module._forward_pre_hooks):
            return f"module {name!r} inside carries a forward hook, which would no longer fire"
    return None


def storage(region: Region, structure: Structure) -> str | None:
    """Floating-point tensors, plain or packed, of one dtype on one CPU or CUDA device."""
    seen: dict[tuple[torch.dtype, torch.device], str] = {}
    for name, tensor in region.tensors():
        if type(tensor) not in (torch.Tensor, nn.Parameter) and copy_of(tensor) is None:
            return f"{name} is a {type(tensor).__name__}, not a plain tensor"
        if tensor.device.type not in ("cpu", "cuda"):
            return f"{name} is on device {tensor.device.type}; cpu or cuda is wanted"
        if tensor.dtype in FLOATS:
            seen.setdefault((tensor.dtype, tensor.device), name)
        elif isinstance(tensor, nn.Parameter):
            return f"{name} has dtype {tensor.dtype}; one of bf16, fp16, fp32 is wanted"
    if len(seen) > 1:
        (a, first), (b, second) = list(seen.items())[:2]
        return f"{first} is {a[0]} on {a[1]}, but {second} is {b[0]} on {b[1]}"
    return None


def fp32_on_cuda(region: Region, structure: Structure) -> str | None:
    """fp32 matrix products on CUDA are the host's: torch's own are as fast as memory allows."""
    if structure.multiplies:
        for _, tensor in region.tensors():
            if tensor.device.type == "cuda" and tensor.dtype == torch.float32:
                return "fp32 weights on CUDA; cast with model.to(torch.bfloat16) to bind"
    return None


RULES: tuple[Callable[[Region, Structure], str | None], ...] = (
    training,
    foreign_forward,
    storage,
    fp32_on_cuda,
    unread_scalar,
)
