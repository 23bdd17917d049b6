"""What every request passes before the application: host, key, content type, size and time."""

from __future__ import annotations

import hashlib
import hmac
import time
import uuid
from collections.abc import Iterable
from typing import Any

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .config import ServerConfig
from .errors import ApiError
from .metrics import Metrics
from .worker import closed

OPEN = frozenset({"/", "/health", "/ready"})
POSTS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"})
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Keys:
    """API keys; a comparison takes the same time whichever key is wrong and how."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find(self, given: str) -> int | None:
        """Number of the key that ``given`` is; None when it is none."""
        digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
        found = None
        for index, known in enumerate(self._digests):
            if hmac.compare_digest(known, digest):
                found = index
        return found


class Bodies:
    """Requests whose bodies are on their way, each within the same time.

    ``close`` ends the wait for all of them: a server that takes no more work needs no more bodies.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._waiting: set[anyio.CancelScope] = set()
        self._closed = False

    def close(self) -> None:
        """They fail with 503, and so does what comes later."""
        self._closed = True
        for scope in self._waiting:
            scope.cancel()

    @property
    def waiting(self) -> int:
        """How many have not come yet."""
        return len(self._waiting)

    def deadline(self) -> float:
        """Of a body that is asked for now."""
        return anyio.current_time() + self._patience_s

    async def receive(self, receive: Receive, deadline: float) -> Message:
        """The next part of a body.

        Raises:
            ApiError: 408 when it is late, 503 when nobody waits for it any more.
        """
        if self._closed:
            raise closed("draining")
        with anyio.CancelScope(deadline=deadline) as scope:
            self._waiting.add(scope)
            try:
                return await receive()
            finally:
                self._waiting.discard(scope)
        if self._closed:
            raise closed("draining")
        raise ApiError(408, "The body did not arrive in time", headers={"Connection": "close"})


class Gate:
    """ASGI middleware; puts the client's identity into ``request.state.client``."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        config: ServerConfig,
        metrics: Metrics,
        paths: frozenset[str],
        bodies: Bodies,
    ) -> None:
        self._app, self._config, self._metrics, self._paths = app, config, metrics, paths
        self._bodies = bodies
        self._keys = Keys(config.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        marked = _Marked(send, self._metrics, self._endpoint(scope["path"]))
        try:
            client = self._check(scope)
        except ApiError as error:
            await JSONResponse(error.body(), error.status, error.headers)(scope, receive, marked)
            return
        scope.setdefault("state", {})["client"] = client
        await self._app(scope, self._bounded(receive), marked)

    def _endpoint(self, path: str) -> str:
        return path if path in self._paths else "other"

    def _check(self, scope: Scope) -> tuple[str, Any]:
        headers = Headers(scope=scope)
        config = self._config
        if config.loopback and not self._keys:
            # A page of another origin can resolve its own name to this machine.
            name = headers.get("host", "localhost").rsplit(":", 1)[0]
            if name not in LOCAL_NAMES and headers.get("host") not in LOCAL_NAMES:
                raise ApiError(421, f"Host must be one of {sorted(LOCAL_NAMES)}, got {name[:80]!r}")
        client: tuple[str, Any] = ("host", (scope.get("client") or ("", 0))[0])
        if self._keys and scope["path"] not in OPEN:
            index = self._keys.find(_bearer(headers.get("authorization", "")))
            if index is None:
                raise ApiError(
                    401,
                    "Incorrect API key provided; send it as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            client = ("key", index)
        if scope["method"] == "POST":
            self._check_body(headers)
        return client

    def _check_body(self, headers: Headers) -> None:
        # Also what keeps pages of other origins out: they cannot send this type unasked.
        kind = headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"Content-Type must be application/json, got {kind[:80]!r}")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._config.max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        limit = self._config.max_body_bytes
        return ApiError(
            413,
            f"The body must have at most {limit} bytes",
            code="request_too_large",
            headers={"Connection": "close"},
        )

    def _bounded(self, receive: Receive) -> Receive:
        """``receive`` until the body is whole, within its limits of size and time."""
        deadline = self._bodies.deadline()
        taken, whole = 0, False

        async def bounded() -> Message:
            nonlocal taken, whole
            if whole:
                return await receive()
            message = await self._bodies.receive(receive, deadline)
            taken += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if taken > self._config.max_body_bytes:
                raise self._too_large()
            return message

        return bounded


class _Marked:
    """``send`` that counts answers and gives each an id."""

    def __init__(self, send: Send, metrics: Metrics, endpoint: str) -> None:
        self._send, self._metrics, self._endpoint = send, metrics, endpoint
        self._start = time.monotonic()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = f"req_{uuid.uuid4().hex}"
            headers["X-Content-Type-Options"] = "nosniff"
            self._metrics.requests.labels(self._endpoint, str(message["status"])).inc()
        elif self._endpoint in POSTS and not message.get("more_body", False):
            self._metrics.request_seconds.observe(time.monotonic() - self._start)
        await self._send(message)


def _bearer(header: str) -> str:
    kind, _, key = header.partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""
