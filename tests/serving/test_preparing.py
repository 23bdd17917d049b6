"""Where requests are made ready for the model, and how many at a time."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from fake_engine import FakeEngine
from serving_support import fake, run_server
from test_limits import ASK, post

from flash_rt.flashrt_hf.server import chat, completions
from flash_rt.flashrt_hf.server.app import PREPARING_THREADS


@pytest.mark.parametrize(
    ("path", "fields", "here"),
    [
        ("completions", {"prompt": [1, 2, 3]}, True),
        ("completions", {"prompt": "word " * 1000}, False),
        ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, True),
        ("chat/completions", {"messages": [{"role": "user", "content": "hi " * 2000}]}, False),
        (
            "chat/completions",
            {
                "messages": [{"role": "user", "content": "hi"}],
                "response_format": {"type": "json_object"},
            },
            False,
        ),
    ],
)
def test_what_takes_time_to_prepare_leaves_the_loop_to_others(monkeypatch, path, fields, here):
    form = chat if path.startswith("chat") else completions
    in_loop, prepare = [], form.prepare

    def noting(*args):
        try:
            asyncio.get_running_loop()
            in_loop.append(True)
        except RuntimeError:
            in_loop.append(False)
        return prepare(*args)

    monkeypatch.setattr(form, "prepare", noting)
    with run_server(fake(FakeEngine())) as running:
        body = {"model": "tiny", "max_tokens": 2} | fields
        assert post(running, body, f"/v1/{path}").status_code == 200
    assert in_loop == [here]


def test_only_so_many_long_texts_are_prepared_at_a_time(monkeypatch):
    lock, now, most, prepare = threading.Lock(), set(), [], completions.prepare

    def noting(*args):
        with lock:
            now.add(threading.get_ident())
            most.append(len(now))
        time.sleep(0.02)
        with lock:
            now.discard(threading.get_ident())
        return prepare(*args)

    monkeypatch.setattr(completions, "prepare", noting)
    body, answers = ASK | {"prompt": "word " * 1000}, []
    with run_server(fake(FakeEngine(slots=8))) as running:
        threads = [
            threading.Thread(target=lambda: answers.append(post(running, body).status_code))
            for _ in range(12)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [200] * 12
    assert max(most) == PREPARING_THREADS
