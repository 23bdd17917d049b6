"""Verification of drafts: several tokens of one row through the step's own kernels.

Every row of those kernels has the bits that it has alone, and a draw depends on a sequence's seed
and position alone, so the tokens are those of as many plain steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from .depth import MOST
from .report import Reports
from .step import STOPPED, Arena, Step

if TYPE_CHECKING:
    from .session import Session


class Verifier:
    """Graphs of 2, 4 and 8 tokens of the first row of a session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._state = session.state.first(1)
        like = session.decoder.like
        self._arena = Arena(like, MOST)
        # The token that comes in any case and the drafts as the step reads them; then the drafts
        # as the acceptance does, which are -1 where there is none.
        self._feed = like.new_zeros(2 * MOST - 1, dtype=torch.int64)
        self.reports = Reports(session.state.report, session.batch, beside=[self.bytes])
        self._steps: dict[int, Step] = {}

    def run_after(
        self, drafting: Callable[[torch.Tensor], None], key: str, width: int, way: str
    ) -> bool:
        """Queue drafting and verification as one recording; whether it had been recorded.

        ``drafting`` writes ``width - 1`` drafts to the tensor that it gets, ``NO_TOKEN`` where it
        has none.
        """

        def work() -> None:
            drafts = self._feed[MOST : MOST + width - 1]
            drafting(drafts)
            torch.clamp(drafts, min=STOPPED, out=self._feed[1:width])
            self._work(way, width)

        name = (key, way, width)
        known = self._session.is_recorded(name)
        self._session.pool.join()
        self._session.replay(name, work)
        return known

    @property
    def bytes(self) -> torch.Tensor:
        """The last drafts, for a report to bring along; ``drafts`` reads them there."""
        return self._feed[MOST:].view(torch.uint8)

    @staticmethod
    def drafts(data: torch.Tensor) -> list[int]:
        """The drafts in a copy of ``bytes``, ``NO_TOKEN`` where there was none."""
        found: list[int] = data.view(torch.int64).tolist()
        return found

    def _step(self, width: int) -> Step:
        if width not in self._steps:
            session = self._session
            self._steps[width] = session.make_step(
                self._state, arena=self._arena, ids=self._feed[:width]
            )
        return self._steps[width]

    def _work(self, way: str, width: int) -> None:
        step, state = self._step(width), self._state
        controls = self._session.controls.rows_of(slice(0, 1))
        self._feed[:1].copy_(state.next_ids)
        step.forward()
        arguments = controls.arguments(way)
        arguments.pop("allowed", None)
        step.sampling.accept_drafts(
            step.logits.view(1, width, -1),
            self._feed[MOST : MOST + width - 1].view(1, -1),
            state.tokens,
            state.counts,
            state.lengths,
            state.finished,
            state.next_ids,
            state.accepted,
            controls.eos,
            state.max_new,
            **arguments,
            pad_id=STOPPED,
            workspace=step.draw_scratch(),
        )

    @property
    def memory_bytes(self) -> int:
        """Buffers beside the session's own."""
        return self._arena.memory_bytes
