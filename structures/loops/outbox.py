"""Steps of the engine whose tokens the host has not read."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .answer import Answer
from .generation import TokenLogprob
from .logprobs import Logprobs
from .report import Reports
from .session import Session

REPORTS = 4  # the step that runs, the one before, and first tokens in between


@dataclass(frozen=True)
class News:
    """Tokens of one answer, in order; log-probabilities are of the last, which is the only one."""

    answer: Answer
    tokens: list[int]
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


class Outbox:
    """Reports in the order in which the device makes them."""

    def __init__(self, session: Session, slots: int) -> None:
        self._logprobs = Logprobs(session.step)
        self._reports = Reports(session.state.report, slots, REPORTS, self._logprobs.bytes)
        self._posted: deque[tuple[list[tuple[int, Answer]], list[int]]] = deque()

    def __len__(self) -> int:
        return len(self._posted)

    def post(
        self, rows: list[tuple[int, Answer]], part: slice, drafts: list[int] | None = None
    ) -> None:
        """Behind a choice in the rows ``part``, which ``rows`` belong to; or behind the
        verification of ``drafts`` in the first."""
        wanted = any(answer.sampling.logprobs for _, answer in rows)
        if wanted:
            self._logprobs.run(part)
        self._reports.post(beside=wanted)
        for _, answer in rows:
            answer.unread += 1
        self._posted.append((rows, drafts or []))

    def take(self) -> list[News]:
        """Wait for the oldest report; what it says of answers that are still open."""
        rows, drafts = self._pop()
        self._reports.take()
        chosen = self._reports.chosen()
        count = self._reports.accepted() - 1 if drafts else 0
        return [
            News(answer, [*drafts[:count], chosen[row]], *self._read_logprobs(answer, row))
            for row, answer in rows
            if not answer.closed
        ]

    def skip_closed(self) -> None:
        """Pass over the oldest reports that nobody wants, without waiting for the device."""
        while self._posted and all(answer.closed for _, answer in self._posted[0][0]):
            self._pop()
            self._reports.skip()

    def _pop(self) -> tuple[list[tuple[int, Answer]], list[int]]:
        rows, drafts = self._posted.popleft()
        for _, answer in rows:
            answer.unread -= 1
        return rows, drafts

    def clear(self) -> None:
        """Forget what was posted."""
        self._posted.clear()
        self._reports.begin()

    def _read_logprobs(
        self, answer: Answer, row: int
    ) -> tuple[float | None, tuple[TokenLogprob, ...]]:
        if not answer.sampling.logprobs:
            return None, ()
        chosen, ids, values = self._logprobs.split(self._reports.brought())
        count = answer.sampling.top_logprobs
        pairs = zip(ids[row, :count].tolist(), values[row, :count].tolist(), strict=True)
        return float(chosen[row]), tuple(TokenLogprob(i, value) for i, value in pairs)
