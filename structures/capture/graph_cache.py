"""A bounded number of recorded graphs, least recently used first out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, Protocol, TypeVar


class Releasable(Protocol):
    """What a cache holds."""

    def release(self) -> None:
        """Give memory back."""


Entry = TypeVar("Entry", bound=Releasable)


class GraphCache(Generic[Entry]):
    """At most ``capacity`` entries; the one that was not used for longest is released first."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"GraphCache: capacity must be at least 1, got {capacity}")
        self.capacity = capacity
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._entries)

    def get(self, key: Hashable) -> Entry | None:
        """The entry of ``key``, which becomes the most recently used, or None."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: Hashable, entry: Entry) -> list[Entry]:
        """Keep ``entry`` as the most recently used; returns what was released for it."""
        released = []
        if key in self._entries:
            released.append(self._entries.pop(key))
        while len(self._entries) >= self.capacity:
            released.append(self._entries.popitem(last=False)[1])
        for old in released:
            old.release()
        self._entries[key] = entry
        return released

    def clear(self) -> None:
        """Release everything."""
        while self._entries:
            self._entries.popitem()[1].release()
