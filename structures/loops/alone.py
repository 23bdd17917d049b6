"""Drafts for the engine's answer while it is the only one."""

from __future__ import annotations

import time
from collections import deque

import torch

from .answer import Answer
from .depth import Yields, room_for_drafts
from .lookup import Watch
from .session import Session


class Alone:
    """Decides the steps of one answer and queues those that verify drafts.

    ``plan`` comes before every step of the answer, ``took`` with every report of its tokens.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._yields = Yields()
        self._answer: Answer | None = None
        self._watch: Watch | None = None
        self._since: float | None = None
        self._timed: deque[bool] = deque()  # of steps on their way

    def plan(self, answer: Answer, max_len: int, in_flight: list[int]) -> int:
        """Drafts to verify in the next step, 0 for a plain one.

        ``in_flight`` are the drafts of steps whose reports have not come.
        """
        if answer.mask is not None or answer.sampling.logprobs:
            return 0
        if answer is not self._answer or self._watch is None:
            self._answer, self._since = answer, None
            self._watch = Watch([*answer.prompt, *answer.tokens], self._yields)
            self._timed = deque([False] * len(in_flight))
            prompt = torch.tensor(answer.prompt, dtype=torch.int64, device="cpu")
            self._session.repeats.begin(prompt)
        room = room_for_drafts(
            done=len(answer.tokens),
            limit=answer.limit,
            prompt=len(answer.prompt),
            max_len=max_len,
            in_flight=in_flight,
        )
        if not in_flight:
            self._since = time.perf_counter()
        count = self._watch.choose(room, in_flight=len(in_flight))
        known = self._session.is_recorded((answer.way, 1))
        if count:
            known = self._session.repeats.queue(count, answer.way)
        if not known:  # recording takes its time while the step before runs
            self._timed = deque([False] * len(self._timed))
        self._timed.append(known)
        return count

    def took(self, answer: Answer, tokens: list[int], drafted: int) -> None:
        """A report of ``tokens`` has come, of a step with so many drafts."""
        now, before = time.perf_counter(), self._since
        self._since = now
        if answer is self._answer and self._watch is not None:
            timed = bool(self._timed) and self._timed.popleft() and before is not None
            seconds = now - before if timed and before is not None else None
            self._watch.took(tokens, drafted, seconds)

    def interrupt(self) -> None:
        """Others run too: times say nothing of a step alone."""
        self._answer, self._watch, self._since = None, None, None
        self._timed.clear()
