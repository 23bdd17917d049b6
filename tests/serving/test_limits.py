"""Keys, sizes, times and the queue: what the server does when clients misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time

import httpx
import pytest
from fake_engine import FakeEngine
from serving_support import Running, fake, run_server, until

ASK = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 5}
LONG = ASK | {"max_tokens": 50_000, "stream": True}


@pytest.fixture(scope="module")
def quick():
    """A server with small limits on a fake engine."""
    with run_server(
        fake(FakeEngine()), max_body_bytes=20_000, body_timeout_s=0.6, stall_timeout_s=0.5
    ) as found:
        yield found


def post(running: Running, body=ASK, path="/v1/completions", **options) -> httpx.Response:
    return httpx.post(f"{running.url}{path}", json=body, timeout=30, **options)


def raw(running: Running, data: bytes, *, wait: float = 5.0) -> bytes:
    """What comes back for bytes on a connection that the client leaves open."""
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=wait) as connection:
        connection.sendall(data)
        found = b""
        while True:
            try:
                part = connection.recv(65536)
            except (TimeoutError, ConnectionResetError):
                return found
            if not part:
                return found
            found += part


def error_of(answer: httpx.Response) -> dict:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_keys():
    with run_server(fake(FakeEngine()), api_keys=("first", "second")) as running:
        for header in (None, "Bearer wrong", "Bearer", "Basic first", "first", "Bearer \xff"):
            headers = {} if header is None else {"Authorization": header.encode("latin-1")}
            for path in ("/v1/models", "/metrics", "/v1/plan", "/openapi.json"):
                answer = httpx.get(running.url + path, headers=headers)
                assert answer.status_code == 401
                assert error_of(answer)["code"] == "invalid_api_key"
            assert post(running, headers=headers).status_code == 401
        for key in ("first", "second"):
            assert post(running, headers={"Authorization": f"Bearer {key}"}).status_code == 200
        for path in ("/health", "/ready", "/"):
            assert httpx.get(running.url + path).status_code == 200


def test_names_of_other_hosts_do_not_reach_a_server_without_keys(quick):
    for host, status in (("evil.example:80", 421), ("localhost:9", 200), ("127.0.0.1", 200)):
        assert httpx.get(f"{quick.url}/health", headers={"Host": host}).status_code == status
    assert httpx.get(f"{quick.url}/health", headers={"Host": "[::1]:8000"}).status_code == 200


def test_other_content_types_are_refused(quick):
    for kind in ("text/plain", "multipart/form-data", ""):
        answer = httpx.post(
            f"{quick.url}/v1/completions", content=json.dumps(ASK), headers={"Content-Type": kind}
        )
        assert answer.status_code == 415


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "tiny", "prompt": "\\ud800", "max_tokens": 1}',
        b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "x", "seed": 1e400}',
        b'{"model": "tiny", "prompt": "x", "seed": 99999999999999999999999999}',
        b'{"model": "tiny", "prompt": "x", "top_k": 2147483648}',
        b'{"model": "tiny", "prompt": "x", "min_tokens": 2147483648}',
        b'{"model": "tiny", "prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}",
        b'{"model": "tiny", "prompt": []}',
        b'{"model": "tiny", "prompt": [[]]}',
        b'{"model": "tiny", "prompt": [1, "x"]}',
        b'{"model": "tiny", "prompt": [-1]}',
        b'{"model": "tiny", "prompt": [512]}',
        b'{"model": "tiny", "prompt": ""}',
        b'{"model": "tiny"}',
        b'{"model": null, "prompt": "x"}',
    ],
)
def test_malformed_bodies(quick, body):
    answer = httpx.post(
        f"{quick.url}/v1/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    assert error_of(answer)["type"] == "invalid_request_error"


def test_unknown_paths_and_methods(quick):
    assert error_of(httpx.get(f"{quick.url}/v1/no/such"))["type"] == "not_found_error"
    answer = httpx.get(f"{quick.url}/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert error_of(answer)


def test_bodies_over_the_limit(quick):
    big = ASK | {"user": "x" * 30_000}
    answer = post(quick, big)
    assert answer.status_code == 413
    assert error_of(answer)["code"] == "request_too_large"

    def parts():
        for _ in range(40):
            yield b" " * 1000

    answer = httpx.post(
        f"{quick.url}/v1/completions", content=parts(), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 413


def test_a_body_that_does_not_come(quick):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    start = time.monotonic()
    assert raw(quick, head).startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - start < 4


def test_a_client_that_leaves_within_its_body_is_no_failure_of_the_server():
    async def send(server):
        parts = [
            {"type": "http.request", "body": b'{"model"', "more_body": True},
            {"type": "http.disconnect"},
        ]
        sent = []

        async def receive():
            return parts.pop(0)

        async def take(message):
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
        scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "root_path": ""}
        await server.app(scope | {"client": ("127.0.0.1", 1)}, receive, take)
        return sent

    with run_server(fake(FakeEngine())) as running:
        begin, *_ = asyncio.run(send(running.server))
        text = httpx.get(f"{running.url}/metrics").text
    assert begin["status"] == 499
    assert 'status="499"} 1.0' in text and 'status="500"' not in text


def test_a_request_that_does_not_come(quick):
    assert raw(quick, b"") == b""
    assert raw(quick, b"GET / HT") == b""
    host, port = quick.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        found = b""
        while not found.endswith(b"}"):
            found += connection.recv(65536)
        assert b"200 OK" in found
        connection.sendall(b"GET /health HT")
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(65536) == b""


def test_what_is_no_http(quick):
    assert raw(quick, b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert post(quick).status_code == 200


def test_a_full_queue_says_when_to_come_back():
    engine = FakeEngine(slots=1, delay_s=0.01)
    with run_server(fake(engine), max_queue=1) as running:
        with httpx.stream("POST", f"{running.url}/v1/completions", json=LONG) as first:
            lines = first.iter_lines()  # closes the stream when it is dropped
            next(lines)
            waiting = threading.Thread(target=lambda: post(running))
            waiting.start()
            until(lambda: running.server.worker.waiting == 1)
            answer = post(running)
            assert answer.status_code == 429
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert error_of(answer)["code"] == "queue_full"
        waiting.join()
        assert len(engine.started) == 2
    assert engine.idle


def test_clients_take_turns_by_key_and_user():
    engine = FakeEngine(slots=1)
    engine.gate.clear()
    with run_server(fake(engine), api_keys=("a", "b")) as running:

        def send(key: str, length: int, user: str | None = None) -> threading.Thread:
            body = ASK | {"prompt": [1] * length, "max_tokens": 3, "user": user}
            headers = {"Authorization": f"Bearer {key}"}
            before = running.server.worker.waiting + len(engine.started)
            thread = threading.Thread(target=lambda: post(running, body, headers=headers))
            thread.start()
            until(lambda: running.server.worker.waiting + len(engine.started) > before)
            return thread

        threads = [send("a", 1)]
        threads += [send("a", 10 + i) for i in range(3)]
        threads += [send("b", 20), send("a", 30, user="other")]
        engine.gate.set()
        for thread in threads:
            thread.join()
    order = [len(request.prompt_ids) for request in engine.started]
    assert order[0] == 1
    assert order.index(20) <= 2
    assert order.index(30) <= 3
    assert [length for length in order if 10 <= length < 20] == [10, 11, 12]


def test_time_runs_out_in_the_queue_and_on_the_way():
    with run_server(fake(FakeEngine(slots=1, delay_s=0.01)), request_timeout_s=1.0) as running:
        found = []
        thread = threading.Thread(target=lambda: found.append(post(running, LONG)))
        thread.start()
        until(lambda: running.server.worker.running == 1)
        running.server.config.__dict__["request_timeout_s"] = 0.2  # of what comes from now on
        waited = post(running)
        assert waited.status_code == 504
        assert error_of(waited)["code"] == "timeout"
        thread.join()
        events = [line for line in found[0].text.split("\n\n") if line]
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "timeout"
        assert events[-1] == "data: [DONE]"
        assert len(events) > 5


def test_a_client_that_leaves_frees_its_slot_at_once():
    engine = FakeEngine(slots=1, delay_s=0.01)
    with run_server(fake(engine)) as running:
        for stream in (True, False):
            body = LONG | {"stream": stream}
            with (
                pytest.raises(httpx.ReadTimeout),
                httpx.stream(
                    "POST", f"{running.url}/v1/completions", json=body, timeout=0.3
                ) as answer,
            ):
                for _ in answer.iter_lines():
                    until(lambda: engine.steps > 10)
                    raise httpx.ReadTimeout("enough")
            steps = engine.steps
            until(lambda: engine.idle)
            assert engine.steps <= steps + 30
        assert post(running).status_code == 200


def test_a_client_that_leaves_the_queue_is_forgotten():
    engine = FakeEngine(slots=1, delay_s=0.01)
    with run_server(fake(engine)) as running:
        with httpx.stream("POST", f"{running.url}/v1/completions", json=LONG) as first:
            lines = first.iter_lines()  # closes the stream when it is dropped
            next(lines)
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{running.url}/v1/completions", json=ASK, timeout=0.3)
            until(lambda: running.server.worker.waiting == 0)
        until(lambda: engine.idle)
        assert len(engine.started) == 1


def test_a_client_that_does_not_read_is_dropped(quick):
    host, port = quick.url.removeprefix("http://").split(":")
    body = json.dumps(LONG).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        until(lambda: quick.server.worker.running == 1)
        assert post(quick).status_code == 200  # others are served meanwhile
        until(lambda: quick.server.worker.running == 0, 20)


def test_failures_of_the_model_reach_who_asked_and_nobody_else():
    engine = FakeEngine(slots=2)
    with run_server(fake(engine)) as running:
        for kind in (KeyError, AttributeError, RuntimeError):
            engine.fail.append(kind("secret detail"))
            answer = post(running)
            assert answer.status_code == 500
            assert post(running).status_code == 200
        assert error_of(answer)["code"] == "model_failed"
        assert "secret" not in answer.text
        engine.refuse = ValueError("n must be less")
        assert error_of(post(running))["message"] == "n must be less"
        assert post(running).status_code == 200
        metrics = httpx.get(f"{running.url}/metrics").text
        assert 'flashrt_model_failures_total{kind="RuntimeError"} 1.0' in metrics


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_model_that_always_fails_is_broken():
    engine = FakeEngine(slots=1)
    with run_server(fake(engine)) as running:
        engine.fail.extend(RuntimeError("no") for _ in range(3))
        assert [post(running).status_code for _ in range(3)] == [500] * 3
        until(lambda: running.server.worker.state == "broken")
        assert httpx.get(f"{running.url}/health").status_code == 503
        assert httpx.get(f"{running.url}/ready").status_code == 503
        answer = post(running)
        assert (answer.status_code, error_of(answer)["code"]) == (503, "broken")


def test_metrics(quick):
    post(quick, ASK | {"max_tokens": 7})
    found = {}
    for line in httpx.get(f"{quick.url}/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    assert found["flashrt_generated_tokens_total"] >= 7
    assert found["flashrt_prompt_tokens_total"] >= 3
    assert found["flashrt_time_to_first_token_seconds_count"] >= 1
    assert found["flashrt_inter_token_seconds_count"] >= 6
    assert found["flashrt_graph_captures_total"] == 3
    assert found["flashrt_queue_depth"] == 0
    assert found['flashrt_requests_total{endpoint="/v1/completions",status="200"}'] >= 1
