"""Requests of the engine while they wait and run."""

from __future__ import annotations

from .controls import way_of
from .generation import GenerationRequest, TokenMask


class Handle:
    """A submitted request."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.cancelled: set[int] = set()
        self.open_answers = request.n

    @property
    def done(self) -> bool:
        """Whether every answer has had its last event."""
        return self.open_answers == 0


class Answer:
    """One of a request's answers, from the queue to its last event."""

    def __init__(
        self, handle: Handle, index: int, limit: int, stops: tuple[int, ...], drawn: int
    ) -> None:
        self.handle, self.index, self.limit, self.stops = handle, index, limit, stops
        self.request = handle.request
        self.sampling = handle.request.sampling
        self.seed = self.sampling.seed_of(index, drawn)
        self.way = way_of(self.sampling, masked=self.request.mask is not None)
        self.prompt: tuple[int, ...] = tuple(handle.request.prompt_ids)
        self.filled = 0  # positions of the prompt in the cache
        self.epoch = -1  # of what the cache held when it joined
        self.tokens: list[int] = []
        self.unread = 0  # reports on their way, each of at least a token
        self.mask: TokenMask | None = None
        self.closed = False

    @property
    def chosen(self) -> bool:
        """Whether the device has been told to choose all that the limit allows."""
        return len(self.tokens) + self.unread >= self.limit

    @property
    def cancelled(self) -> bool:
        """Whether the caller wants no more of it."""
        return self.index in self.handle.cancelled
