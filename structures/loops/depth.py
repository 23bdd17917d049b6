"""How many tokens to draft: as many as pay for the wider step, none where none do."""

from __future__ import annotations

WIDTHS = (2, 4, 8)  # tokens of a verification: its graphs; attention takes up to eight
STRONGEST = 12
RATE = 0.1  # of what was seen last in the truth of drafts
COST_RATE = 0.2  # and in the time of a step
FORGET_RATE = 0.002  # of a time that is not measured, with every plain step
LONGEST = 3.0  # times the average: more says nothing of a plain step
MARGIN = 1.03  # a gain below this is noise
# Until measured: a verification of so many tokens against a plain step.
FIRST_COSTS = {2: 1.15, 4: 1.2, 8: 1.3}


class Depth:
    """Learns how often drafts come true, by strength, and what steps cost."""

    def __init__(self) -> None:
        self._truth = [min(0.3 + 0.05 * s, 0.9) for s in range(STRONGEST + 1)]
        self._plain: float | None = None
        self._wide: dict[int, float] = {}

    def choose(self, strength: int, room: int) -> int:
        """Drafts worth verifying now, at most ``room``: 0 or one less than a width."""
        best, gain = 0, MARGIN
        for width in WIDTHS:
            if width - 1 > room:
                break
            expected, chance = 1.0, 1.0
            for offset in range(width - 1):
                chance *= self._truth[min(strength + offset, STRONGEST)]
                expected += chance
            if expected / self.cost(width) > gain:
                best, gain = width - 1, expected / self.cost(width)
        return best

    def cost(self, width: int) -> float:
        """A verification against a plain step, which it cannot undercut."""
        if self._plain is None or width not in self._wide:
            return FIRST_COSTS[width]
        return max(1.0, self._wide[width] / self._plain)

    def saw(self, strength: int, true: bool) -> None:
        """A draft of this strength came true, or did not."""
        at = min(strength, STRONGEST)
        self._truth[at] += RATE * (float(true) - self._truth[at])

    def saw_verified(self, strength: int, drafted: int, accepted: int) -> None:
        """Of ``drafted`` tokens the first ``accepted`` came true."""
        for offset in range(min(accepted + 1, drafted)):
            self.saw(strength + offset, offset < accepted)

    def took(self, width: int, seconds: float) -> None:
        """A plain step (width 1) or a verification took so long.

        A single time may be anything (another process, a collection), so it counts for a part
        only; and what has not been tried for long is forgotten, so that it is tried again.
        """
        if width > 1:
            before = self._wide.get(width, FIRST_COSTS[width] * (self._plain or seconds))
            self._wide[width] = before + COST_RATE * (seconds - before)
            return
        before = seconds if self._plain is None else self._plain
        self._plain = before + COST_RATE * (min(seconds, LONGEST * before) - before)
        for other, old in self._wide.items():
            self._wide[other] = old + FORGET_RATE * (FIRST_COSTS[other] * self._plain - old)
