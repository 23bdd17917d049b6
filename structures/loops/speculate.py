"""One sequence with drafts: the tokens of plain steps, several at a time where drafts come true."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch

from .cache import NO_TOKEN
from .controls import way_of
from .depth import Yields, room_for_drafts
from .lookup import Watch
from .request import Request
from .run import Observe, Streamer
from .session import Session
from .verify import Verifier


class Counts:
    """What speculation did, over all requests of a loop."""

    def __init__(self) -> None:
        self.steps = self.verified = self.drafted = self.accepted = 0


class Drafter(Protocol):
    """Proposes tokens, and learns what became of them.

    ``waits``: it has to be told every token before it can queue the next drafts. Others are asked
    while a step is still on its way.
    """

    waits: bool

    def plan(self, room: int, in_flight: int) -> int:
        """How many drafts to verify next, at most ``room``; 0 for a plain step.

        ``in_flight`` steps are queued whose tokens it has not been told.
        """

    def queue(self, count: int) -> bool:
        """Queue the verification of the drafts planned; whether it had been recorded before."""

    def took(self, tokens: list[int], drafted: int, seconds: float | None) -> None:
        """The next ``tokens``, of a step that verified ``drafted`` (0: a plain one).

        ``seconds`` since the step before, None where that says nothing of its cost.
        """


class FromLookup:
    """A ``Drafter`` that finds drafts in the text of its own request, on the device."""

    waits = False

    def __init__(self, session: Session, way: str, prompt: torch.Tensor, yields: Yields) -> None:
        self._repeats, self._way = session.repeats, way
        self._watch = Watch(prompt.tolist(), yields)
        self._repeats.begin(prompt)

    def plan(self, room: int, in_flight: int) -> int:
        """See ``Drafter``."""
        return self._watch.choose(room, in_flight=in_flight)

    def queue(self, count: int) -> bool:
        """See ``Drafter``."""
        return self._repeats.queue(count, self._way)

    def took(self, tokens: list[int], drafted: int, seconds: float | None) -> None:
        """See ``Drafter``."""
        self._watch.took(tokens, drafted, seconds)


@dataclass
class _Posted:
    """A step whose report is not taken; ``timed``: the time until then says what it costs."""

    drafted: int
    timed: bool


class _Run:
    """The steps of one request and what the host knows of them."""

    def __init__(
        self,
        session: Session,
        request: Request,
        drafter: Drafter,
        streamer: Streamer | None,
        observe: Observe | None,
        counts: Counts,
    ) -> None:
        self._session, self._request, self._drafter = session, request, drafter
        self._streamer, self._observe, self._counts = streamer, observe, counts
        self._way = way_of(request.sampling)
        self._posted: list[_Posted] = []
        self._reports = session.verifier.reports
        self._reports.begin()
        self._seen = time.perf_counter()
        self.tokens: list[int] = []
        self.done = False

    def post(self, drafted: int, *, timed: bool) -> None:
        self._reports.post(beside=0 if drafted else None)
        self._posted.append(_Posted(drafted, timed))

    def take(self) -> None:
        """Read the oldest report: one token, or those that a verification appended."""
        reports, posted = self._reports, self._posted.pop(0)
        finished = reports.take()
        before, self._seen = self._seen, time.perf_counter()
        if self.done:
            return
        drafts: list[int] = []
        tokens = reports.chosen()[:1]
        if posted.drafted:
            count = reports.accepted() - 1
            drafts = Verifier.drafts(reports.brought(0))[: posted.drafted]
            tokens = [*drafts[:count], *tokens]
            self._counts.drafted += sum(draft != NO_TOKEN for draft in drafts)
            self._counts.accepted += count
        seconds = self._seen - before if posted.timed else None
        self._drafter.took(tokens, posted.drafted, seconds)
        self.done = finished
        for token in tokens:
            if self._give(token):
                self.done = True
                return

    def _give(self, token: int) -> bool:
        """A token to whoever listens; whether it is the last."""
        self.tokens.append(token)
        ended = len(self.tokens) == self._request.max_new
        if self._streamer is None and self._observe is None:
            return ended
        ids = torch.tensor([token], dtype=torch.int64, device="cpu")
        if self._streamer is not None:
            self._streamer.put(ids)
        return (self._observe is not None and bool(self._observe(ids).cpu().all())) or ended

    def advance(self) -> None:
        """Queue a step, a verification where drafts pay, and take the report of the one before."""
        if self._left < 1:
            self.take()
            return
        count = self._plan()
        if count and self._drafter.waits and self._posted:
            while self._posted:
                self.take()
            count = 0 if self.done else self._plan()
        if self.done:
            return
        self._queue(count)
        while len(self._posted) > (0 if count and self._drafter.waits else 1):
            self.take()

    @property
    def _left(self) -> int:
        """Tokens to come when every step on its way brings one."""
        return self._request.max_new - len(self.tokens) - len(self._posted)

    def _plan(self) -> int:
        """Drafts of the next step."""
        room = room_for_drafts(
            done=len(self.tokens),
            limit=self._request.max_new,
            prompt=self._request.lengths[0],
            max_len=self._session.max_len,
            in_flight=[posted.drafted for posted in self._posted],
        )
        return self._drafter.plan(room, len(self._posted))

    def _queue(self, count: int) -> None:
        if not self._posted:
            self._seen = time.perf_counter()
        if count:
            known = self._drafter.queue(count)
            self._counts.verified += 1
        else:
            key = (self._way, 1)
            known = self._session.is_recorded(key)
            self._session.advance(*key)
            self._counts.steps += 1
        if not known:  # recording took its time while the step before ran
            for posted in self._posted:
                posted.timed = False
        self.post(count, timed=known)


def run_speculative(
    session: Session,
    request: Request,
    drafter: Drafter,
    streamer: Streamer | None = None,
    *,
    observe: Observe | None = None,
    counts: Counts | None = None,
) -> torch.Tensor:
    """All new tokens of a request of one row, int64 ``[1, new]``: those of ``run_steps``."""
    run = _Run(session, request, drafter, streamer, observe, counts or Counts())
    session.fill(request)
    session.step.draw(way_of(request.sampling))
    run.post(0, timed=False)
    while not run.done:
        run.advance()
    device = session.state.tokens.device
    return torch.tensor([run.tokens], dtype=torch.int64, device="cpu").to(device)
