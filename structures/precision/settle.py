"""From asked-for precisions to those in force: statistics, packing, measuring, promoting.

``prepare`` runs the host's own code at full precision, before anything is bound; ``finish`` packs
and measures the bound model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import nn

from . import cache
from .data import (
    FIDELITY_POSITIONS,
    SAMPLED_ROWS,
    SAMPLED_TOKENS,
    SEED,
    Call,
    NoText,
    digest,
    enough,
    halves,
    read_calls,
    sample_text,
    total,
)
from .fidelity import compare, reference_rows
from .formats import QUANTISED
from .observe import observe
from .packing import Packing
from .prices import Prices, measure_prices
from .promote import promote
from .quantising import Quantising, quantile

SAMPLED = "text that the model sampled"
GIVEN = "the caller's data, apart from what calibrated"


@dataclass
class Statistics:
    """What a run over calibration data found; all of it is plain numbers, for the cache.

    Attributes:
        scales: static FP8 scale of each unit's input.
        prices: loss of cosine by unit and precision.
        price_note: how prices were measured.
        sampled: ids of sampled text.
    """

    scales: dict[str, float] = field(default_factory=dict)
    prices: Prices = field(default_factory=dict)
    price_note: str = ""
    sampled: list[list[int]] | None = None


@dataclass
class Prepared:
    """What ``finish`` needs of the full-precision model.

    Attributes:
        calls, reference: held-out text and the outputs on it.
        text: in words.
        unmeasured: why there is no text, if so.
    """

    statistics: Statistics
    calls: Sequence[Call] = ()
    reference: Sequence[torch.Tensor] = ()
    text: str = ""
    unmeasured: str = ""


def prepare(model: nn.Module, packing: Packing, settings: Quantising) -> Prepared:
    """Read the data, take statistics, and keep the full-precision outputs on held-out text.

    Raises:
        TypeError, ValueError: calibration data that are none, see ``attach``.
    """
    given = settings.calibration.value is not None
    if not given and settings.min_cosine is None:
        return Prepared(Statistics())
    calls = read_calls(settings.calibration.value, model) if given else []
    key = _key(model, packing, settings, calls)
    statistics = _cached(key, packing)
    packing.notes.append(
        "statistics: measured now" if statistics is None else "statistics: from the cache"
    )
    known = statistics or Statistics()
    calibrating, held_out, text, unmeasured = _split(model, packing.device, settings, calls, known)
    if statistics is None:
        _measure(model, packing, settings, known, calibrating)
        complaint = cache.write(key, vars(known))
        packing.notes += [complaint] if complaint else []
    if given:
        packing.scales = known.scales
    if settings.min_cosine is None:
        return Prepared(known)
    return Prepared(
        known, held_out, reference_rows(model, held_out, packing.device), text, unmeasured
    )


def _key(model: nn.Module, packing: Packing, settings: Quantising, calls: Sequence[Call]) -> str:
    device = packing.device
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return cache.key_of(
        weights=cache.weights_digest(model),
        units=[
            [u.name, u.precision, [list(leaf.shape) for leaf in u.leaves]] for u in packing.units
        ],
        data=digest(calls) if calls else f"sampled {SEED} {SAMPLED_ROWS} {SAMPLED_TOKENS}",
        observer=settings.observer,
        priced=settings.min_cosine is not None,
        torch=torch.__version__,
        device=kind,
    )


def _cached(key: str, packing: Packing) -> Statistics | None:
    """Statistics of the cache, if they are whole."""
    found = cache.read(key)
    if found is None:
        return None
    scales, prices = found.get("scales"), found.get("prices")
    note, sampled = found.get("price_note"), found.get("sampled")
    names = {unit.name for unit in packing.units}
    whole = (
        _are_numbers(scales, names)
        and isinstance(prices, dict)
        and set(prices) <= names
        and all(_are_numbers(costs, {*QUANTISED}) for costs in prices.values())
        and isinstance(note, str)
        and (sampled is None or _are_ids(sampled))
    )
    return Statistics(scales, prices, str(note), sampled) if whole else None  # type: ignore[arg-type]


def _are_numbers(found: Any, names: set[str]) -> bool:
    return (
        isinstance(found, dict)
        and set(found) <= names
        and all(isinstance(value, float) and isfinite(value) for value in found.values())
    )


def _are_ids(rows: Any) -> bool:
    return (
        isinstance(rows, list)
        and len(rows) == SAMPLED_ROWS
        and all(isinstance(r, list) and len(r) == SAMPLED_TOKENS for r in rows)
        and all(isinstance(i, int) for r in rows for i in r)
    )


def _split(
    model: nn.Module,
    device: torch.device,
    settings: Quantising,
    calls: list[Call],
    known: Statistics,
) -> tuple[list[Call], list[Call], str, str]:
    """Calls to calibrate on, calls to compare on, the latter in words, and why there are none."""
    if settings.min_cosine is None:
        return calls, [], "", ""
    calibrating, held_out = halves(calls) if calls else ([], [])
    text, unmeasured = GIVEN, ""
    if total(held_out) < FIDELITY_POSITIONS:
        try:
            sampled = _sampled(model, device, known)
        except NoText as reason:
            unmeasured = str(reason) if not held_out else ""
        else:
            text = f"{text} and {SAMPLED}" if held_out else SAMPLED
            if not calibrating:
                calibrating, held_out = halves(sampled)
            else:
                held_out += sampled
    return calibrating, enough(held_out), text, unmeasured


def _sampled(model: nn.Module, device: torch.device, known: Statistics) -> list[Call]:
    """Text of the model's own, each row a call; from the cache where it is there."""
    if known.sampled is None:
        known.sampled = sample_text(model, device).tolist()
    ids = torch.tensor(known.sampled)
    return [Call(kwargs={"input_ids": row}) for row in ids.split(1)]


def _measure(
    model: nn.Module,
    packing: Packing,
    settings: Quantising,
    known: Statistics,
    calls: Sequence[Call],
) -> None:
    units = [unit for unit in packing.units if unit.quantised]
    if settings.calibration.value is not None:
        observers = observe(
            *(model, units, calls), quantile=quantile(settings.observer), device=packing.device
        )
        scales = {name: observer.scale for name, observer in observers.items()}
        known.scales = {name: scale for name, scale in scales.items() if scale is not None}
    if settings.min_cosine is not None and calls:
        known.prices, known.price_note = measure_prices(
            *(model, units, calls, packing.importance, packing.device)
        )


def finish(model: nn.Module, packing: Packing, settings: Quantising, prepared: Prepared) -> None:
    """Pack every unit, then measure and promote until the floor holds."""
    packing.pack_all()
    packing.prices = prepared.statistics.prices
    floor = settings.min_cosine
    if floor is None:
        packing.notes.append("fidelity: not measured (min_cosine=None)")
        return
    if prepared.statistics.price_note:
        packing.notes.append(prepared.statistics.price_note)
    if not prepared.calls:
        packing.notes.append(
            f"fidelity: not measured, because there is no calibration data and "
            f"{prepared.unmeasured}; nothing says that the floor of {floor} holds"
        )
        return
    packing.fidelity, steps = promote(
        packing.quantised,
        packing.prices,
        floor,
        packing.pack,
        lambda: compare(
            *(model, prepared.calls, prepared.reference), text=prepared.text, device=packing.device
        ),
    )
    packing.promotions = steps
    packing.notes.append(f"fidelity to the model's own full precision: {packing.fidelity}")
    held = "holds" if packing.fidelity.cosine >= floor else "cannot be held"
    packing.notes.append(f"floor: cosine {floor} {held}, with {len(steps)} promotions")
    if not packing.fidelity.enough:
        packing.notes.append(
            f"floor: {packing.fidelity.decode.positions} positions are fewer than the "
            f"{FIDELITY_POSITIONS} that say something of the worst; give more calibration data"
        )
