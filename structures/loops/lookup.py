"""Drafts without a model: what followed the last tokens the last time they occurred.

Source: Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from collections.abc import Iterable

NGRAMS = (4, 3, 2)


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

    def add(self, token: int) -> bool | None:
        """The sequence goes on; whether that was predicted, None where nothing was."""
        ids, at = self._ids, self._next
        hit = None if at is None else ids[at] == token
        ids.append(token)
        if at is not None and hit:
            self._next, self.strength = at + 1, self.strength + 1
        else:
            self._find()
        for size, seen in zip(NGRAMS, self._seen, strict=True):
            seen[tuple(ids[-size:])] = len(ids)
        return hit

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
