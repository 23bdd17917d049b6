"""Steps of the engine whose tokens the host has not read."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .answer import Answer
from .generation import TokenLogprob
from .logprobs import Logprobs
from .report import Reports
from .session import Session
from .verify import Verifier

REPORTS = 4  # the step that runs, the one before, and first tokens in between
LOGPROBS, DRAFTS = 0, 1  # what a report brings along


@dataclass(frozen=True)
class News:
    """Tokens of one answer, in order; log-probabilities are of the last, which is the only one.

    ``drafted``: of a step that verified so many drafts.
    """

    answer: Answer
    tokens: list[int]
    drafted: int = 0
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


class Outbox:
    """Reports in the order in which the device makes them."""

    def __init__(self, session: Session, slots: int, *, drafts: bool) -> None:
        """With ``drafts`` steps may be verifications."""
        self._logprobs = Logprobs(session.step)
        beside = [self._logprobs.bytes, *([session.verifier.bytes] if drafts else [])]
        self._reports = Reports(session.state.report, slots, REPORTS, beside)
        self._posted: deque[tuple[list[tuple[int, Answer]], int]] = deque()

    def __len__(self) -> int:
        return len(self._posted)

    @property
    def drafted(self) -> list[int]:
        """Drafts of each step that is not taken."""
        return [drafted for _, drafted in self._posted]

    def post(self, rows: list[tuple[int, Answer]], part: slice, drafted: int = 0) -> None:
        """Behind a choice in the rows ``part``, which ``rows`` belong to; or behind the
        verification of ``drafted`` drafts in the first."""
        beside = DRAFTS if drafted else None
        if any(answer.sampling.logprobs for _, answer in rows):
            self._logprobs.run(part)
            beside = LOGPROBS
        self._reports.post(beside=beside)
        for _, answer in rows:
            answer.unread += 1
        self._posted.append((rows, drafted))

    def take(self) -> list[News]:
        """Wait for the oldest report; what it says of answers that are still open."""
        rows, drafted = self._pop()
        self._reports.take()
        chosen, drafts = self._reports.chosen(), []
        if drafted:
            count = self._reports.accepted() - 1
            drafts = Verifier.drafts(self._reports.brought(DRAFTS))[:count]
        return [
            News(answer, [*drafts, chosen[row]], drafted, *self._read_logprobs(answer, row))
            for row, answer in rows
            if not answer.closed
        ]

    def skip_closed(self) -> None:
        """Pass over the oldest reports that nobody wants, without waiting for the device."""
        while self._posted and all(answer.closed for _, answer in self._posted[0][0]):
            self._pop()
            self._reports.skip()

    def _pop(self) -> tuple[list[tuple[int, Answer]], int]:
        rows, drafted = self._posted.popleft()
        for _, answer in rows:
            answer.unread -= 1
        return rows, drafted

    def clear(self) -> None:
        """Forget what was posted."""
        while self._posted:
            self._pop()
        self._reports.begin()

    def _read_logprobs(
        self, answer: Answer, row: int
    ) -> tuple[float | None, tuple[TokenLogprob, ...]]:
        if not answer.sampling.logprobs:
            return None, ()
        chosen, ids, values = self._logprobs.split(self._reports.brought(LOGPROBS))
        count = answer.sampling.top_logprobs
        pairs = zip(ids[row, :count].tolist(), values[row, :count].tolist(), strict=True)
        return float(chosen[row]), tuple(TokenLogprob(i, value) for i, value in pairs)
