"""What waits for the worker: requests for text, and calls of functions that need the model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flash_rt.structures.loops.generation import GenerationRequest

from .errors import ApiError


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of work that did not succeed, and what its client is told."""

    error: ApiError


@dataclass(frozen=True, slots=True)
class Result:
    """What a call returned."""

    value: Any


@dataclass(eq=False, kw_only=True)
class Work:
    """One request of a client.

    ``cancelled`` and ``unwanted`` are written by the event loop's thread and read by the worker;
    ``events`` belongs to the event loop's thread, the rest behind it to the worker's.

    Attributes:
        client: who takes turns in the queue.
        deadline: on ``time.monotonic``.
        unwanted: answers that nobody needs more of.
        events: what happened, in order, as ``(work, event)``: ``TokenEvent``, ``Result`` or a last
            ``Failed``. The works of one HTTP request share it.
        left: answers that go on.
    """

    client: Hashable
    deadline: float
    events: asyncio.Queue[Any]
    arrived: float = field(default_factory=time.monotonic)
    cancelled: bool = False
    unwanted: set[int] = field(default_factory=set)
    started: float = 0.0
    handle: Hashable = None
    left: set[int] = field(default_factory=set)

    @property
    def cost(self) -> int:
        """Turns that it takes."""
        return 1


@dataclass(eq=False, kw_only=True)
class TextWork(Work):
    """Answers to one prompt."""

    request: GenerationRequest
    inputs: Mapping[str, Any] | None = None

    @property
    def cost(self) -> int:
        """One for every answer."""
        return self.request.n


@dataclass(eq=False, kw_only=True)
class CallWork(Work):
    """A function that the worker runs between steps; its ``Result`` is the only event."""

    function: Callable[[], Any]
