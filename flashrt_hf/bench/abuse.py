"""Load, faults and abuse: clients of every bad kind beside good ones, whose answers are checked.

A good client asks greedily for one of a few prompts, in a stream or not, and must get the text that
the server wrote when it was alone with that prompt. All others must get the status that their fault
deserves, and leave no trace.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from .http_client import Answer, ask

PROMPTS = 24
OVERSIZE_BYTES = 200_000


@dataclass
class Report:
    """What happened.

    Attributes:
        kinds: requests of each kind.
        wrong: what must not have been, in words.
        statuses: answers by kind and status.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)

    def note(self, kind: str, answer: Answer, *, right: bool) -> None:
        """Count an answer, and keep it where it is wrong."""
        self.kinds[kind] += 1
        self.statuses[f"{kind} {answer.status}"] += 1
        if not right:
            self.wrong.append(
                f"{kind}: status {answer.status}, error {answer.error}, finish {answer.finish}, "
                f"{len(answer.text)} characters"
            )


class Abuse:
    """One run against one server."""

    def __init__(
        self, port: int, *, model: str, key: str, new_tokens: int = 12, seed: int = 0
    ) -> None:
        """The server must have ``key`` and a body limit below ``OVERSIZE_BYTES``."""
        self._port, self._model, self._key = port, model, key
        self._new, self._draw = new_tokens, random.Random(seed)
        self._expected: list[str] = []
        self.report = Report()

    def _body(self, prompt: int, **fields: Any) -> dict[str, Any]:
        ids = [(7 * prompt + 3 * i) % 200 + 20 for i in range(4 + prompt)]
        made = {"model": self._model, "prompt": ids, "max_tokens": self._new, "temperature": 0}
        return made | {"ignore_eos": True, **fields}

    async def learn(self) -> None:
        """What the server answers when nobody else asks.

        Raises:
            RuntimeError: it does not answer.
        """
        self._expected = []
        for prompt in range(PROMPTS):
            answer = await self._ask(self._body(prompt))
            if answer.status != 200:
                raise RuntimeError(f"abuse: the server must answer, got status {answer.status}")
            self._expected.append(answer.text)

    async def run(self, requests: int, clients: int) -> Report:
        """``requests`` from ``clients`` at a time, of kinds drawn at random."""
        left = iter(range(requests))

        async def client() -> None:
            for _ in left:
                kind = self._draw.choices([*WEIGHTS], [*WEIGHTS.values()])[0]
                await KINDS[kind](self, kind)

        await asyncio.gather(*(client() for _ in range(clients)))
        return self.report

    async def check(self) -> None:
        """Every prompt once more, alone."""
        for prompt in range(PROMPTS):
            answer = await self._ask(self._body(prompt))
            self.report.note("after", answer, right=answer.text == self._expected[prompt])

    async def _ask(self, body: dict[str, Any] | bytes, **options: Any) -> Answer:
        return await ask(self._port, body, key=options.pop("key", self._key), **options)

    def _prompt(self) -> int:
        return self._draw.randrange(PROMPTS)

    async def _whole(self, kind: str) -> None:
        prompt = self._prompt()
        answer = await self._ask(self._body(prompt))
        right = answer.status == 200 and answer.text == self._expected[prompt]
        self.report.note(kind, answer, right=right)

    async def _stream(self, kind: str, pause_s: float = 0.0) -> None:
        prompt = self._prompt()
        answer = await self._ask(self._body(prompt, stream=True), pause_s=pause_s)
        right = answer.whole and answer.text == self._expected[prompt]
        self.report.note(kind, answer, right=right)

    async def _slow(self, kind: str) -> None:
        await self._stream(kind, pause_s=self._draw.uniform(0.0, 0.03))

    async def _leave(self, kind: str) -> None:
        count, prompt = self._draw.randrange(self._new), self._prompt()
        body = self._body(prompt, stream=True, max_tokens=100)
        answer = await self._ask(body, leave_after=count + 1)
        start = self._expected[prompt][: len(answer.text)]
        right = answer.status == 200 and answer.text[: len(start)] == start
        self.report.note(kind, answer, right=right)

    async def _leave_unread(self, kind: str) -> None:
        body = self._body(self._prompt(), max_tokens=100)
        delay = self._draw.uniform(0.0, 0.05)
        try:
            answer = await asyncio.wait_for(self._ask(body), delay)
        except (asyncio.TimeoutError, TimeoutError):
            answer = Answer()
        self.report.note(kind, answer, right=answer.status in (0, 200))

    async def _malformed(self, kind: str) -> None:
        body = json.dumps(self._body(self._prompt())).encode()
        broken = self._draw.choice([body[:-1], b"", b"\xff" + body, b"[" * 5000, body + b"}"])
        answer = await self._ask(broken)
        self.report.note(kind, answer, right=answer.status == 400)

    async def _unsupported(self, kind: str) -> None:
        field = self._draw.choice(["best_of", "suffix", "no_such_parameter", "n"])
        answer = await self._ask(self._body(self._prompt(), **{field: 1000}))
        self.report.note(kind, answer, right=answer.status == 400)

    async def _oversize(self, kind: str) -> None:
        answer = await self._ask(self._body(0, user="x" * OVERSIZE_BYTES))
        # A server may hang up on a body that it will not read.
        self.report.note(kind, answer, right=answer.status in (0, 413))

    async def _wrong_key(self, kind: str) -> None:
        key = self._draw.choice([self._key + "x", self._key[:-1], "", "\x7f"])
        answer = await self._ask(self._body(0), key=key)
        self.report.note(kind, answer, right=answer.status in (400, 401))


KINDS: dict[str, Callable[[Abuse, str], Awaitable[None]]] = {
    "whole": Abuse._whole,
    "stream": Abuse._stream,
    "slow reader": Abuse._slow,
    "leaves a stream": Abuse._leave,
    "leaves unread": Abuse._leave_unread,
    "malformed": Abuse._malformed,
    "unsupported": Abuse._unsupported,
    "oversize": Abuse._oversize,
    "wrong key": Abuse._wrong_key,
}
WEIGHTS = dict(zip(KINDS, (4, 4, 2, 3, 2, 2, 1, 1, 1), strict=True))
