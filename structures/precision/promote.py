"""Which units get a higher precision, so that a floor of fidelity holds: most gain a byte first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from .fidelity import Fidelity
from .formats import CLIMB
from .prices import Prices
from .units import Unit

# Aim below the loss that is allowed, because prices are estimates: fewer rounds of repacking.
MARGIN = 0.9
MAX_ROUNDS = 12


@dataclass(frozen=True)
class Promotion:
    """One step of one unit.

    Attributes:
        gain: loss of cosine that it was expected to save.
        extra_bytes: that it costs.
    """

    unit: str
    before: str
    after: str
    gain: float
    extra_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.unit}: {self.before} -> {self.after}, {self.extra_bytes:+d} bytes, saves "
            f"{self.gain:.1e} of cosine"
        )


def steps(unit: Unit, prices: Prices) -> list[Promotion]:
    """Everything that the unit could be promoted to, with what it gains and costs."""
    found = []
    precision = unit.precision
    costs = prices.get(unit.name, {})
    while precision in CLIMB:
        precision = CLIMB[precision]
        gain = costs.get(unit.precision, 0.0) - costs.get(precision, 0.0)
        extra = unit.size(precision) - unit.size(unit.precision)
        found.append(Promotion(unit.name, unit.precision, precision, gain, extra))
    return found


def best_step(every: Iterable[Promotion]) -> Promotion | None:
    """The step with the most gain a byte; where none gains, the one that costs the fewest bytes."""
    every = [*every]
    gaining = [step for step in every if step.gain > 0]
    if gaining:
        return max(gaining, key=lambda s: (s.gain / max(s.extra_bytes, 1), s.gain))
    last = [step for step in every if step.after == "bf16"]
    return min(last, key=lambda s: s.extra_bytes) if last else None


def expected(units: Sequence[Unit], prices: Prices) -> float:
    """Loss of cosine that the prices foretell."""
    return sum(prices.get(u.name, {}).get(u.precision, 0.0) for u in units if u.quantised)


def promote(
    units: Sequence[Unit],
    prices: Prices,
    floor: float,
    apply: Callable[[Unit], None],
    measure: Callable[[], Fidelity],
) -> tuple[Fidelity, list[Promotion]]:
    """Raise precisions until ``measure`` is at ``floor`` or above, or nothing is quantised.

    Args:
        apply: brings a unit's packed copies to its new precision.
        measure: fidelity of the model as it is.

    Returns:
        The last measurement and every step, in order.
    """
    by_name = {unit.name: unit for unit in units}
    possible = {unit.name: steps(unit, prices) for unit in units}
    taken: list[Promotion] = []
    fidelity = measure()
    rounds = 0
    while fidelity.cosine < floor and any(unit.quantised for unit in units):
        rounds += 1
        allowed = (1.0 - floor) * MARGIN
        # What was measured corrects what was foretold, which is of first order only.
        now = expected(units, prices)
        goal = now * allowed / max(1.0 - fidelity.cosine, 1e-12)
        changed: set[str] = set()
        while not changed or expected(units, prices) > goal:
            step = best_step(chain.from_iterable(possible.values()))
            if step is None:
                break
            unit = by_name[step.unit]
            unit.precision = step.after
            possible[step.unit] = steps(unit, prices)
            taken.append(step)
            changed.add(step.unit)
            if rounds > MAX_ROUNDS:
                goal = 0.0
        for name in changed:
            apply(by_name[name])
        fidelity = measure()
    return fidelity, taken
