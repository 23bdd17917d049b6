"""The slot engine asks the device for no more than what somebody reads, and waits for no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import alone, drain, engine_of, request, tokens
from test_decode_loop_dtypes import DEVICES, place

from flash_rt.structures.loops.generation import GenerationRequest
from flash_rt.structures.loops.report import Reports
from flash_rt.structures.loops.session import Session
from flash_rt.structures.loops.staging import on_device, put


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every step that the engine has queued."""
    rows: list[int] = []
    advance = Session.advance

    def counting(self: Session, name: str, count: int) -> None:
        rows.append(count)
        advance(self, name, count)

    monkeypatch.setattr(Session, "advance", counting)
    return rows


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_no_step_is_queued_behind_the_last_token(steps: list[int], limit: int) -> None:
    item = request(5, max_new_tokens=limit)
    wanted = alone("llama", [item])
    with engine_of("llama", slots=4) as engine:
        handle = engine.submit(item)
        found = drain(engine)
    assert tokens(found[handle, 0]) == wanted[0]
    assert steps == [1] * (limit - 1)  # the first token is the prompt's


def assert_as_alone(items: list[GenerationRequest]) -> None:
    """Requests that come together are answered as each would be alone."""
    wanted = alone("qwen3", items)
    with engine_of("qwen3", slots=4) as engine:
        handles = [engine.submit(item) for item in items]
        found = drain(engine)
    assert [tokens(found[handle, 0]) for handle in handles] == wanted


def test_rows_behind_the_last_that_goes_on_are_left_out(steps: list[int]) -> None:
    items = [request(5, max_new_tokens=6), request(9, 1, max_new_tokens=3)]
    assert_as_alone(items)
    # The second joins a step later; its third token is chosen by the third step.
    assert steps == [1, 2, 2, 1, 1]


def test_who_goes_on_behind_one_that_has_ended_keeps_its_own_tokens(steps: list[int]) -> None:
    items = [request(5, max_new_tokens=3), request(9, 1, max_new_tokens=8)]
    assert_as_alone(items)
    assert steps[-3:] == [1, 1, 1]  # it has moved into the first row


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Reports]:
    """A report for each time that somebody waits for one."""
    found: list[Reports] = []
    take = Reports.take

    def counting(self: Reports) -> bool:
        found.append(self)
        return take(self)

    monkeypatch.setattr(Reports, "take", counting)
    return found


def test_a_cancelled_answer_is_not_waited_for(taken: list[Reports]) -> None:
    items = [request(5, max_new_tokens=40), request(9, 1, max_new_tokens=6)]
    wanted = alone("llama", items)
    taken.clear()
    with engine_of("llama", slots=2) as engine:
        first = engine.submit(items[0])
        begun = [token for _ in range(3) for token in tokens(engine.step())]
        assert begun == wanted[0][:3]
        engine.cancel(first)
        assert [event.finish_reason for event in engine.step()] == ["cancelled"]
        assert engine.idle
        assert len(taken) == 3
        second = engine.submit(items[1])
        assert tokens(drain(engine)[second, 0]) == wanted[1]


def test_a_step_that_nobody_reads_is_not_waited_for(taken: list[Reports]) -> None:
    free = alone("llama", [request(6, max_new_tokens=30)])[0]
    count = free.index(free[4]) + 1
    after = request(11, max_new_tokens=9)
    wanted = alone("llama", [after])[0]
    taken.clear()
    with engine_of("llama") as engine:
        stopping = engine.submit(request(6, max_new_tokens=30, stop_token_ids=(free[4],)))
        ended: list[Any] = []
        while not any(event.finish_reason for event in ended):
            assert not engine.idle
            ended += engine.step()
        assert engine.idle  # the step behind the end may still run
        assert tokens(ended) == free[:count]
        assert len(taken) == count
        handle = engine.submit(after)
        found = drain(engine)
    assert stopping.done
    assert tokens(found[handle, 0]) == wanted
    assert len(taken) == count + 9


def test_prompts_beyond_the_memory_of_recordings_run_unrecorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    items = [request(w, w, max_new_tokens=4) for w in (9, 30, 60, 10, 31, 61)]
    wanted = alone("llama", items)
    with engine_of("llama", slots=1) as engine:
        session = engine._scheduler.session
        assert session is not None
        pool = session.pool
        assert pool.unshared_bytes == 0
        for index, item in enumerate(items):
            handle = engine.submit(item)
            assert tokens(drain(engine)[handle, 0]) == wanted[index]
            if index == 1:  # a step, and prompts of 16 and 32
                recorded, held = pool.recorded, pool.unshared_bytes
                assert (recorded, held > 0) == (3, True)
                monkeypatch.setattr("flash_rt.structures.loops.prefill.MAX_UNSHARED_BYTES", held)
        assert (pool.recorded, pool.unshared_bytes) == (recorded, held)


@pytest.mark.parametrize("device", DEVICES)
def test_staged_values_are_those_at_the_call(device: str) -> None:
    target = torch.zeros(3, 4, device=place(device))
    put(target[:, 1], [1.0, 2.5, -3.0])
    words = torch.tensor([7, 8, 9], dtype=torch.int32)
    integers = torch.zeros(3, dtype=torch.int32, device=target.device)
    put(integers, words)
    words.zero_()
    assert target[:, 1].tolist() == [1.0, 2.5, -3.0]
    assert target[:, [0, 2, 3]].count_nonzero() == 0
    assert integers.tolist() == [7, 8, 9]
    ids = on_device([5, 2**40], torch.int64, target.device)
    assert (ids.tolist(), ids.device, ids.dtype) == ([5, 2**40], target.device, torch.int64)
    assert on_device((), torch.int64, target.device).shape == (0,)
