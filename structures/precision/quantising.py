"""The settings of a plan that quantises."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .choice import Chosen, quantises
from .host_weights import KeepHost
from .host_weights import checked as checked_keep_host

MIN_COSINE = 0.999


class Same:
    """Holds an object that two settings share or do not: tensors and iterables have no equality."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True)
class Quantising:
    """How packed copies are made and what fidelity they must keep; see ``attach``."""

    calibration: Same
    observer: str = "max"
    min_cosine: float | None = MIN_COSINE
    keep_host: KeepHost = "cpu"

    def __str__(self) -> str:
        data = self.calibration.value
        given = "None" if data is None else f"<{type(data).__name__}>"
        return (
            f"calibration={given}, observer={self.observer!r}, min_cosine={self.min_cosine}, "
            f"keep_host={self.keep_host!r}"
        )


def read_quantising(
    chosen: Chosen, *, calibration: Any, observer: str, min_cosine: float | None, keep_host: Any
) -> Quantising | None:
    """The checked settings; None where the precision makes no packed copies.

    Raises:
        ValueError: a value outside its range, or calibration data for a precision without use.
    """
    keep_host = checked_keep_host(keep_host)
    quantile(observer)
    number = isinstance(min_cosine, (int, float)) and not isinstance(min_cosine, bool)
    if min_cosine is not None and not (number and 0.0 < min_cosine < 1.0):
        raise ValueError(
            f"plan: min_cosine must be None or a number above 0 and below 1, got {min_cosine!r}"
        )
    if not quantises(chosen):
        if calibration is not None:
            raise ValueError(
                "plan: calibration must be None where nothing is quantised, got "
                f"{type(calibration).__name__}; ask for a precision of fp8, int8 or nvfp4"
            )
        return None
    return Quantising(Same(calibration), observer, min_cosine, keep_host)


def quantile(observer: object) -> float:
    """The share of magnitudes that a static scale covers: 1 for ``"max"``.

    Raises:
        ValueError: neither ``"max"`` nor ``"p50"`` to ``"p100"``, such as ``"p99.9"``.
    """
    if observer == "max":
        return 1.0
    text = re.fullmatch(r"p(\d+(?:\.\d+)?)", observer) if isinstance(observer, str) else None
    if text is None or not 50.0 <= float(text[1]) <= 100.0:
        raise ValueError(
            f"plan: observer must be 'max' or 'p50' to 'p100', such as 'p99.9', got {observer!r}"
        )
    return float(text[1]) / 100.0
