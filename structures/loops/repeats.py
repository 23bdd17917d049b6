"""Drafts without a model, found on the device: what followed the last tokens at an earlier place.

A recording searches the text itself, so that a verification can be queued before the host knows the
tokens of the step in front of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .cache import StaticState
from .controls import ADJUSTED, DRAWN, GREEDY
from .depth import WIDTHS
from .staging import put

if TYPE_CHECKING:
    from .session import Session


class Repeats:
    """The prompt of a session's first row, and recordings that draft from its text."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._state: StaticState = session.state.first(1)
        self._prompt = torch.zeros_like(self._state.tokens)

    def begin(self, prompt: torch.Tensor) -> None:
        """The first row goes on from ``prompt``, int64 ``[P]`` on any device."""
        self._session.pool.join()
        put(self._prompt[0, : prompt.shape[0]], prompt)

    def queue(self, count: int, way: str) -> bool:
        """Find ``count`` drafts and verify them; whether that had been recorded before."""
        return self._session.verifier.run_after(self._draft, "lookup", count + 1, way)

    def warm_up(self) -> None:
        """Record every width and way; what the first row holds is lost."""
        for way in (ADJUSTED, DRAWN, GREEDY):
            for width in reversed(WIDTHS):
                self.queue(width - 1, way)

    def _draft(self, drafts: torch.Tensor) -> None:
        state, sampling = self._state, self._session.step.sampling
        text = (self._prompt, state.tokens, state.counts, state.lengths)
        sampling.lookup_drafts(*text, out=drafts[None])

    @property
    def memory_bytes(self) -> int:
        """Buffers beside the session's own."""
        return self._prompt.numel() * self._prompt.element_size()
