"""flash-rt serve from the outside: what it refuses, in one message."""

from __future__ import annotations

import importlib.util
import socket
import sys

import pytest

from flash_rt.flashrt_hf import cli


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["flash-rt", "serve", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny-qwen3", "--host", "0.0.0.0"], "needs an api_key"),
        (["tiny-qwen3", "--port", "99999"], "port must be 0 to 65535, got 99999"),
        (["tiny-qwen3", "--max-queue", "0"], "max_queue must be above 0, got 0"),
        (["tiny-qwen3", "--slots", "9"], "slots must be 1 to 8, got 9"),
        (["tiny-qwen3", "--max-len", "1"], "max_len must be at least 2, got 1"),
        (["tiny-qwen3", "--draft", "psychic"], "draft must be"),
        (["tiny-qwen3", "--precision", "int3"], "precision must be"),
        (["tiny-qwen3", "--pooling", "mean"], "pooling is for encoders"),
        (["no-such-model"], "no-such-model"),
    ],
)
def test_refusals(monkeypatch, capsys, arguments, message):
    code, said = run(monkeypatch, capsys, *arguments, "--device", "cpu")
    assert code == 1
    assert message in said
    assert said.startswith("flash-rt: ")
    assert "Traceback" not in said


def test_a_taken_port_is_refused_before_the_model_is_looked_for(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, said = run(monkeypatch, capsys, "no-such-model", "--port", port)
    assert code == 1
    assert said.startswith(f"flash-rt: serve: port must be free on 127.0.0.1, got {port}: ")
    code, said = run(monkeypatch, capsys, "no-such-model", "--port", port)
    assert code == 1
    assert "no-such-model" in said


def test_a_host_that_is_no_address_is_refused(monkeypatch, capsys):
    arguments = ("no-such-model", "--host", "no host", "--anonymous")
    code, said = run(monkeypatch, capsys, *arguments)
    assert code == 1
    assert "serve: host must be an address of this machine, got 'no host'" in said


def test_what_is_not_installed_is_named(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name)
    )
    code, said = run(monkeypatch, capsys, "tiny-qwen3")
    assert code == 1
    assert said == "flash-rt: serve needs uvicorn; run: pip install 'flashrt-hf[serve]'\n"
