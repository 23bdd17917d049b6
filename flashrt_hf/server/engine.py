"""What the server needs of an engine: requests that share a decode step.

``structures.loops`` has the one for decoders. An engine is not thread-safe; the worker's thread
alone drives it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from flash_rt.structures.loops.generation import GenerationRequest, TokenEvent

# What a model, or the host's own code around it, may raise; all else ends the server.
MODEL_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)


class Engine(Protocol):
    """Runs up to ``slots`` answers at a time."""

    @property
    def slots(self) -> int:
        """Answers that can run at a time."""

    @property
    def max_len(self) -> int:
        """Most tokens of a prompt and its answer together."""

    @property
    def free(self) -> int:
        """Answers that could start now."""

    @property
    def idle(self) -> bool:
        """Whether ``step`` has nothing to do."""

    def submit(self, request: GenerationRequest, inputs: Mapping[str, Any] | None) -> Hashable:
        """Start a request; ``inputs`` are those of a vision-language model beside the ids.

        Raises:
            ValueError: the engine cannot run it.
        """

    def step(self) -> Sequence[TokenEvent]:
        """News since the last call; returns before long when there is none yet."""

    def cancel(self, handle: Hashable, index: int | None = None) -> None:
        """End a request, or one answer of it. What has ended already is left alone."""

    def counters(self) -> Mapping[str, float]:
        """Totals for ``/metrics``, by name."""
