"""Which conversations the rows of a cache still hold, and what a new prompt can use of them.

Keys and values of a position follow from the tokens up to it, so a prompt that begins like what a
row holds needs only the rest. Their last bits also follow from how many positions were computed at
once. What is used again is therefore only

- everything a row holds, for a prompt that goes on from there: the next turn of a conversation;
- what a row's last prompt left, when the new prompt has all of it and then something else: the
  next turn where a template changes the answer before it;
- a whole prompt with its logits, for the same prompt again, which then repeats bit for bit.

A mere common beginning, such as a system prompt of many conversations, is not: answers would
depend on who asked before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Held:
    """Content of a row: ``ids`` from position 0, of which the first ``prompt`` were a prompt.

    ``logits [V]`` are those behind the prompt.
    """

    ids: Ids = ()
    prompt: int = 0
    logits: torch.Tensor | None = None
    used: int = 0


@dataclass(frozen=True)
class Match:
    """Where a prompt goes, and how many of its positions are in ``source`` already.

    With ``logits`` these are all of them.
    """

    row: int
    source: int
    length: int = 0
    logits: torch.Tensor | None = None


class Prefixes:
    """Contents of the rows; ``epoch`` grows when everything is forgotten."""

    def __init__(self, rows: int) -> None:
        self._held = [Held()] * rows
        self._clock = 0
        self.epoch = 0

    def match(self, prompt: Ids, free: Sequence[int], *, reuse: bool = True) -> Match:
        """The best use of what is there, into one of the ``free`` rows."""
        idle = min(free, key=lambda row: (bool(self._held[row].ids), self._held[row].used))
        if not reuse:
            return Match(idle, idle)
        for row in [*free, *range(len(self._held))]:
            held = self._held[row]
            if held.logits is not None and held.ids[: held.prompt] == prompt:
                return Match(row if row in free else idle, row, len(prompt), held.logits)
        lengths = {row: _usable(self._held[row], prompt) for row in free}
        best = max(free, key=lambda row: lengths[row])
        return Match(best, best, lengths[best]) if lengths[best] else Match(idle, idle)

    def hold(
        self, row: int, ids: Ids, *, prompt: int = 0, logits: torch.Tensor | None = None
    ) -> None:
        """``row`` holds these positions now; without a prompt it keeps the one it has."""
        held, self._clock = self._held[row], self._clock + 1
        if prompt:
            self._held[row] = Held(ids, prompt, logits, self._clock)
        elif ids[: held.prompt] == held.ids[: held.prompt]:
            self._held[row] = Held(ids, held.prompt, held.logits, self._clock)
        else:
            self._held[row] = Held(ids, len(ids), None, self._clock)

    def drop(self, rows: Iterable[int]) -> None:
        """What these rows held is overwritten."""
        for row in rows:
            self._held[row] = Held()

    def swap(self, one: int, other: int) -> None:
        """Two rows have changed places."""
        self._held[one], self._held[other] = self._held[other], self._held[one]

    def length(self, row: int) -> int:
        """Positions that ``row`` holds."""
        return len(self._held[row].ids)

    def forget(self) -> None:
        """Everything was computed by other weights."""
        self.drop(range(len(self._held)))
        self.epoch += 1


def _usable(held: Held, prompt: Ids) -> int:
    """Positions of ``held`` that ``prompt`` goes on from, at most all but its last."""
    count = len(held.ids)
    if count < len(prompt) and prompt[:count] == held.ids:
        return count
    if not held.prompt or prompt[: held.prompt] != held.ids[: held.prompt]:
        return 0
    most = min(count, len(prompt) - 1)
    low, high = min(held.prompt, most), most  # the first `low` agree
    while low < high:
        middle = (low + high + 1) // 2
        if prompt[low:middle] == held.ids[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
