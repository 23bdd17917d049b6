"""The end: running requests within the grace time, and nobody who holds it up."""

from __future__ import annotations

import json
import socket
import threading
import time

import httpx
import pytest
from fake_engine import FakeEngine
from serving_support import fake, run_server, until
from test_limits import ASK, LONG, post


def test_the_end_lets_streams_finish_and_takes_no_more():
    engine = FakeEngine(slots=2, delay_s=0.01)
    with run_server(fake(engine), grace_s=20) as running:
        url, events = f"{running.url}/v1/completions", []
        with httpx.stream("POST", url, json=ASK | {"stream": True, "max_tokens": 60}) as answer:
            lines = answer.iter_lines()
            next(lines)
            threading.Thread(target=running.stop).start()
            until(lambda: running.server.worker.state == "draining")
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"{running.url}/ready")
            events = [line for line in lines if line]
        assert len(events) == 60
        assert events[-1] == "data: [DONE]"


def test_the_end_of_the_grace_time_ends_streams_properly():
    engine = FakeEngine(slots=1, delay_s=0.01)
    with run_server(fake(engine), grace_s=0.3) as running:
        url = f"{running.url}/v1/completions"
        queued = []
        with httpx.stream("POST", url, json=LONG) as answer:
            lines = answer.iter_lines()
            next(lines)
            thread = threading.Thread(target=lambda: queued.append(post(running)))
            thread.start()
            until(lambda: running.server.worker.waiting == 1)
            start = time.monotonic()
            threading.Thread(target=running.stop).start()
            events = [line for line in lines if line]
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert events[-1] == "data: [DONE]"
        thread.join()
        assert (queued[0].status_code, queued[0].headers["retry-after"]) == (503, "10")
        assert time.monotonic() - start < 5
    assert engine.idle


def test_a_body_that_is_on_its_way_at_the_end_is_not_waited_for():
    with run_server(fake(FakeEngine()), grace_s=20) as running:
        host, port = running.url.removeprefix("http://").split(":")
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        head += "Content-Type: application/json\r\nContent-Length: 500\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(head.encode() + b'{"model":')
            until(lambda: running.server.bodies.waiting == 1)
            stopping = threading.Thread(target=running.stop)
            stopping.start()
            answer = b""
            while part := connection.recv(65536):
                answer += part
        stopping.join(10)
        assert not stopping.is_alive()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"shutting_down" in answer


def test_a_client_that_does_not_read_cannot_hold_up_the_end():
    engine = FakeEngine(slots=1)
    with run_server(fake(engine), grace_s=0.2) as running:
        url = f"{running.url}/v1/completions"
        with httpx.stream("POST", url, json=LONG | {"max_tokens": 90_000}) as answer:
            next(answer.iter_raw())
            stopping = threading.Thread(target=running.stop)
            stopping.start()
            stopping.join(10)
            assert not stopping.is_alive()
    assert engine.idle
