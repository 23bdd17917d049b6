"""One sequence with drafts: the tokens of plain steps, several at a time where drafts come true."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from .controls import way_of
from .depth import WIDTHS, Depth
from .lookup import Lookup
from .request import Request
from .run import Observe, Streamer
from .session import Session
from .verify import MOST, Verifier


class Counts:
    """What speculation did, over all requests of a loop."""

    def __init__(self) -> None:
        self.steps = self.verified = self.drafted = self.accepted = 0


class Drafter(Protocol):
    """Proposes tokens, and learns what became of them."""

    def plan(self, room: int) -> int:
        """How many drafts to verify now, at most ``room``; 0 for a plain step."""

    def queue(self, count: int) -> bool:
        """Queue the verification of the drafts planned; whether it had been recorded before."""

    def took(self, tokens: list[int], drafted: int, seconds: float | None) -> None:
        """The next ``tokens``, of a step that verified ``drafted`` (0: a plain one).

        ``seconds`` since the step before, None where that says nothing of its cost.
        """


class LookupDrafter:
    """Drafts from the sequence itself, where the last tokens have occurred before."""

    def __init__(self, ids: list[int], depth: Depth) -> None:
        self._lookup, self._depth = Lookup(ids), depth

    def draft(self, room: int) -> list[int]:
        """Tokens to verify now, at most ``room``; none for a plain step."""
        if self._lookup.strength == 0:
            return []
        return self._lookup.draft(self._depth.choose(self._lookup.strength, room))

    def took(self, tokens: list[int], drafted: int, seconds: float | None) -> None:
        """See ``Drafter``."""
        strength = self._lookup.strength
        if drafted:
            self._depth.saw_verified(strength, drafted, min(len(tokens) - 1, drafted))
        for token in tokens:
            before = self._lookup.strength
            hit = self._lookup.add(token)
            if not drafted and hit is not None:
                self._depth.saw(before, hit)
        if seconds is not None:
            width = 1 if not drafted else next(w for w in WIDTHS if w > drafted)
            self._depth.took(width, seconds)


class FromLookup:
    """A ``LookupDrafter`` on a session."""

    def __init__(self, session: Session, way: str, lookup: LookupDrafter) -> None:
        self._session, self._way, self._lookup = session, way, lookup
        self._drafts: list[int] = []
        self.took = lookup.took

    def plan(self, room: int) -> int:
        """See ``Drafter``."""
        self._drafts = self._lookup.draft(room)
        return len(self._drafts)

    def queue(self, count: int) -> bool:
        """See ``Drafter``."""
        verifier, drafts = self._session.verifier, self._drafts[:count]
        known = verifier.recorded(count, self._way)
        verifier.run(drafts, self._way)
        return known


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
        # Drafts of every step whose report is not taken; reports bring the drafts along.
        self._posted: list[int] = []
        self._reports = session.verifier.reports
        self._reports.begin()
        self._seen = time.perf_counter()
        self._timed = False
        self.tokens: list[int] = []
        self.done = False

    def post(self, drafted: int) -> None:
        self._reports.post(beside=drafted > 0)
        self._posted.append(drafted)

    def take(self) -> None:
        """Read the oldest report: one token, or those that a verification appended."""
        reports, drafted = self._reports, self._posted.pop(0)
        finished = reports.take()
        now = time.perf_counter()
        last, count = reports.chosen()[0], reports.accepted() if drafted else 1
        if self.done:
            return
        tokens = [last]
        if drafted:
            tokens = [*Verifier.drafts(reports.brought(), count - 1), last]
        self._drafter.took(tokens, drafted, now - self._seen if self._timed else None)
        self._seen, self._timed = now, True
        self._counts.drafted += drafted
        self._counts.accepted += count - 1
        self.done = finished
        for token in tokens:
            if self._give(token):
                self.done = True
                return

    def _give(self, token: int) -> bool:
        """A token to whoever listens; whether it is the last."""
        self.tokens.append(token)
        ids = torch.tensor([token], dtype=torch.int64, device="cpu")
        if self._streamer is not None:
            self._streamer.put(ids)
        ended = self._observe is not None and bool(self._observe(ids).cpu().all())
        return ended or len(self.tokens) == self._request.max_new

    def advance(self) -> None:
        """A verification when there are drafts, else a plain step, with one step on the way."""
        room = min(
            self._request.max_new - len(self.tokens) - 1,
            self._session.max_len - self._request.lengths[0] - len(self.tokens) - MOST,
        )
        if room > 0 and self._drafter.plan(room):
            while self._posted:  # a step is on its way, and drafts go on from its token
                self.take()
            room = min(room, self._request.max_new - len(self.tokens) - 1)
            count = 0 if self.done or room < 1 else self._drafter.plan(room)
            if count:
                self._verify(count)
                return
        if self.done:
            return
        if self._request.max_new > len(self.tokens) + len(self._posted):
            key = (self._way, 1)
            self._timed &= self._session.is_recorded(key)
            self._session.advance(*key)
            self._counts.steps += 1
            self.post(0)
        while len(self._posted) > 1:
            self.take()
        if self._posted and len(self.tokens) + len(self._posted) >= self._request.max_new:
            self.take()

    def _verify(self, count: int) -> None:
        self._seen = time.perf_counter()
        known = self._drafter.queue(count)
        self._counts.verified += 1
        self.post(count)
        self._timed = known
        self.take()


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
    run.post(0)
    run.take()
    while not run.done:
        run.advance()
    device = session.state.tokens.device
    return torch.tensor([run.tokens], dtype=torch.int64, device="cpu").to(device)
