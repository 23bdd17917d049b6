"""The slot engine of ``structures.loops`` as the server drives it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from flash_rt.structures.loops import Engine as SlotEngine
from flash_rt.structures.loops import Handle
from flash_rt.structures.loops.generation import GenerationRequest, TokenEvent


class DecoderEngine:
    """Decoders on captured steps, several answers in each."""

    def __init__(self, engine: SlotEngine) -> None:
        self._engine = engine

    @property
    def slots(self) -> int:
        """Answers that can run at a time."""
        return self._engine.slots

    @property
    def max_len(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self._engine.max_len

    @property
    def free(self) -> int:
        """Answers that could start now."""
        return self._engine.slots - self._engine.running - self._engine.waiting

    @property
    def idle(self) -> bool:
        """Whether ``step`` has nothing to do."""
        return self._engine.idle

    def submit(self, request: GenerationRequest, inputs: Mapping[str, Any] | None) -> Hashable:
        """Start a request; see ``structures.loops.engine.Engine.submit``."""
        if inputs:
            raise ValueError(f"serve: the decode loop does not read {sorted(inputs)}")
        return self._engine.submit(request)

    def step(self) -> Sequence[TokenEvent]:
        """News since the last call."""
        return self._engine.step()

    def cancel(self, handle: Hashable, index: int | None = None) -> None:
        """End a request, or one answer of it."""
        assert isinstance(handle, Handle)
        self._engine.cancel(handle, index)

    def counters(self) -> Mapping[str, float]:
        """Graphs recorded; nothing falls back here."""
        return {"graph_captures": self._engine.graphs_recorded, "fallbacks": 0}
