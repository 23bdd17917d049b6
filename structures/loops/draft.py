"""Drafts by a smaller model with the same vocabulary.

Its steps and the verification of what they draft are one recording. It draws by the same settings
with the same seed at the same positions, so that it says the same wherever it agrees.
"""

from __future__ import annotations

import itertools

import torch

from .controls import DRAWN, GREEDY, way_of
from .depth import WIDTHS, Depth
from .request import Request
from .session import Session
from .staging import on_device
from .step import Arena, Step

_numbers = itertools.count()
FIRST_PAUSE, LONGEST_PAUSE = 32, 1024  # plain tokens before drafts that did not pay are tried again


class DraftModel:
    """What drafts for the one row of a session, over all its requests."""

    def __init__(self, target: Session, session: Session) -> None:
        self.target, self.session = target, session
        self._state = session.state.first(1)
        arena = Arena(session.decoder.like, 1)
        self._step: Step = session.make_step(self._state, arena=arena, history_static=False)
        self._step.controls = session.controls.rows_of(slice(0, 1))
        self._key = f"draft {next(_numbers)}"  # of recordings that hold this object's addresses

    def begin(self, request: Request) -> None:
        """The draft model reads the prompt of ``request`` too."""
        session = self.session
        session.pool.join()
        session.state.begin(max_new=session.state.slots, eos=())
        session.prefill.run(0, request.input_ids[0, -request.lengths[0] :].to(self._device))
        session.controls.set_row(
            0,
            request.sampling,
            seed=request.sampling.seed_of(0, request.seed),
            stops=(),
            prompt=request.seen(0).to(self._device),
        )

    def catch_up(self, ids: list[int], start: int) -> None:
        """Keys and values of tokens that plain steps have added."""
        found = on_device(ids, torch.int64, self._device)
        self.session.prefill.chunk(0, found, start, last=False)

    def queue(self, count: int, way: str) -> bool:
        """Draft ``count`` tokens and verify them; whether that had been recorded before."""
        drawn = GREEDY if way == GREEDY else DRAWN

        def drafting(drafts: torch.Tensor) -> None:
            mine, theirs = self._state, self.target.state.first(1)
            for name in ("next_ids", "lengths", "counts"):
                getattr(mine, name).copy_(getattr(theirs, name))
            mine.finished.zero_()
            for index in range(count):
                self._step.forward()
                self._step.draw(drawn)
                drafts[index : index + 1].copy_(mine.next_ids)
            self._step.forward()  # stores the last draft, should all of them be accepted

        return self.target.verifier.run_after(drafting, self._key, count + 1, way)

    def release(self) -> None:
        """Give the recordings back."""
        self.target.drop_recordings(self._key)

    @property
    def _device(self) -> torch.device:
        return self.session.state.tokens.device


class FromModel:
    """A ``Drafter`` of one request."""

    waits = True  # it reads the tokens of plain steps from the host

    def __init__(self, model: DraftModel, request: Request, depth: Depth) -> None:
        self._model, self._depth = model, depth
        self._way = way_of(request.sampling)
        self._ids: list[int] = next(request.rows()).tolist()
        self._stored = len(self._ids)  # positions that the draft model has read
        self._pause, self._waited = FIRST_PAUSE, 0
        model.begin(request)

    def plan(self, room: int, in_flight: int) -> int:
        """See ``speculate.Drafter``."""
        count = self._depth.choose(room)
        if count == 0 and room > 0 and self._waited >= self._pause:
            return WIDTHS[0] - 1
        return count

    def queue(self, count: int) -> bool:
        """See ``speculate.Drafter``."""
        missing = self._ids[self._stored : -1]
        if missing:
            self._model.catch_up(missing, self._stored)
        if self._waited >= self._pause:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._waited = 0
        return self._model.queue(count, self._way)

    def took(self, tokens: list[int], drafted: int, seconds: float | None) -> None:
        """See ``speculate.Drafter``."""
        self._ids += tokens
        if drafted:
            self._stored = len(self._ids) - 1
            self._depth.saw_verified(drafted, len(tokens) - 1)
        else:
            self._waited += 1
        if seconds is not None:
            self._depth.took(drafted + 1, seconds)
