"""What the host knows of the copy that a sequence seems to be, and what verifying it may bring."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from .depth import MOST, WIDTHS, Yields

NGRAMS = (4, 3, 2, 1)


class Lookup:
    """A sequence as it grows, and the place in it that it seems to repeat.

    ``strength`` says how much speaks for that place: the tokens that were matched to find it, and
    those that it has predicted since.
    """

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids: list[int] = []
        self._seen: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in NGRAMS)
        self._next: int | None = None  # where the token that is expected stands
        self.strength = 0
        for token in ids:
            self.add(token)

    def add(self, token: int) -> None:
        """The sequence goes on."""
        ids, at = self._ids, self._next
        hit = at is not None and ids[at] == token
        ids.append(token)
        if at is not None and hit:
            self._next, self.strength = at + 1, self.strength + 1
        else:
            self._find()
        for size, seen in zip(NGRAMS, self._seen, strict=True):
            seen[tuple(ids[-size:])] = len(ids)

    def _find(self) -> None:
        self._next, self.strength = None, 0
        for size, seen in zip(NGRAMS, self._seen, strict=True):
            found = seen.get(tuple(self._ids[-size:]))
            if found is not None:
                self._next, self.strength = found, size
                return

    def draft(self, count: int) -> list[int]:
        """Up to ``count`` tokens that may come next; they may run into what they predict."""
        if self._next is None:
            return []
        drafts: list[int] = []
        distance = len(self._ids) - self._next
        for offset in range(count):
            at = self._next + offset
            drafts.append(self._ids[at] if at < len(self._ids) else drafts[offset - distance])
        return drafts


@dataclass
class _Trial:
    """What drafts of a step would have brought, whether it had any or not."""

    strength: int
    wide: bool
    drafts: list[int]
    right: int = 0

    def goes_on(self, token: int) -> bool:
        if self.right == len(self.drafts) or self.drafts[self.right] != token:
            return False
        self.right += 1
        return self.right < len(self.drafts)


class Watch:
    """Decides whether a step is a verification while the step in front of it still runs.

    Call ``choose`` for every step and ``took`` for every report, in the order of the steps. Every
    step teaches: what it brought is compared with what its drafts would have been.
    """

    def __init__(self, ids: Iterable[int], yields: Yields) -> None:
        self._lookup, self._yields = Lookup(ids), yields
        self._wide = False  # the step decided last
        self._decided: deque[tuple[int, bool]] = deque()  # of steps whose start is not known
        self._trials: list[_Trial] = []

    def choose(self, room: int, *, in_flight: int) -> int:
        """Drafts for the next step, at most ``room``; ``in_flight`` steps are not taken yet."""
        strength, wide = self._lookup.strength, self._wide and in_flight > 0
        count = self._yields.choose(strength, room, wide=wide)
        self._wide = count > 0
        self._decided.append((strength, wide))
        if in_flight == 0:
            self._begin()
        return count

    def took(self, tokens: list[int], drafted: int, seconds: float | None) -> None:
        """See ``Drafter``."""
        for token in tokens:
            self._trials = [t for t in self._trials if t.goes_on(token) or self._end(t)]
            self._lookup.add(token)
        if self._decided:
            self._begin()
        if seconds is not None:
            width = 1 if not drafted else next(w for w in WIDTHS if w > drafted)
            self._yields.took(width, seconds)

    def _begin(self) -> None:
        strength, wide = self._decided.popleft()
        trial = _Trial(strength, wide, self._lookup.draft(MOST - 1))
        if trial.drafts:
            self._trials.append(trial)
        else:
            self._end(trial)

    def _end(self, trial: _Trial) -> bool:
        self._yields.saw(trial.strength, trial.right, wide=trial.wide)
        return False
