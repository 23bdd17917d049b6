"""One HTTP request while the model works on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

from starlette.requests import Request

from flash_rt.structures.loops.generation import TokenEvent

from .answer import Answer, Piece
from .metrics import Metrics
from .work import Failed, Result, TextWork, Work
from .worker import Worker


class Gone(Exception):
    """The client has closed its connection."""


class Exchange:
    """Work in the queue, and what comes back of it; closing it cancels what has not ended."""

    def __init__(self, worker: Worker, works: Sequence[Work], request: Request) -> None:
        self._worker, self._works, self._request = worker, works, request
        self._events = works[0].events
        self._watch: asyncio.Task[None] | None = None
        self._open = set(works)

    def open(self) -> None:
        """Queue the works.

        Raises:
            ApiError: they cannot be queued.
        """
        self._worker.put(self._works)
        self._watch = asyncio.get_running_loop().create_task(self._watch_connection())

    def close(self) -> None:
        """Cancel what has not ended."""
        if self._watch is not None:
            self._watch.cancel()
        if self._open:
            self._worker.cancel(list(self._open))

    async def _watch_connection(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._events.put_nowait((None, Gone()))

    async def event(self) -> tuple[Work, TokenEvent | Result]:
        """The next event.

        Raises:
            ApiError: the work has failed.
            Gone: nobody waits for the answer.
        """
        work, event = await self._events.get()
        if isinstance(event, Gone):
            raise event
        if isinstance(event, (Failed, Result)):
            self._open.discard(work)
        if isinstance(event, Failed):
            raise event.error
        return work, event

    def ended(self, work: Work) -> None:
        """Nothing more is expected of ``work``."""
        self._open.discard(work)

    def enough(self, work: Work, index: int) -> None:
        """No more of one answer."""
        self._worker.enough(work, index)


class TextExchange(Exchange):
    """Answers to one or several prompts; choice ``i * n + j`` is answer j to prompt i."""

    def __init__(
        self,
        worker: Worker,
        works: Sequence[TextWork],
        answers: Sequence[Answer],
        request: Request,
        metrics: Metrics,
    ) -> None:
        super().__init__(worker, works, request)
        self._answers, self._metrics = answers, metrics
        self._first = {id(work): i * work.request.n for i, work in enumerate(works)}
        self._seen: dict[int, float] = {}
        self._left = set(range(len(answers)))
        self.prompt_tokens = sum(len(work.request.prompt_ids) for work in works)

    @property
    def completion_tokens(self) -> int:
        """Tokens of all answers so far."""
        return sum(answer.tokens for answer in self._answers)

    def usage(self) -> dict[str, int]:
        """As OpenAI counts."""
        prompt, completion = self.prompt_tokens, self.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """What is new, with its choice, until every choice has ended; empty pieces too."""
        self._metrics.prompt_tokens.inc(self.prompt_tokens)
        while self._left:
            work, event = await self.event()
            assert isinstance(event, TokenEvent)
            choice = self._first[id(work)] + event.index
            answer = self._answers[choice]
            if answer.done:
                continue
            self._time(choice, work)
            piece = answer.push(event)
            self._metrics.tokens.inc()
            if piece.finish is not None:
                self._left.discard(choice)
                if event.finish_reason is None:
                    self.enough(work, event.index)
                else:
                    self._end(work)
            yield choice, piece

    def _end(self, work: Work) -> None:
        first = self._first[id(work)]
        assert isinstance(work, TextWork)
        if not self._left & set(range(first, first + work.request.n)):
            self.ended(work)

    def _time(self, choice: int, work: Work) -> None:
        now = time.monotonic()
        before = self._seen.get(choice)
        self._seen[choice] = now
        if before is None:
            self._metrics.first_token_seconds.observe(now - work.arrived)
        else:
            self._metrics.token_seconds.observe(now - before)
