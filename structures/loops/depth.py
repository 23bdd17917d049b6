"""How many tokens to draft: as many as pay for the wider step, none where none do."""

from __future__ import annotations

from collections.abc import Sequence

WIDTHS = (2, 4, 8)  # tokens of a verification: its graphs; attention takes up to eight
MOST = WIDTHS[-1]
STRONGEST = 12
RATE = 0.1  # of what was seen last in the truth of drafts
COST_RATE = 0.2  # and in the time of a step
FORGET_RATE = 0.002  # of a time that is not measured, with every plain step
LONGEST = 3.0  # times the average: more says nothing of a plain step
MARGIN = 1.03  # a gain below this is noise
UNFOUNDED = 0.1  # the truth of a draft that nothing speaks for, until measured
# Until measured: a verification of so many tokens against a plain step.
FIRST_COSTS = {2: 1.15, 4: 1.2, 8: 1.3}


def first_truth(strength: int) -> float:
    """How often a draft of this strength comes true, until measured."""
    return min(0.3 + 0.05 * strength, 0.9)


def room_for_drafts(
    *, done: int, limit: int, prompt: int, max_len: int, in_flight: Sequence[int]
) -> int:
    """Drafts of the next step: no more than there may be tokens, or slots behind all drafts.

    Args:
        done: tokens that are known, of at most ``limit``.
        prompt: positions before the first of them, of at most ``max_len`` altogether.
        in_flight: drafts of each step whose tokens are not known; it brings one at least.
    """
    left = limit - done - len(in_flight)
    most = done + sum(drafted + 1 for drafted in in_flight)
    return max(0, min(left - 1, max_len - prompt - most - MOST))


class Costs:
    """Learns what steps cost."""

    def __init__(self) -> None:
        self._plain: float | None = None
        self._wide: dict[int, float] = {}

    def cost(self, width: int) -> float:
        """A verification against a plain step, which it cannot undercut."""
        if self._plain is None or width not in self._wide:
            return FIRST_COSTS[width]
        return max(1.0, self._wide[width] / self._plain)

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

    def _best(self, expected: dict[int, float], room: int) -> int:
        """Drafts of the width with the most tokens for its cost; 0 where a plain step has more."""
        best, gain = 0, MARGIN
        for width in WIDTHS:
            if width - 1 <= room and expected[width] / self.cost(width) > gain:
                best, gain = width - 1, expected[width] / self.cost(width)
        return best


class Depth(Costs):
    """Learns how often the drafts of a model come true, by their place in a step."""

    def __init__(self) -> None:
        super().__init__()
        self._truth = [first_truth(place) for place in range(MOST - 1)]

    def choose(self, room: int) -> int:
        """Drafts worth verifying now, at most ``room``: 0 or one less than a width."""
        chance, tokens, expected = 1.0, 1.0, {}
        for place, truth in enumerate(self._truth):
            chance *= truth
            tokens += chance
            if place + 2 in WIDTHS:
                expected[place + 2] = tokens
        return self._best(expected, room)

    def saw_verified(self, drafted: int, accepted: int) -> None:
        """Of ``drafted`` tokens the first ``accepted`` came true."""
        for place in range(min(accepted + 1, drafted)):
            self._truth[place] += RATE * (float(place < accepted) - self._truth[place])


class Yields(Costs):
    """Learns how many tokens a verification brings that is queued a step ahead of what is known.

    ``strength`` is that of the copy one step before, and ``wide`` says whether that step is a
    verification itself, which may end the copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tokens: dict[tuple[int, bool], dict[int, float]] = {}

    def choose(self, strength: int, room: int, *, wide: bool) -> int:
        """As ``Depth.choose``."""
        return self._best(self._expected(strength, wide), room)

    def saw(self, strength: int, right: int, *, wide: bool) -> None:
        """Of ``MOST - 1`` drafts the first ``right`` were what came."""
        expected = self._expected(strength, wide)
        for width, tokens in expected.items():
            expected[width] += RATE * (1 + min(right, width - 1) - tokens)

    def _expected(self, strength: int, wide: bool) -> dict[int, float]:
        key = (min(strength, STRONGEST), wide)
        if key not in self._tokens:
            chance, tokens, made = 1.0, 1.0, {}
            for place in range(MOST - 1):
                chance *= first_truth(strength + place) if strength else UNFOUNDED
                tokens += chance
                made[place + 2] = tokens
            self._tokens[key] = {width: made[width] for width in WIDTHS}
        return self._tokens[key]
