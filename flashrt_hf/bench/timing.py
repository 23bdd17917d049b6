"""Wall-clock times between two device synchronisations, and medians over interleaved rounds."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping

import torch


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_ms(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds from an idle device to an idle device, the host's own work included."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


@dataclasses.dataclass(frozen=True)
class Samples:
    """Milliseconds of one candidate, one entry a round."""

    values_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.values_ms)

    @property
    def spread(self) -> float:
        """``(max - min) / median``: a difference between candidates below this is noise."""
        return (max(self.values_ms) - min(self.values_ms)) / self.median_ms


def interleave(
    candidates: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    budget_s: float | None = None,
    least_rounds: int = 2,
) -> dict[str, Samples]:
    """Call every candidate once a round, so that a drift of the clocks meets all of them.

    Args:
        candidates: name -> measurement, which returns milliseconds.
        rounds: rounds at most.
        budget_s: a candidate that has spent this many seconds leaves after ``least_rounds``; None:
            no limit.
        least_rounds: rounds that every candidate takes part in.

    Raises:
        ValueError: ``rounds`` is below 1.
    """
    if rounds < 1:
        raise ValueError(f"bench: rounds must be at least 1, got {rounds}")
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    spent_s = dict.fromkeys(candidates, 0.0)
    for index in range(rounds):
        for name, measure in candidates.items():
            if index >= least_rounds and budget_s is not None and spent_s[name] >= budget_s:
                continue
            start = time.perf_counter()
            taken[name].append(measure())
            spent_s[name] += time.perf_counter() - start
    return {name: Samples(tuple(values)) for name, values in taken.items()}
