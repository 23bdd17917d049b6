"""Server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import ApiError
from .exchange import Exchange, Gone

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
Events = AsyncGenerator[dict[str, Any], None]


def event(data: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + dumps(data) + b"\n\n"


def dumps(data: dict[str, Any]) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


class EventStream(Response):
    """Sends events as they come, then ``[DONE]``; an error on the way is an event too."""

    media_type = "text/event-stream"

    def __init__(self, first: dict[str, Any], events: Events, exchange: Exchange) -> None:
        self.status_code, self.background = 200, None
        self._first, self._events, self._exchange = first, events, exchange
        self.init_headers(HEADERS)

    @classmethod
    async def begin(cls, exchange: Exchange, events: Events) -> EventStream:
        """Wait for the first event, so that what fails before it has a status of its own.

        Raises:
            ApiError: the request cannot be queued or has failed.
            Gone: the client has left.
        """
        exchange.open()
        try:
            first = await anext(events)
        except BaseException:
            exchange.close()
            raise
        return cls(first, events, exchange)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send(_body(event(self._first)))
            async for data in self._events:
                await send(_body(event(data)))
            await send(_body(DONE, more=False))
        except ApiError as error:
            await send(_body(event(error.body()) + DONE, more=False))
        except Gone:
            await send(_body(b"", more=False))
        finally:
            self._exchange.close()
            await self._events.aclose()


def _body(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}
