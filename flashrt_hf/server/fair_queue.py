"""A bounded queue in which clients take turns."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class QueueFull(Exception):
    """No more may wait."""


class FairQueue(Generic[T]):
    """Start-time fair queueing: who asked for much waits for who asked for little.

    An item gets the tag ``max(virtual time, its client's last tag + that item's cost)`` and the
    smallest tag leaves first, items of equal tags in the order they came. Virtual time is the
    largest tag that has left, so that a client which was away gains nothing by it. With every item
    it also moves on by ``1 / items that wait``, so that no flow of new clients starves who waits.

    Source: Goyal, Vin and Cheng 1996, Start-time Fair Queueing, section 2. Not thread-safe.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._heap: list[tuple[float, int, T]] = []
        self._finish: dict[Hashable, float] = {}
        self._now, self._count = 0.0, 0

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, items: list[tuple[Hashable, T, float]]) -> None:
        """Add all of ``(client, item, cost)`` or, with ``QueueFull``, none."""
        if len(self._heap) + len(items) > self.capacity:
            raise QueueFull
        for client, item, cost in items:
            start = max(self._now, self._finish.get(client, 0.0))
            self._finish[client] = start + cost
            self._count += 1
            heapq.heappush(self._heap, (start, self._count, item))

    def pop(self) -> T:
        """The item whose turn it is; IndexError when there is none."""
        start, _, item = heapq.heappop(self._heap)
        self._now = max(self._now, start) + 1 / (len(self._heap) + 1)
        if len(self._finish) > 2 * self.capacity:
            self._finish = {c: t for c, t in self._finish.items() if t > self._now}
        return item

    def remove(self, wanted: Callable[[T], bool]) -> list[T]:
        """Take out, and return in the order of arrival, the items for which ``wanted`` is true."""
        removed = sorted((entry for entry in self._heap if wanted(entry[2])), key=lambda e: e[1])
        if removed:
            gone = {entry[1] for entry in removed}
            self._heap = [entry for entry in self._heap if entry[1] not in gone]
            heapq.heapify(self._heap)
        return [entry[2] for entry in removed]
