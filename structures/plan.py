"""``plan``: a dry run that decides what would be bound, and the ``Plan`` that holds the result."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from . import kernels
from .binding import Binder, Overridden
from .capture import CapturedForward
from .decision import Bound, Decision, Kept, Refused
from .discover import Candidate, Discovery, Rejected
from .prove import Disproof, errors, judge
from .region import Region, owns_tensors

PRECISIONS = ("auto", "bf16")
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Settings:
    """What a plan was made with; equal settings make equal plans.

    ``forward`` is the path of the module whose forward is captured, ``""`` for the model.
    """

    precision: str = "auto"
    forward: str = ""

    def __str__(self) -> str:
        where = f"{self.forward}.forward" if self.forward else "forward"
        return f"precision={self.precision!r}, forward=model.{where}"


@dataclass
class Plan:
    """All decisions for one model, and what undoes them.

    Attributes:
        decisions: every row of explain, in the order of ``model.named_modules()``.
        settings: what the plan was made with.
        notes: lines about the whole model for explain (grad, capture, loops).
        candidates: the bound regions with structure and spec, by path.
        captured: the captured forward while attached; its ``stats`` count replays and fallbacks.
    """

    settings: Settings
    decisions: tuple[Decision, ...]
    candidates: dict[str, Candidate]
    notes: list[str] = field(default_factory=list)
    binder: Binder | None = None
    captured: CapturedForward | None = None
    _model: weakref.ref[nn.Module] | None = None

    @property
    def attached(self) -> bool:
        """Whether the decisions are in force."""
        return self.binder is not None

    @property
    def model(self) -> nn.Module:
        """The host model.

        Raises:
            RuntimeError: it has been deleted.
        """
        model = self._model() if self._model is not None else None
        if model is None:
            raise RuntimeError("plan: the host model of this plan no longer exists")
        return model

    def bound(self, structure: str = "") -> tuple[Bound, ...]:
        """Rows that FlashRT runs, of one structure where a name is given."""
        rows = (d for d in self.decisions if isinstance(d, Bound))
        return tuple(d for d in rows if structure in ("", d.structure))

    def detach(self) -> None:
        """Give the host back, bit for bit. Does nothing when it is not attached."""
        from .attach import detach

        detach(self)


def plan(model: nn.Module, *, precision: str = "auto") -> Plan:
    """Decide what ``attach`` would bind. Nothing is touched.

    Raises:
        TypeError: ``model`` is no ``nn.Module`` (nor holds one as ``.model``).
        ValueError: unknown precision; a model in training mode, on several devices, on meta, with
            offload hooks, or attached already.
    """
    return make_plan(host_of(model), Settings(precision=_checked_precision(precision)))


def _checked_precision(precision: str) -> str:
    if precision not in PRECISIONS:
        raise ValueError(f"plan: precision must be one of {PRECISIONS}, got {precision!r}")
    return precision


def host_of(model: Any) -> nn.Module:
    """The module behind ``model``: itself, or the ``.model`` of a ``load_model`` handle."""
    if isinstance(model, nn.Module):
        return model
    inner = getattr(model, "model", None)
    if isinstance(inner, nn.Module):
        return inner
    raise TypeError(f"plan: model must be a torch.nn.Module, got {type(model).__name__}")


def check_host(model: nn.Module) -> None:
    """Refuse whole models that cannot be attached, before any work is done.

    Raises:
        ValueError: see ``plan``.
    """
    if model.training:
        raise ValueError("attach: model must be in eval mode; call model.eval() first")
    devices = sorted({str(t.device) for t in (*model.parameters(), *model.buffers())})
    if "meta" in devices:
        raise ValueError("attach: model has tensors on the meta device; load its weights first")
    places = getattr(model, "hf_device_map", None) or {}
    offloaded = sorted({str(p) for p in places.values()} & {"cpu", "disk"})
    if offloaded and len(set(map(str, places.values()))) > 1:
        raise ValueError(f"attach: model is offloaded to {offloaded}; load it on one device")
    if len(devices) > 1:
        raise ValueError(f"attach: model must be on one device, got {', '.join(devices)}")
    for name, module in model.named_modules():
        if getattr(getattr(module, "_hf_hook", None), "offload", False):
            raise ValueError(f"attach: module {name!r} has an offload hook; load it on one device")
        if isinstance(module, Overridden):
            raise ValueError(
                f"attach: module {name or type(module).__name__!r} is attached already; "
                "call detach() on its plan first"
            )


@torch.no_grad()
def make_plan(model: nn.Module, settings: Settings) -> Plan:
    """Discover, prove and decide. Candidates that fail their numbers make way for narrower ones."""
    check_host(model)
    discovery = Discovery()
    root = Region("", model)
    while True:
        found = list(discovery.walk(root))
        candidates = [f for f in found if isinstance(f, Candidate)]
        verdicts = _numbers(candidates, *place(model))
        failed = {p: v for p, v in verdicts.items() if isinstance(v, Disproof)}
        if not failed:
            break
        for candidate in candidates:
            verdict = failed.get(candidate.region.path)
            if verdict is not None:
                key = (candidate.region.path, candidate.structure.name)
                discovery.excluded[key] = verdict.reason
    decisions = _decide(model, found, verdicts)
    return Plan(
        settings=settings,
        decisions=decisions,
        candidates={c.region.path: c for c in candidates},
        _model=weakref.ref(model),
    )


def place(model: nn.Module) -> tuple[torch.dtype, torch.device]:
    """Dtype and device of the first floating-point tensor: those of regions without any."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            return tensor.dtype, tensor.device
    return torch.float32, torch.device("cpu")


def _numbers(
    candidates: list[Candidate], dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """The numbers proof of all candidates with a single device synchronisation."""
    if not candidates:
        return {}
    rows = [
        errors(c.structure, c.spec, c.region.module, c.fast, region_dtype(c.region, dtype), device)
        for c in candidates
    ]
    numbers = torch.stack(rows).tolist()
    return {c.region.path: judge(n) for c, n in zip(candidates, numbers, strict=True)}


def region_dtype(region: Region, default: torch.dtype) -> torch.dtype:
    """The one floating-point dtype of a region's tensors."""
    return next((t.dtype for _, t in region.tensors() if t.is_floating_point()), default)


def _decide(model: nn.Module, found: list[Any], verdicts: dict[str, Any]) -> tuple[Decision, ...]:
    """One row for each candidate and rejection, and for each owner that is left."""
    paths: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(name)
    rows: list[Decision] = []
    default = place(model)[0]
    taken: set[int] = set()

    def row(region: Region, *, whole: bool) -> dict[str, Any]:
        owners = list(region.owners()) if whole else [region]
        covers = [o for o in owners if owns_tensors(o.module) and id(o.module) not in taken]
        taken.update(id(o.module) for o in covers)
        return {
            "path": region.path,
            "covers": tuple(o.path for o in covers),
            "aliases": tuple(p for p in paths[id(region.module)] if p != region.path),
            "kind": type(region.module).__name__,
        }

    for item in found:
        if isinstance(item, Candidate):
            structure = item.structure
            dtype = region_dtype(item.region, default)
            rows.append(
                Bound(
                    **row(item.region, whole=True),
                    reason="meaning and numbers proven",
                    structure=structure.name,
                    precision=NAMES[dtype],
                    kernels=tuple(kernels.label(f) for f in structure.families),
                    error=verdicts[item.region.path],
                )
            )
        elif isinstance(item, Rejected):
            made = Kept if item.keep else Refused
            rows.append(
                made(
                    **row(item.region, whole=False),
                    reason=item.reason,
                    structure=item.structure.name,
                )
            )
        elif owns_tensors(item.module) and id(item.module) not in taken:
            reason = f"no structure has the form of {type(item.module).__name__}"
            rows.append(Kept(**row(item, whole=False), reason=reason))
    return tuple(rows)
