"""The rows of a slot engine: who has one, who waits for one, and what the next step is.

Live sequences always fill the first rows of the cache, so that a step of n of them replays a graph
of exactly n rows: a step with eight rows costs more than one with a single row, and one with rows
that nobody reads would read their caches for nothing. Who leaves a gap has the last live row
copied into it, which takes less than a step. The bits of a row do not depend on the others.
"""

from __future__ import annotations

from collections import deque

import torch

from .alone import Alone
from .answer import Answer
from .controls import GREEDY, widest
from .generation import FinishReason, TokenEvent
from .joining import Joining, Pace
from .outbox import News, Outbox
from .session import Session
from .sessions import LoopRefused, Sessions

MASK_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


class Scheduler:
    """Gives answers rows of the cache and advances them; one thread at a time calls it.

    Attributes:
        session: the cache and its graphs; another one when the model's tensors have moved.
        waiting: answers that have no row yet.
    """

    def __init__(
        self,
        sessions: Sessions,
        device: torch.device,
        *,
        max_len: int,
        slots: int,
        drafts: bool,
    ) -> None:
        self._sessions, self._max_len, self._slots, self._drafts = sessions, max_len, slots, drafts
        self.session: Session | None = None
        self.waiting: deque[Answer] = deque()
        self._joining: deque[Joining] = deque()
        self._pace = Pace.of(device)
        self._live: list[Answer | None] = []
        self._outbox: Outbox | None = None
        self._alone: Alone | None = None
        self.open_session([])

    @property
    def running(self) -> int:
        """Sequences in the cache."""
        return sum(a is not None for a in self._live) + len(self._joining)

    @property
    def expects_reports(self) -> bool:
        """Whether steps are on their way whose tokens somebody waits for."""
        return bool(self._outbox)

    def step(self, events: list[TokenEvent]) -> None:
        """Advance every sequence by a token, and the next prompt by a chunk.

        ``events`` grows by what happened, also where this raises: ``give_up`` then brings the rows
        and what is known of them together again.
        """
        if self.session is not None:
            self.session.pool.join()
        self._drop_cancelled(events)
        self._see_masked(events)
        self._close_gaps()
        self._prefill(events)
        self._see_masked(events)
        launched = self._decode(events)
        self._collect(events, keep=1 if launched else 0)

    def _see_masked(self, events: list[TokenEvent]) -> None:
        """A grammar has to see a token before the next one is chosen."""
        if any(a is not None and a.mask is not None for a in self._live):
            self._collect(events, keep=0)

    def _drop_cancelled(self, events: list[TokenEvent]) -> None:
        for answer in [a for a in self.waiting if a.cancelled]:
            self.waiting.remove(answer)
            self._close(answer, "cancelled", events)
        for joining in [j for j in self._joining if j.answer.cancelled]:
            self._joining.remove(joining)
            joining.leave()
            self._close(joining.answer, "cancelled", events)
        for running in self._live:
            if running is not None and running.cancelled:
                self._close(running, "cancelled", events)

    def _close(
        self,
        answer: Answer,
        reason: FinishReason,
        events: list[TokenEvent],
        *,
        error: BaseException | None = None,
    ) -> None:
        event = TokenEvent(answer.handle, answer.index, None, finish_reason=reason, error=error)
        events.append(event)
        self._leave(answer)

    def _leave(self, answer: Answer) -> None:
        answer.closed = True
        answer.handle.open_answers -= 1
        if answer in self._live:
            row = self._live.index(answer)
            self._live[row] = None
            if self.session is not None and answer.epoch == self.session.prefixes.epoch:
                self.session.prefixes.hold(row, (*answer.prompt, *answer.tokens[:-1]))

    def _close_gaps(self) -> None:
        live = self._live
        while live:
            if live[-1] is None:
                live.pop()
                continue
            if None not in live:
                return
            gap, answer = live.index(None), live[-1]
            assert self.session is not None
            self.session.move_row(len(live) - 1, gap, len(answer.prompt) + len(answer.tokens) + 1)
            live[gap], live[-1] = answer, None

    def _prefill(self, events: list[TokenEvent]) -> None:
        """One chunk of a prompt; the prompts that have a row take turns.

        Behind its last chunk an answer joins the others.
        """
        self._admit(events)
        if not self._joining:
            return
        self._pace.before()
        joining = self._joining[0]
        try:
            whole = joining.read()
            self._pace.behind()
            if whole:
                self._choose(joining)
        except MASK_ERRORS as error:
            self._joining.popleft()
            joining.session.prefixes.drop([joining.row])
            self._close(joining.answer, "error", events, error=error)
            return
        if whole:
            self._join(joining)
            self._joining.popleft()
        else:
            self._joining.rotate(-1)

    def _admit(self, events: list[TokenEvent]) -> None:
        """Rows for those who wait, as far as there are any."""
        while self.waiting and len(self._live) + len(self._joining) < self._slots:
            reading = [joining.answer.prompt for joining in self._joining]
            # The same prompt is read once: the next one finds it, with its logits.
            answer = next((a for a in self.waiting if a.prompt not in reading), None)
            if answer is None:
                return
            try:
                self.open_session(events)
            except LoopRefused as reason:
                self.waiting.remove(answer)
                self._close(answer, "error", events, error=reason)
                continue
            assert self.session is not None
            taken = {joining.row for joining in self._joining}
            free = [row for row in range(len(self._live), self._slots) if row not in taken]
            self._joining.append(Joining.begin(self.session, answer, free))
            self.waiting.remove(answer)

    def _choose(self, joining: Joining) -> None:
        known = self._drafts or joining.session.step.controls is not None
        joining.choose(controlled=known or joining.answer.way != GREEDY)

    def _join(self, joining: Joining) -> None:
        session, answer, row = joining.session, joining.answer, joining.row
        assert self._outbox is not None
        self._outbox.post([(row, answer)], slice(row, row + 1))
        target = len(self._live)
        if row != target:
            session.move_row(row, target, len(answer.prompt))
            for other in self._joining:
                other.row = row if other.row == target else other.row
        self._live.append(answer)

    def _decode(self, events: list[TokenEvent]) -> bool:
        session = self.session
        for row, answer in enumerate(self._live):
            if answer is not None and answer.mask is not None:
                assert session is not None
                try:
                    session.controls.allow(row, answer.mask.allowed())
                except MASK_ERRORS as error:
                    self._close(answer, "error", events, error=error)
        live = [(row, answer) for row, answer in enumerate(self._live) if answer is not None]
        rows = [(row, answer) for row, answer in live if not answer.chosen]
        if not rows:
            return False
        assert session is not None and self._outbox is not None
        try:
            if self._verify(rows):
                return True
            part = slice(0, rows[-1][0] + 1)
            session.advance(widest([answer.way for _, answer in rows]), part.stop)
            self._outbox.post(rows, part)
        except RuntimeError as error:
            self.give_up(error, events)
            return False
        return True

    def _verify(self, rows: list[tuple[int, Answer]]) -> bool:
        """Several tokens at once for an answer that is alone, where drafts of it pay."""
        alone, outbox = self._alone, self._outbox
        if alone is None or outbox is None:
            return False
        if len(self._live) > 1 or self._joining or self.waiting:
            alone.interrupt()
            return False
        drafted = alone.plan(rows[0][1], self._max_len, outbox.drafted)
        if drafted:
            outbox.post(rows, slice(0, 1), drafted)
        return drafted > 0

    def give_up(self, error: BaseException, events: list[TokenEvent]) -> None:
        """End all that runs; prompts that are being read begin again."""
        for answer in [a for a in self._live if a is not None and not a.closed]:
            self._close(answer, "error", events, error=error)
        self._live.clear()
        if self.session is not None and self._outbox is not None:
            self._outbox.clear()
            self.session.prefixes.forget()
        if self._alone is not None:
            self._alone.interrupt()
        begun = [joining.answer for joining in self._joining if not joining.answer.closed]
        for answer in reversed([a for a in begun if a not in self.waiting]):
            answer.filled = 0
            self.waiting.appendleft(answer)
        self._joining.clear()

    def _collect(self, events: list[TokenEvent], *, keep: int) -> None:
        outbox = self._outbox
        if outbox is None:
            return
        outbox.skip_closed()
        while len(outbox) > keep:
            for news in outbox.take():
                if self._alone is not None:
                    self._alone.took(news.answer, news.tokens, news.drafted)
                for token in news.tokens:
                    if not news.answer.closed:
                        self._emit(news, token, events)
            outbox.skip_closed()

    def _emit(self, news: News, token: int, events: list[TokenEvent]) -> None:
        answer = news.answer
        answer.tokens.append(token)
        reason: FinishReason | None = None
        error: BaseException | None = None
        try:
            complete = answer.mask is not None and answer.mask.accept(token)
        except MASK_ERRORS as raised:
            complete, error = True, raised
        if error is not None:
            reason = "error"
        elif complete or token in answer.stops:
            reason = "stop"
        elif len(answer.tokens) == answer.limit:
            reason = "length"
        logprob, likeliest = news.logprob, news.top_logprobs
        event = TokenEvent(answer.handle, answer.index, token, logprob, likeliest, reason, error)
        events.append(event)
        if reason is not None:
            self._leave(answer)

    def open_session(self, events: list[TokenEvent]) -> None:
        """Get the session, which is another one when the model's tensors have moved."""
        with self._sessions.use(self._slots, self._max_len) as session:
            if session is self.session:
                return
        moved = RuntimeError("the model's weights were moved or replaced while it generated")
        if self.session is not None:
            self.give_up(moved, events)
        self.session, self._outbox = session, Outbox(session, self._slots, drafts=self._drafts)
        self._alone = Alone(session) if self._drafts else None
