"""Statistics of a model on its calibration data, as they are cached."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from math import isfinite
from typing import Any

import torch

from . import cache
from .data import SAMPLED_ROWS, SAMPLED_TOKENS
from .formats import PRECISIONS, QUANTISED
from .prices import Prices
from .promote import Promotion
from .units import Unit


@dataclass
class Statistics:
    """What a run over calibration data found; all of it is plain JSON.

    Attributes:
        scales: static FP8 scale of each unit's input.
        importance: mean squares of the columns of each NVFP4 unit's input, see ``encoded``.
        prices: loss of cosine by unit and precision.
        price_note: how prices were measured.
        sampled: ids of sampled text.
        promoted: by floor, the fields of every ``Promotion`` that it asked for, in order. A later
            run starts from there, and measures all the same.
    """

    scales: dict[str, float] = field(default_factory=dict)
    importance: dict[str, str] = field(default_factory=dict)
    prices: Prices = field(default_factory=dict)
    price_note: str = ""
    sampled: list[list[int]] | None = None
    promoted: dict[str, list[list[Any]]] = field(default_factory=dict)

    def promotions(self, floor: float) -> list[Promotion]:
        """What ``floor`` asked for before; empty where that is not known."""
        return [Promotion(*step) for step in self.promoted.get(str(floor), [])]

    def keep(self, floor: float, steps: Sequence[Promotion]) -> None:
        """Remember what ``floor`` asked for."""
        self.promoted[str(floor)] = [[*astuple(step)] for step in steps]

    def columns(self, device: torch.device) -> dict[str, torch.Tensor]:
        """``importance`` as fp32 ``[K]`` on ``device``."""
        return {name: decoded(text).to(device) for name, text in self.importance.items()}


def encoded(values: torch.Tensor) -> str:
    """Values rounded to BF16, their bytes in base 64: whole models fit into some megabytes."""
    bits = values.to("cpu", torch.bfloat16).contiguous().view(torch.uint8)
    return base64.b64encode(bits.numpy().tobytes()).decode("ascii")


def decoded(text: str) -> torch.Tensor:
    """fp32 values of what ``encoded`` made.

    Raises:
        ValueError: it did not make ``text``.
    """
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"statistics: {error}") from None
    if not raw or len(raw) % 2:
        raise ValueError(f"statistics: two bytes a value are wanted, got {len(raw)} bytes")
    return torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).float()


def read_statistics(key: str, units: Sequence[Unit]) -> Statistics | None:
    """Statistics of the cache, if they are whole and of these units."""
    found = cache.read(key)
    if found is None:
        return None
    values: dict[str, Any] = {name: found.get(name) for name in vars(Statistics())}
    made = Statistics(**values)
    return made if _whole(made, units) else None


def _whole(found: Any, units: Sequence[Unit]) -> bool:
    names = {unit.name for unit in units}
    return (
        _are_numbers(found.scales, names)
        and isinstance(found.prices, dict)
        and set(found.prices) <= names
        and all(_are_numbers(costs, {*QUANTISED}) for costs in found.prices.values())
        and _are_columns(found.importance, units)
        and isinstance(found.price_note, str)
        and (found.sampled is None or _are_ids(found.sampled))
        and _are_promotions(found.promoted, names)
    )


def _are_promotions(found: Any, names: set[str]) -> bool:
    return isinstance(found, dict) and all(
        isinstance(steps, list)
        and all(
            isinstance(step, list)
            and [type(part) for part in step] == [str, str, str, float, int]
            and step[0] in names
            and {step[1], step[2]} <= {*PRECISIONS}
            for step in steps
        )
        for steps in found.values()
    )


def _are_numbers(found: Any, names: set[str]) -> bool:
    return (
        isinstance(found, dict)
        and set(found) <= names
        and all(isinstance(value, float) and isfinite(value) for value in found.values())
    )


def _are_columns(found: Any, units: Sequence[Unit]) -> bool:
    sizes = {unit.name: unit.leaves[0].shape[1] for unit in units}
    if not isinstance(found, dict) or not set(found) <= set(sizes):
        return False
    for name, text in found.items():
        try:
            values = decoded(text)
        except (TypeError, ValueError):
            return False
        fits = len(values) == sizes[name] and bool((values >= 0).all())
        if not fits or not bool(values.isfinite().all()):
            return False
    return True


def _are_ids(rows: Any) -> bool:
    return (
        isinstance(rows, list)
        and len(rows) == SAMPLED_ROWS
        and all(isinstance(r, list) and len(r) == SAMPLED_TOKENS for r in rows)
        and all(isinstance(i, int) for r in rows for i in r)
    )
