"""A slot engine: up to eight sequences that arrive and leave at any time share captured steps."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from ..catalogue.base import MAX_FUSED_ROWS
from ..kv_format import KVCache
from .answer import Answer, Handle
from .controls import check_controls
from .decode import open_decoder
from .generation import GenerationRequest, TokenEvent
from .request import integer
from .sampling import SEEDS
from .scheduler import Scheduler
from .sessions import Sessions, decoder_device, plain_tensors, token_table

MAX_SLOTS = MAX_FUSED_ROWS
WHERE = "Engine.submit"


class Engine:
    """Generates for many requests at once; made by ``decode_engine``.

    ``submit`` and ``cancel`` may be called from any thread and do not wait. One thread at a time
    calls ``step``.
    """

    def __init__(
        self, model: Any, sessions: Sessions, *, max_len: int, slots: int, draft: str | None
    ) -> None:
        self.max_len, self.slots, self.draft = max_len, slots, draft
        self._model = model
        self._vocabulary = token_table(model, sessions.spec).shape[0]
        self._device = decoder_device(model, sessions.spec)
        self._inbox: deque[Answer] = deque()
        self._events: list[TokenEvent] = []  # not returned yet
        self._stepping = threading.Lock()
        with plain_tensors(self._device):
            self._scheduler = Scheduler(
                sessions, self._device, max_len=max_len, slots=slots, drafts=draft is not None
            )

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
            self._scheduler.open_session([])
            assert self._scheduler.session is not None
            self._scheduler.session.warm_up(repeats=self.draft is not None)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or running that somebody waits for."""
        return not (self.waiting or self.running or self._scheduler.expects_reports or self._events)

    @property
    def running(self) -> int:
        """Sequences in the cache."""
        return self._scheduler.running

    @property
    def waiting(self) -> int:
        """Answers that have no slot yet."""
        return len(self._inbox) + len(self._scheduler.waiting)

    @property
    def graphs_recorded(self) -> int:
        """Graphs recorded for the cache that is in use now."""
        session = self._scheduler.session
        return 0 if session is None else session.pool.recorded

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
                while self._inbox:
                    self._scheduler.waiting.append(self._inbox.popleft())
                self._scheduler.step(self._events)
        except BaseException as error:  # the rows and what is known of them may disagree
            self._scheduler.give_up(error, self._events)
            raise
        else:
            events, self._events = self._events, []
            return events
        finally:
            self._stepping.release()


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
