"""From asked-for precisions to those in force: statistics, packing, measuring, promoting.

``prepare`` runs the host's own code at full precision, before anything is bound; ``finish`` packs
and measures the bound model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from .observe import observe
from .packing import Packing
from .prices import measure_prices
from .promote import promote
from .quantising import Quantising, quantile
from .statistics import Statistics, encoded, read_statistics

SAMPLED = "text that the model sampled"
GIVEN = "the caller's data, apart from what calibrated"


@dataclass
class Prepared:
    """What ``finish`` needs of the full-precision model.

    Attributes:
        calls, reference: held-out text and the outputs on it.
        text: in words.
        unmeasured: why there is no text, if so.
        key: of the statistics in the cache.
    """

    statistics: Statistics
    calls: Sequence[Call] = ()
    reference: Sequence[torch.Tensor] = ()
    text: str = ""
    unmeasured: str = ""
    key: str = ""


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
    statistics = read_statistics(key, packing.units)
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
    packing.importance = known.columns(packing.device)
    if settings.min_cosine is None:
        return Prepared(known)
    reference = reference_rows(model, held_out, packing.device)
    return Prepared(known, held_out, reference, text, unmeasured, key)


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
    ids = torch.tensor(known.sampled, device="cpu")
    return [Call(kwargs={"input_ids": row}) for row in ids.split(1)]


def _measure(
    model: nn.Module,
    packing: Packing,
    settings: Quantising,
    known: Statistics,
    calls: Sequence[Call],
) -> None:
    units = [unit for unit in packing.units if unit.quantised]
    four_bits = any(unit.precision == "nvfp4" for unit in units)
    if calls and (settings.calibration.value is not None or four_bits):
        observers = observe(
            *(model, units, calls), quantile=quantile(settings.observer), device=packing.device
        )
        scales = {name: observer.scale for name, observer in observers.items()}
        known.scales = {name: scale for name, scale in scales.items() if scale is not None}
        for unit in units:
            squares = observers[unit.name].mean_squares
            if unit.precision == "nvfp4" and squares is not None:
                known.importance[unit.name] = encoded(squares)
    packing.importance = known.columns(packing.device)
    if settings.min_cosine is not None and calls:
        known.prices, known.price_note = measure_prices(
            *(model, units, calls, packing.importance, packing.device)
        )


def finish(model: nn.Module, packing: Packing, settings: Quantising, prepared: Prepared) -> None:
    """Pack every unit, then measure and promote until the floor holds."""
    floor, statistics = settings.min_cosine, prepared.statistics
    before = [] if floor is None else statistics.promotions(floor)
    by_name = {unit.name: unit for unit in packing.units}
    for step in before:
        by_name[step.unit].precision = step.after
    packing.pack_all()
    packing.prices = statistics.prices
    if floor is None:
        packing.notes.append("fidelity: not measured (min_cosine=None)")
        return
    if statistics.price_note:
        packing.notes.append(statistics.price_note)
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
    if steps:
        statistics.keep(floor, [*before, *steps])
        complaint = cache.write(prepared.key, vars(statistics))
        packing.notes += [complaint] if complaint else []
    packing.promotions = steps = [*before, *steps]
    packing.notes.append(f"fidelity to the model's own full precision: {packing.fidelity}")
    held = "holds" if packing.fidelity.cosine >= floor else "cannot be held"
    packing.notes.append(f"floor: cosine {floor} {held}, with {len(steps)} promotions")
    if not packing.fidelity.enough:
        packing.notes.append(
            f"floor: {packing.fidelity.decode.positions} positions are fewer than the "
            f"{FIDELITY_POSITIONS} that say something of the worst; give more calibration data"
        )
