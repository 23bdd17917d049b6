"""A real server process under load, faults and abuse, and its end by SIGTERM."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from flash_rt.flashrt_hf.bench import record, serve, table
from flash_rt.flashrt_hf.bench.abuse import OVERSIZE_BYTES, Abuse
from flash_rt.flashrt_hf.bench.http_client import Answer, ask
from flash_rt.flashrt_hf.bench.server_process import server_process

KEY = "a-key-of-tests"
ARGUMENTS = (
    *("tiny-qwen3", "--device", "cpu", "--max-len", "512", "--api-key", KEY, "--name", "tiny"),
    *("--max-body", str(OVERSIZE_BYTES / 2**21), "--grace", "4"),
)


@pytest.fixture(scope="module")
def process(monkeypatch_module):
    with server_process(ARGUMENTS) as running:
        yield running


@pytest.fixture(scope="module")
def monkeypatch_module(source_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", source_path)
        patch.setenv("OMP_NUM_THREADS", "1")
        yield patch


def gauges(port: int) -> dict[str, float]:
    answer = httpx.get(
        f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {KEY}"}
    )
    lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_no_wrong_answer_no_leak_no_stuck_slot(process):
    async def run():
        abuse = Abuse(process.port, model="tiny", key=KEY, new_tokens=8)
        await abuse.learn()
        await abuse.run(60, 16)
        before = process.resident_bytes
        report = await abuse.run(160, 32)
        await abuse.check()
        return report, process.resident_bytes - before

    report, grown = asyncio.run(run())
    assert report.wrong == []
    assert sum(report.kinds.values()) == 220 + 24
    assert len(report.kinds) == 10
    assert grown < 24 * 2**20
    found = gauges(process.port)
    assert found["flashrt_queue_depth"] == 0
    assert found["flashrt_running"] == 0


def test_sigterm_under_load_ends_in_time(process):
    async def run():
        body = {"model": "tiny", "prompt": [65], "temperature": 0, "ignore_eos": True}
        short, long = body | {"max_tokens": 40}, body | {"max_tokens": 500}
        asked = [
            asyncio.create_task(ask(process.port, each | {"stream": True}, key=KEY))
            for each in [short] * 6 + [long] * 10
        ]
        while gauges(process.port)["flashrt_running"] < 8:
            await asyncio.sleep(0.02)
        ended = asyncio.create_task(asyncio.to_thread(process.terminate, patience_s=15))
        answers = await asyncio.gather(*asked)
        return answers, await ended

    answers, (status, seconds) = asyncio.run(run())
    assert status == 0
    assert seconds < 10
    assert any(answer.finish == "length" for answer in answers)
    for answer in answers:  # finished, ended by an error event, or refused before it began
        assert answer.whole
        assert answer.finish == "length" or answer.error == "shutting_down"
    assert not any("Traceback" in line for line in process.lines)


def test_a_rate_is_of_what_came_behind_the_first_piece():
    assert Answer(times=[1.0, 1.5, 3.0]).rate(9) == 4.0
    with pytest.raises(RuntimeError, match="at least 2 pieces, got 1 for 9 tokens"):
        Answer(times=[1.0]).rate(9)


def test_the_benchmark_writes_a_record(monkeypatch_module, tmp_path):
    path = tmp_path / "serve.json"
    arguments = ["--model", "tiny-qwen3", "--device", "cpu", "--dtype", "fp32", "--clients", "2"]
    arguments += ["--prompt", "12", "--new", "6", "--repeats", "1", "--abuse", "20"]
    options = serve.parser().parse_args([*arguments, "--json", str(path)])
    options.command = ["flash-rt", "bench", "serve", *arguments]
    measured, written = serve.main(options)
    assert written == path
    assert record.read(path) == measured
    part = measured["parts"]["serve"]
    assert part["same_as_bare"]
    assert part["many"]["same_as_single"]
    assert part["many"]["clients"] == 2
    assert part["http"]["rate"] > 0
    assert measured["parts"]["abuse"]["wrong"] == []
    shown = table.markdown({"serve.json": measured})
    assert "streaming through HTTP to the bare loop, tok/s" in shown
    assert "0 wrong" in shown
