"""uvicorn around the application: slow clients are dropped, SIGTERM ends streams properly."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import logging
import math
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .app import Server
from .config import ServerConfig
from .worker import LAST_STEP_SECONDS

log = logging.getLogger("flash_rt.server")

MAX_CONNECTIONS = 1024
FLUSH_SECONDS = 0.5  # for the last events, as far as clients read them
SWITCH_SECONDS = 0.0005  # the worker must get the interpreter back well within a token


class Protocol(H11Protocol):
    """HTTP/1.1 that gives up on a client which sends half a request or does not read its answer."""

    limits: ServerConfig
    cycle: Any
    _head: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Wait for a request."""
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """A request's head must be whole in time, whatever came before it on the connection."""
        super().data_received(data)
        self._cancel(self._head)
        if self.cycle is None or self.cycle.response_complete:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers."""
        self._cancel(self._head, self._stall)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The send buffer is full: the client has to read."""
        super().pause_writing()
        self._cancel(self._stall)
        self._stall = self.loop.call_later(self.limits.stall_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It has."""
        super().resume_writing()
        self._cancel(self._stall)

    def _wait_for_head(self) -> None:
        self._head = self.loop.call_later(self.limits.body_timeout_s, self.transport.abort)

    @staticmethod
    def _cancel(*timers: asyncio.TimerHandle | None) -> None:
        for timer in timers:
            if timer is not None:
                timer.cancel()


class _Uvicorn(uvicorn.Server):
    """Drains the worker while the connections end."""

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self._server = server

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        if self.started:
            config = self._server.config
            port = self.servers[0].sockets[0].getsockname()[1]
            host = f"[{config.host}]" if ":" in config.host else config.host
            log.info("%s is served on http://%s:%d", config.name, host, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no connections, let requests end within the grace time, then end them."""
        self._server.bodies.close()
        drain = asyncio.create_task(self._server.worker.drain(self._server.config.grace_s))
        flush = asyncio.create_task(self._end_connections(drain))
        await super().shutdown(sockets)
        await drain
        flush.cancel()

    async def _end_connections(self, drain: asyncio.Task[None]) -> None:
        """Behind the grace time answers only have to be flushed."""
        await asyncio.wait([drain])
        await asyncio.sleep(FLUSH_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # its client does not read


def check_address(config: ServerConfig) -> None:
    """Find out before a model is loaded whether the server's address can be had.

    Raises:
        ValueError: it is taken, not allowed, or unknown.
    """
    try:
        found = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise ValueError(
            f"serve: host must be an address of this machine, got {config.host!r}: {error.strerror}"
        ) from None
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    raise ValueError(
                        f"serve: port must be free on {config.host}, got {config.port}: "
                        f"{error.strerror}"
                    ) from None


def uvicorn_server(server: Server) -> uvicorn.Server:
    """A uvicorn server, ready for ``run`` or ``serve``."""
    config = server.config
    protocol = type("Protocol", (Protocol,), {"limits": config})
    settings = uvicorn.Config(
        server.app,
        host=config.host,
        port=config.port,
        http=protocol,
        ws="none",
        loop="asyncio",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=30,
        # For what no aborted connection ends, such as an image that is still being fetched.
        timeout_graceful_shutdown=math.ceil(config.grace_s + LAST_STEP_SECONDS + FLUSH_SECONDS),
    )
    return _Uvicorn(settings, server)


def serve(server: Server) -> None:
    """Serve until SIGINT or SIGTERM; returns when every stream has ended."""
    sys.setswitchinterval(SWITCH_SECONDS)
    running = uvicorn_server(server)
    # What is loaded stays: walking it takes the collector as long as many tokens, and again
    # seconds at the end of the process.
    gc.collect()
    gc.freeze()
    with _ending_quietly():
        running.run()
    gc.freeze()


@contextlib.contextmanager
def _ending_quietly() -> Iterator[None]:
    """uvicorn raises its signal again when it is done; here that was a proper end."""
    ignore = functools.partial(signal.signal, handler=lambda *_: None)
    before = {number: ignore(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
