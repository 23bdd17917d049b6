"""``plan``: a dry run that decides what would be bound, and the ``Plan`` that holds the result."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import kv_format
from .binding import Binder
from .capture import CapturedForward
from .decision import Bound, Decision
from .discover import Candidate, Discovery
from .kv_format import KVCache
from .lending import indexed
from .numbers import costs, numbers, place
from .precision.choice import Chosen, Precision, describes, wanted
from .precision.choice import checked as checked_precision
from .precision.formats import QUANTISED
from .precision.host_weights import KeepHost
from .precision.packing import Packing, make_packing
from .precision.quantising import MIN_COSINE, Quantising, read_quantising
from .prove import Disproof
from .quiet import proof_state
from .refusals import check_host, check_kv_cache, check_weights
from .region import Region
from .rows import decide

if TYPE_CHECKING:
    from .loops.generate import GenerateDoor


@dataclass(frozen=True)
class Settings:
    """What a plan was made with; equal settings make equal plans.

    ``forward`` is the path of the module whose forward is captured, ``""`` for the model.
    ``quantising`` is None where the precision makes no packed copies, ``kv_cache`` where caches
    have the model's dtype.
    """

    precision: Chosen = "auto"
    forward: str = ""
    quantising: Quantising | None = None
    kv_cache: KVCache = None

    def unasked(self) -> Settings:
        """Those of a caller who names the same forward and nothing else."""
        return Settings(forward=self.forward)

    def __str__(self) -> str:
        where = f"{self.forward}.forward" if self.forward else "forward"
        rest = f", {self.quantising}" if self.quantising is not None else ""
        rest += f", kv_cache={self.kv_cache}" if self.kv_cache is not None else ""
        return f"precision={describes(self.precision)}, forward=model.{where}{rest}"


@dataclass(repr=False)
class Plan:
    """All decisions for one model, and what undoes them.

    Attributes:
        decided: every row as proven, in the order of ``model.named_modules()``.
        settings: what the plan was made with.
        notes: lines about the whole model for explain (grad, capture, loops).
        candidates: the bound regions with structure and spec, by path.
        unavailable: what was said about kernel families that cannot be loaded.
        captured: the captured forward while attached; its ``stats`` count replays and fallbacks.
        generation: what ``generate`` does while attached; None for a model without it.
        packing: precisions and packed copies; None where nothing is quantised.
    """

    settings: Settings
    decided: tuple[Decision, ...]
    candidates: dict[str, Candidate]
    unavailable: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    binder: Binder | None = None
    captured: CapturedForward | None = None
    generation: GenerateDoor | None = None
    packing: Packing | None = None
    _model: weakref.ref[nn.Module] | None = None

    def __repr__(self) -> str:
        counts = Counter(type(row).__name__.lower() for row in self.decisions)
        rows = ", ".join(f"{n} {kind}" for kind, n in counts.items())
        return f"Plan({'attached' if self.attached else 'not attached'}: {rows})"

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Every row of explain, with the precision that is read now."""
        return self.decided if self.packing is None else self.packing.rows(self.decided)

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


def plan(
    model: Any,
    forward: Callable[..., Any] | None = None,
    *,
    precision: Precision = "auto",
    calibration: Any = None,
    observer: str = "max",
    min_cosine: float | None = MIN_COSINE,
    keep_host: KeepHost = "cpu",
    kv_cache: KVCache = None,
    device: torch.device | str | None = None,
) -> Plan:
    """Decide what ``attach`` would bind, and what it would quantise. Nothing is touched.

    Arguments are those of ``attach``. Fidelity is measured by ``attach`` alone, which may promote
    weights to a higher precision than is said here.

    Raises:
        TypeError: ``model`` is no ``nn.Module`` (nor holds one as ``.model``), or ``forward`` is
            not a method of it.
        ValueError: an argument outside its range, a pattern that matches no weight, or a precision
            that the weights do not have; ``kv_cache`` for a model that the decode loop cannot run;
            a model in training mode, on several devices, on meta, with offload hooks, or attached
            already.
    """
    host = host_of(model)
    settings = read_settings(
        *(model, host, forward),
        precision=precision,
        calibration=calibration,
        observer=observer,
        min_cosine=min_cosine,
        keep_host=keep_host,
        kv_cache=kv_cache,
    )
    return make_plan(host, settings, None if device is None else indexed(device))


def read_settings(
    model: Any,
    host: nn.Module,
    forward: Callable[..., Any] | None,
    *,
    precision: Precision,
    kv_cache: KVCache,
    **quantising: Any,
) -> Settings:
    """Check all arguments of ``attach`` and ``plan``; see there for what is raised."""
    path = _path_of(host, forward_target(model, host, forward))
    chosen = checked_precision(precision)
    stored = kv_format.checked("attach", kv_cache)
    return Settings(chosen, path, read_quantising(chosen, **quantising), stored)


def forward_target(model: Any, host: nn.Module, forward: Callable[..., Any] | None) -> nn.Module:
    """The module whose forward was named."""
    if forward is None or forward == getattr(model, "forward", None):
        return host
    target = getattr(forward, "__self__", None)
    if isinstance(target, nn.Module) and getattr(forward, "__name__", "") == "forward":
        return target
    raise TypeError(
        "attach: forward must be the forward method of the model or of a module inside, got "
        f"{getattr(forward, '__qualname__', type(forward).__name__)}"
    )


def _path_of(host: nn.Module, target: nn.Module) -> str:
    for name, module in host.named_modules():
        if module is target:
            return str(name)
    raise TypeError(
        f"attach: forward belongs to a {type(target).__name__} that is not part of the model"
    )


def host_of(model: Any) -> nn.Module:
    """The module behind ``model``: itself, or the ``.model`` of a ``load_model`` handle."""
    if isinstance(model, nn.Module):
        return model
    inner = getattr(model, "model", None)
    if isinstance(inner, nn.Module):
        return inner
    raise TypeError(f"plan: model must be a torch.nn.Module, got {type(model).__name__}")


def make_plan(model: nn.Module, settings: Settings, device: torch.device | None = None) -> Plan:
    """Discover, prove and decide. Candidates that fail their numbers make way for narrower ones.

    Args:
        device: where the model is to run; None means where it is.
    """
    check_host(model)
    check_weights(model, settings.precision)
    dtype, home = place(model)
    device = home if device is None else device
    chosen = settings.precision
    discovery = Discovery(
        packs=lambda path: wanted(chosen, path) in QUANTISED,
        device=None if device == home else device,
    )
    with proof_state(device):
        decided, candidates = _proven(model, discovery, dtype, device)
        packing = None
        if settings.quantising is not None:
            packing = make_packing(model, candidates, chosen, settings.quantising, device)
    made = Plan(
        settings=settings,
        decided=decided,
        candidates={c.region.path: c for c in candidates},
        unavailable=tuple(dict.fromkeys(discovery.unavailable)),
        packing=packing,
        _model=weakref.ref(model),
    )
    check_kv_cache(model, made)
    return made


def _proven(
    model: nn.Module, discovery: Discovery, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[Decision, ...], list[Candidate]]:
    """Walk until every candidate holds; each round excludes what failed."""
    while True:
        found = list(discovery.walk(Region("", model), set()))
        candidates = [f for f in found if isinstance(f, Candidate)]
        if not discovery.confirm(candidates):
            continue
        verdicts = numbers(candidates, dtype, device)
        failed = {p: v.reason for p, v in verdicts.items() if isinstance(v, Disproof)}
        if not failed:
            return decide(model, found, verdicts, costs(candidates, dtype, device)), candidates
        for candidate in candidates:
            path = candidate.region.path
            if path in failed:
                discovery.excluded[path, candidate.structure.name] = failed[path]
