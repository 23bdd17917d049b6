"""Statistics of the inputs of linear weights, in one pass over the calibration data.

Nothing is stored but running values: the largest magnitude, a histogram of magnitudes by their BF16
bits, and mean squares of every column.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .data import Call
from .units import Unit

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_SCALE = 2.0**-126
_BINS = 1 << 15  # magnitudes that BF16 tells apart


@dataclass
class Observer:
    """Running statistics of one unit's input ``[..., K]``."""

    quantile: float
    largest: torch.Tensor | None = None
    squares: torch.Tensor | None = None
    histogram: torch.Tensor | None = None
    rows: int = 0

    def add(self, x: torch.Tensor) -> None:
        """Take one more input in."""
        x = x.detach().reshape(-1, x.shape[-1])
        if x.shape[0] == 0:
            return
        largest, squares = x.abs().amax().float(), x.float().square().sum(0)
        first = self.largest is None or self.squares is None
        self.largest = largest if first else torch.maximum(self.largest, largest)  # type: ignore[arg-type]
        self.squares = squares if first else self.squares + squares  # type: ignore[operator]
        self.rows += x.shape[0]
        if self.quantile < 1.0:
            bits = x.abs().to(torch.bfloat16).view(torch.int16).flatten().long()
            counts = torch.bincount(bits, minlength=_BINS)
            self.histogram = counts if self.histogram is None else self.histogram + counts

    @property
    def magnitude(self) -> float:
        """The magnitude that the quantile asks for; 0 where there was no input."""
        if self.largest is None:
            return 0.0
        if self.histogram is None:
            return float(self.largest)
        share = self.histogram.double().cumsum(0) / self.histogram.sum()
        place = int((share < self.quantile).sum())
        bits = torch.tensor([place], dtype=torch.int16, device="cpu")
        return min(float(bits.view(torch.bfloat16)), float(self.largest))

    @property
    def mean_squares(self) -> torch.Tensor | None:
        """fp32 ``[K]``; None where there was no input or it is not finite."""
        if self.squares is None or not bool(self.squares.isfinite().all()):
            return None
        return self.squares / self.rows

    @property
    def scale(self) -> float | None:
        """Static FP8 scale; None where the input is unknown or not finite."""
        magnitude = self.magnitude
        if not 0.0 < magnitude < float("inf"):
            return None
        return max(magnitude / FP8_MAX, SMALLEST_SCALE)


@contextmanager
def hooks(handles: Iterable[Any]) -> Iterator[None]:
    """Hooks that are gone behind the block."""
    made = [*handles]
    try:
        yield
    finally:
        for handle in made:
            handle.remove()


def first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The input of a linear layer, by position or by name."""
    found: torch.Tensor = args[0] if args else next(iter(kwargs.values()))
    return found


@torch.no_grad()
def observe(
    model: nn.Module,
    units: Sequence[Unit],
    calls: Iterable[Call],
    *,
    quantile: float,
    device: torch.device,
) -> dict[str, Observer]:
    """Run the host's own forward on ``calls`` and watch the input of every unit."""
    observers = {unit.name: Observer(quantile) for unit in units}

    def watch(unit: Unit) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            observers[unit.name].add(first(args, kwargs))

        return unit.leaves[0].module.register_forward_pre_hook(note, with_kwargs=True)

    with hooks(watch(unit) for unit in units):
        for call in calls:
            call.run(model, device)
    return observers
