"""Drafts for the engine's answer while it is the only one."""

from __future__ import annotations

import time

from .answer import Answer
from .depth import Depth
from .session import Session
from .speculate import LookupDrafter
from .verify import MOST


class Alone:
    """Feeds one answer's tokens to its drafter, and tells it what steps take."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._depth = Depth()
        self._answer: Answer | None = None
        self._drafter: LookupDrafter | None = None
        self._fed = 0
        self._drafted = 0
        self._since: float | None = None

    def drafts(self, answer: Answer, max_len: int) -> list[int]:
        """Tokens worth verifying behind those that the host has seen."""
        if answer.mask is not None or answer.sampling.logprobs or not answer.tokens:
            return []
        if answer is not self._answer or self._drafter is None:
            self._answer, self._since = answer, None
            self._drafter = LookupDrafter([*answer.prompt, *answer.tokens], self._depth)
            self._fed = len(answer.tokens)
        for token in answer.tokens[self._fed :]:
            self._drafter.took([token], 0, None)
        self._fed = len(answer.tokens)
        done = len(answer.tokens)
        room = min(answer.limit - done - 1, max_len - len(answer.prompt) - done - MOST)
        return self._drafter.draft(room) if room > 0 else []

    def verify(self, answer: Answer, drafts: list[int]) -> None:
        """Queue the verification of ``drafts``."""
        known = self._session.verifier.recorded(len(drafts), answer.way)
        self._drafted, self._since = len(drafts), time.perf_counter() if known else None
        self._session.verifier.run(drafts, answer.way)

    def took(self, answer: Answer, tokens: list[int]) -> None:
        """A report of ``tokens`` has come."""
        now, before = time.perf_counter(), self._since
        self._since = now
        drafted, self._drafted = self._drafted, 0
        if answer is self._answer and self._drafter is not None:
            seconds = None if before is None else now - before
            self._drafter.took(tokens, drafted, seconds)
            self._fed += len(tokens)

    def interrupt(self) -> None:
        """Others run too: times say nothing of a step alone."""
        self._answer, self._since, self._drafted = None, None, 0
