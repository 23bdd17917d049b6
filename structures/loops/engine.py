"""A slot engine: up to eight sequences that arrive and leave at any time share captured steps.

Live sequences always fill the first rows of the cache, so that a step of n of them replays a graph
of exactly n rows: a step with eight rows costs more than one with a single row, and one with rows
that nobody reads would read their caches for nothing. Who leaves a gap has the last live row
copied into it, which takes less than a step. The bits of a row do not depend on the others.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from ..catalogue.base import MAX_FUSED_ROWS
from ..kv_format import KVCache
from .alone import Alone
from .answer import Answer, Handle
from .controls import GREEDY, check_controls, widest
from .decode import open_decoder
from .generation import FinishReason, GenerationRequest, TokenEvent
from .joining import Joining, Pace
from .outbox import News, Outbox
from .request import integer
from .sampling import SEEDS
from .session import Session
from .sessions import LoopRefused, Sessions, decoder_device, plain_tensors, token_table

MAX_SLOTS = MAX_FUSED_ROWS
WHERE = "Engine.submit"
MASK_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


class Engine:
    """Generates for many requests at once; made by ``decode_engine``.

    ``submit`` and ``cancel`` may be called from any thread and do not wait. One thread at a time
    calls ``step``.
    """

    def __init__(
        self, model: Any, sessions: Sessions, *, max_len: int, slots: int, draft: str | None
    ) -> None:
        self.max_len, self.slots, self.draft = max_len, slots, draft
        self._model, self._sessions = model, sessions
        self._vocabulary = token_table(model, sessions.spec).shape[0]
        self._device = decoder_device(model, sessions.spec)
        self._inbox: deque[Answer] = deque()
        self._waiting: deque[Answer] = deque()
        self._joining: deque[Joining] = deque()
        self._pace = Pace.of(self._device)
        self._live: list[Answer | None] = []
        self._events: list[TokenEvent] = []  # not returned yet
        self._outbox: Outbox | None = None
        self._alone: Alone | None = None
        self._stepping = threading.Lock()
        self._session: Session | None = None
        with plain_tensors(self._device):
            self._open_session([])

    def submit(self, request: GenerationRequest) -> Handle:
        """Queue a request; its events come from ``step``.

        Raises:
            ValueError: an id outside the vocabulary, or a prompt that leaves no room for
                ``max_new_tokens`` in ``max_len``.
        """
        prompt, ids = request.prompt_ids, [*request.prompt_ids, *request.sampling.logit_bias]
        if max(ids) >= self._vocabulary:
            raise ValueError(
                f"{WHERE}: ids must be from 0 to {self._vocabulary - 1}, got {max(ids)}"
            )
        room = self.max_len - len(prompt)
        limit = room if request.max_new_tokens is None else request.max_new_tokens
        if limit > room or room < 1:
            raise ValueError(
                f"{WHERE}: prompt and max_new_tokens must fit max_len = {self.max_len}, got "
                f"{len(prompt)} + {max(limit, 1)}"
            )
        given = request.stop_token_ids
        stops = self.default_stops() if given is None else given
        check_controls(WHERE, request.sampling, stops)
        handle, drawn = Handle(request), secrets.randbelow(SEEDS)
        self._inbox.extend(Answer(handle, i, limit, stops, drawn) for i in range(request.n))
        return handle

    def default_stops(self) -> tuple[int, ...]:
        """The model's own end tokens."""
        given = getattr(getattr(self._model, "generation_config", None), "eos_token_id", None)
        if given is None:
            return ()
        return tuple(given) if isinstance(given, Sequence) else (int(given),)

    def cancel(self, handle: Handle, index: int | None = None) -> None:
        """End a request, or one of its answers.

        The next ``step`` reports "cancelled", and nothing more of it.

        Raises:
            ValueError: an answer that the request does not have.
        """
        n = handle.request.n
        if index is not None and not 0 <= index < n:
            raise ValueError(f"Engine.cancel: index must be 0 to {n - 1}, got {index}")
        handle.cancelled |= {*range(n)} if index is None else {index}

    def warm_up(self) -> None:
        """Record what requests would record on their way: every step, and prompts up to 256.

        Raises:
            RuntimeError: something is queued or running.
        """
        if not self.idle:
            raise RuntimeError("Engine.warm_up: the engine must be idle, got requests in it")
        with self._stepping, plain_tensors(self._device):
            self._open_session([])
            assert self._session is not None
            self._session.warm_up(repeats=self.draft is not None)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or running that somebody waits for."""
        return not (self.waiting or self.running or self._outbox or self._events)

    @property
    def running(self) -> int:
        """Sequences in the cache."""
        return sum(a is not None for a in self._live) + len(self._joining)

    @property
    def waiting(self) -> int:
        """Answers that have no slot yet."""
        return len(self._inbox) + len(self._waiting)

    @property
    def graphs_recorded(self) -> int:
        """Graphs recorded for the cache that is in use now."""
        return 0 if self._session is None else self._session.pool.recorded

    def step(self) -> list[TokenEvent]:
        """Advance every sequence by a token, and the next prompt by a chunk.

        Returns:
            The events since the last call, in order. The device may be a step ahead of them.

        Raises:
            Exception: whatever interrupts it, such as ``KeyboardInterrupt``. What ran then has
                ended with "error", which the next call returns; what has no row yet goes on there.
        """
        if not self._stepping.acquire(blocking=False):
            raise RuntimeError("Engine.step: one thread at a time may step, got a second one")
        try:
            with plain_tensors(self._device):
                self._step(self._events)
        except BaseException as error:  # the rows and what is known of them may disagree
            self._give_up(error, self._events)
            raise
        else:
            events, self._events = self._events, []
            return events
        finally:
            self._stepping.release()

    def _step(self, events: list[TokenEvent]) -> None:
        while self._inbox:
            self._waiting.append(self._inbox.popleft())
        if self._session is not None:
            self._session.pool.join()
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
        for answer in [a for a in self._waiting if a.cancelled]:
            self._waiting.remove(answer)
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
            if self._session is not None and answer.epoch == self._session.prefixes.epoch:
                self._session.prefixes.hold(row, (*answer.prompt, *answer.tokens[:-1]))

    def _close_gaps(self) -> None:
        live = self._live
        while live:
            if live[-1] is None:
                live.pop()
                continue
            if None not in live:
                return
            gap, answer = live.index(None), live[-1]
            assert self._session is not None
            self._session.move_row(len(live) - 1, gap, len(answer.prompt) + len(answer.tokens) + 1)
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
        while self._waiting and len(self._live) + len(self._joining) < self.slots:
            reading = [joining.answer.prompt for joining in self._joining]
            # The same prompt is read once: the next one finds it, with its logits.
            answer = next((a for a in self._waiting if a.prompt not in reading), None)
            if answer is None:
                return
            try:
                self._open_session(events)
            except LoopRefused as reason:
                self._waiting.remove(answer)
                self._close(answer, "error", events, error=reason)
                continue
            assert self._session is not None
            taken = {joining.row for joining in self._joining}
            free = [row for row in range(len(self._live), self.slots) if row not in taken]
            self._joining.append(Joining.begin(self._session, answer, free))
            self._waiting.remove(answer)

    def _choose(self, joining: Joining) -> None:
        known = self.draft is not None or joining.session.step.controls is not None
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
        session = self._session
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
            self._give_up(error, events)
            return False
        return True

    def _verify(self, rows: list[tuple[int, Answer]]) -> bool:
        """Several tokens at once for an answer that is alone, where drafts of it pay."""
        alone, outbox = self._alone, self._outbox
        if alone is None or outbox is None:
            return False
        if len(self._live) > 1 or self._joining or self._waiting:
            alone.interrupt()
            return False
        drafted = alone.plan(rows[0][1], self.max_len, outbox.drafted)
        if drafted:
            outbox.post(rows, slice(0, 1), drafted)
        return drafted > 0

    def _give_up(self, error: BaseException, events: list[TokenEvent]) -> None:
        """End all that runs; prompts that are being read begin again."""
        for answer in [a for a in self._live if a is not None and not a.closed]:
            self._close(answer, "error", events, error=error)
        self._live.clear()
        if self._session is not None and self._outbox is not None:
            self._outbox.clear()
            self._session.prefixes.forget()
        if self._alone is not None:
            self._alone.interrupt()
        begun = [joining.answer for joining in self._joining if not joining.answer.closed]
        for answer in reversed([a for a in begun if a not in self._waiting]):
            answer.filled = 0
            self._waiting.appendleft(answer)
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

    def _open_session(self, events: list[TokenEvent]) -> None:
        """Get the session, which is another one when the model's tensors have moved."""
        with self._sessions.use(self.slots, self.max_len) as session:
            if session is self._session:
                return
        moved = RuntimeError("the model's weights were moved or replaced while it generated")
        if self._session is not None:
            self._give_up(moved, events)
        drafts = self.draft is not None
        self._session, self._outbox = session, Outbox(session, self.slots, drafts=drafts)
        self._alone = Alone(session) if drafts else None


def decode_engine(
    model: Any,
    *,
    max_len: int,
    slots: int = MAX_SLOTS,
    draft: str | None = None,
    kv_cache: KVCache = None,
) -> Engine:
    """An engine that generates from ``model`` for up to ``slots`` sequences at a time.

    Args:
        model: as for ``decode_loop``.
        max_len: most positions of a sequence, prompt and answer together.
        slots: most sequences in the cache, 1 to 8.
        draft: "lookup" as for ``decode_loop``, for an answer while it is the only one.
        kv_cache: as for ``decode_loop``.

    Raises:
        ValueError, TypeError: as ``decode_loop`` does.
        LoopRefused: the device has no memory for the cache.
    """
    max_len = integer("decode_engine", "max_len", max_len)
    slots = integer("decode_engine", "slots", slots)
    if not 1 <= slots <= MAX_SLOTS:
        raise ValueError(f"decode_engine: slots must be 1 to {MAX_SLOTS}, got {slots}")
    if draft not in (None, "lookup"):
        found = repr(draft) if isinstance(draft, str) else type(draft).__name__
        raise ValueError(f'decode_engine: draft must be "lookup" or None, got {found}')
    host, sessions = open_decoder("decode_engine", model, max_len, kv_cache)
    return Engine(host, sessions, max_len=max_len, slots=slots, draft=draft)
