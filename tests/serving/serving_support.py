"""A server in a thread, and the tiny model behind it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tiny_model

from flash_rt.flashrt_hf.server import loading
from flash_rt.flashrt_hf.server.app import Server
from flash_rt.flashrt_hf.server.config import ServerConfig
from flash_rt.flashrt_hf.server.run import uvicorn_server
from flash_rt.flashrt_hf.server.served import Served
from flash_rt.flashrt_hf.server.template import ChatTemplate
from flash_rt.flashrt_hf.server.text import Codec

MAX_LEN = 2048
NAME = "tiny"


@dataclass
class Running:
    """A server that listens."""

    server: Server
    url: str
    stop: Any

    def client(self, **options: Any) -> Any:
        """The real client of OpenAI."""
        from openai import OpenAI

        options = {"api_key": "none", "max_retries": 0, "timeout": 60, **options}
        return OpenAI(base_url=f"{self.url}/v1", **options)


@contextlib.contextmanager
def run_server(served: Served, **settings: Any) -> Iterator[Running]:
    """Serve from a thread on a free port."""
    server = Server(served, ServerConfig(**{"name": served.name, "port": 0, **settings}))
    running = uvicorn_server(server)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]

    def stop() -> None:
        running.should_exit = True
        thread.join()

    try:
        yield Running(server, f"http://127.0.0.1:{port}", stop)
    finally:
        stop()


def tiny(**options: Any) -> Served:
    """The tiny decoder, served on an engine of its own."""
    options = {"name": NAME, "max_len": MAX_LEN, **options}
    return loading.text_model(tiny_model.decoder(), tiny_model.tokenizer(), **options)


def fake(engine: Any, **options: Any) -> Served:
    """``engine`` behind the tiny tokenizer."""
    tokenizer = tiny_model.tokenizer()
    codec = Codec(tokenizer, stop_ids=[tokenizer.eos_token_id], vocabulary=tiny_model.VOCABULARY)
    return Served(
        name=NAME,
        plan=lambda: {"columns": [], "cells": [], "rows": [], "notes": []},
        max_len=engine.max_len,
        codec=codec,
        engine=engine,
        template=ChatTemplate(tokenizer),
        **options,
    )


def until(condition: Any, seconds: float = 10.0) -> None:
    """Wait for ``condition()``; fails the test when it does not come."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{condition} did not come"
        time.sleep(0.005)
