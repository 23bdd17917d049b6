"""A streaming HTTP client of the standard library alone, for measuring and abusing a server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

JSON = b"application/json"


@dataclass
class Answer:
    """What came back.

    Attributes:
        start: before the connection is opened, on ``time.perf_counter`` as all times.
        connected: the connection is open, and the request not yet written.
        status: of HTTP; 0 when the connection ended before one came.
        times: of each piece of text.
        text: all pieces, of the first choice.
        error: code of an error object, in a stream or alone.
        whole: whether a stream ended as it should.
    """

    start: float = 0.0
    connected: float = 0.0
    end: float = 0.0
    status: int = 0
    times: list[float] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    error: str | None = None
    whole: bool = False
    tokens: int = 0

    @property
    def first_s(self) -> float:
        """From before the connection to the first piece."""
        return self.times[0] - self.start

    def rate(self, tokens: int) -> float:
        """Tokens a second behind the first, of an answer of so many.

        Raises:
            RuntimeError: all text came at once, as where no token has a whole character.
        """
        if len(self.times) < 2:
            raise RuntimeError(
                f"rate: text must come in at least 2 pieces, got {len(self.times)} for {tokens} "
                "tokens; ask for more tokens"
            )
        return (tokens - 1) / (self.times[-1] - self.times[0])

    def take(self, data: dict[str, Any]) -> None:
        """An event of a stream, or a whole answer."""
        if data.get("error"):
            self.error = str(data["error"].get("code"))
            return
        if data.get("usage"):
            self.tokens = data["usage"]["completion_tokens"]
        for choice in data.get("choices", ()):
            piece = choice.get("text") or ""
            if choice["index"] == 0:
                self.text += piece
                self.finish = choice["finish_reason"] or self.finish
                if piece:
                    self.times.append(time.perf_counter())


def request_bytes(
    path: str, body: bytes, *, key: str | None = None, content_type: bytes = JSON
) -> bytes:
    """A POST that ends its connection."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode()
    if key is not None:
        head += f"Authorization: Bearer {key}\r\n".encode()
    head += b"Content-Type: " + content_type + b"\r\nContent-Length: %d\r\n\r\n" % len(body)
    return head + body


async def ask(
    port: int,
    body: dict[str, Any] | bytes,
    *,
    path: str = "/v1/completions",
    key: str | None = None,
    leave_after: int | None = None,
    pause_s: float = 0.0,
) -> Answer:
    """Send a request and read its answer.

    Args:
        body: of a completion; bytes go as they are.
        leave_after: close the connection behind so many pieces.
        pause_s: wait so long between two reads.
    """
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = Answer(start=time.perf_counter())
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return answer
    answer.connected = time.perf_counter()
    try:
        writer.write(request_bytes(path, data, key=key))
        await writer.drain()
        await _read(reader, answer, leave_after, pause_s)
    except (OSError, asyncio.IncompleteReadError, ValueError):
        pass  # the answer tells how far it came
    finally:
        answer.end = time.perf_counter()
        writer.close()
    return answer


async def _read(
    reader: asyncio.StreamReader, answer: Answer, leave_after: int | None, pause_s: float
) -> None:
    answer.status = int((await reader.readline()).split()[1])
    headers: dict[bytes, bytes] = {}
    while (line := (await reader.readline()).strip()) != b"":
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    if not headers.get(b"content-type", b"").startswith(b"text/event-stream"):
        length = int(headers.get(b"content-length", b"0"))
        found = await reader.readexactly(length)
        if headers.get(b"content-type", b"").startswith(JSON):
            answer.take(json.loads(found))
        answer.whole = True
        return
    async for event in _events(reader):
        if event == b"[DONE]":
            answer.whole = True
            continue
        answer.take(json.loads(event))
        if leave_after is not None and len(answer.times) >= leave_after:
            return
        if pause_s:
            await asyncio.sleep(pause_s)


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Events of a chunked body."""
    rest = b""
    while size := int((await reader.readline()).strip() or b"0", 16):
        rest += await reader.readexactly(size)
        await reader.readexactly(2)
        *events, rest = rest.split(b"\n\n")
        for event in events:
            yield event.removeprefix(b"data: ")
