"""The slot engine: answers are what they would be alone, whoever comes and goes beside them."""

from __future__ import annotations

import copy
import random
import threading
from collections import defaultdict
from typing import Any

import pytest
import torch
from decoders import model
from engines import Answers, alone, drain, engine_of, request, tokens

from flash_rt import structures
from flash_rt.structures.capture.tape import TapeBackend


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "phi3"])
def test_answers_are_those_of_the_loop_alone(name: str) -> None:
    requests = [request(w, max_new_tokens=n) for w, n in ((5, 9), (17, 3), (1, 20), (40, 6))]
    wanted = alone(name, requests)
    with engine_of(name, slots=4) as engine:
        handles = [engine.submit(r) for r in requests]
        found = drain(engine)
    for handle, ids in zip(handles, wanted, strict=True):
        events = found[handle, 0]
        assert tokens(events) == ids
        assert [e.finish_reason for e in events] == [None] * (len(ids) - 1) + ["length"]
        assert handle.done


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_sequences_arrive_and_leave_at_any_time(slots: int) -> None:
    rng = random.Random(slots)
    requests = [
        request(rng.randint(1, 60), seed, max_new_tokens=rng.randint(1, 25)) for seed in range(24)
    ]
    wanted = alone("qwen3", requests)
    with engine_of("qwen3", slots=slots) as engine:
        found: Answers = defaultdict(list)
        handles = []
        for item in requests:
            handles.append(engine.submit(item))
            for _ in range(rng.randint(0, 6)):
                for event in engine.step():
                    found[event.handle, event.index].append(event)
                assert engine.running <= slots
        drain(engine, found)
    for handle, ids in zip(handles, wanted, strict=True):
        assert tokens(found[handle, 0]) == ids


def test_a_warm_engine_records_nothing_more_and_answers_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = [request(w, max_new_tokens=9) for w in (5, 17, 30)]
    wanted = alone("llama", requests)
    with engine_of("llama", slots=3, max_len=64) as engine:
        engine.warm_up()

        def refuse(self: Any, *args: Any, **options: Any) -> Any:
            raise AssertionError("a graph was recorded")

        monkeypatch.setattr(TapeBackend, "record", refuse)
        handles = [engine.submit(r) for r in requests]
        with pytest.raises(RuntimeError, match="the engine must be idle"):
            engine.warm_up()
        found = drain(engine)
    assert [tokens(found[h, 0]) for h in handles] == wanted


def test_a_stop_id_ends_an_answer_and_is_reported() -> None:
    free = alone("llama", [request(6, max_new_tokens=30)])[0]
    end = free[4]
    count = free.index(end) + 1
    with engine_of("llama") as engine:
        stopping = engine.submit(request(6, max_new_tokens=30, stop_token_ids=(96, end)))
        other = engine.submit(request(6, max_new_tokens=30))
        found = drain(engine)
    assert tokens(found[stopping, 0]) == free[:count]
    assert found[stopping, 0][-1].finish_reason == "stop"
    assert tokens(found[other, 0]) == free


def test_the_models_own_end_tokens_count_unless_others_are_given() -> None:
    mine: Any = copy.deepcopy(model("llama"))
    free = alone("llama", [request(6, max_new_tokens=12)])[0]
    mine.generation_config.eos_token_id = [99, free[3]]
    engine = structures.decode_engine(mine, max_len=64)
    handle = engine.submit(request(6, max_new_tokens=12, stop_token_ids=None))
    assert tokens(drain(engine)[handle, 0]) == free[: free.index(free[3]) + 1]


def test_a_cancelled_request_ends_at_the_next_step_and_frees_its_slot() -> None:
    requests = [request(5, seed, max_new_tokens=40) for seed in range(4)]
    wanted = alone("llama", requests)
    with engine_of("llama", slots=2) as engine:
        handles = [engine.submit(r) for r in requests]
        found: Answers = defaultdict(list)
        for _ in range(6):
            for event in engine.step():
                found[event.handle, event.index].append(event)
        engine.cancel(handles[0])  # running
        engine.cancel(handles[2])  # waiting
        events = engine.step()
        ended = {e.handle: e for e in events if e.finish_reason == "cancelled"}
        assert set(ended) == {handles[0], handles[2]}
        assert all(e.token_id is None for e in ended.values())
        for event in events:
            found[event.handle, event.index].append(event)
        drain(engine, found)
    assert tokens(found[handles[0], 0]) == wanted[0][: len(tokens(found[handles[0], 0]))]
    assert found[handles[0], 0][-1].finish_reason == "cancelled"
    assert tokens(found[handles[1], 0]) == wanted[1]
    assert tokens(found[handles[2], 0]) == []
    assert tokens(found[handles[3], 0]) == wanted[3]


def test_several_answers_to_one_prompt() -> None:
    item = request(9, max_new_tokens=8, n=5)
    wanted = alone("llama", [item])[0]
    with engine_of("llama", slots=3) as engine:
        handle = engine.submit(item)
        found = drain(engine)
    assert all(tokens(found[handle, i]) == wanted for i in range(5))
    assert len(found) == 5


def test_one_of_several_answers_is_cancelled() -> None:
    with engine_of("llama", slots=3) as engine:
        handle = engine.submit(request(9, max_new_tokens=8, n=3))
        engine.step()
        engine.cancel(handle, 1)
        found = drain(engine)
    reasons = [found[handle, i][-1].finish_reason for i in range(3)]
    assert reasons == ["length", "cancelled", "length"]


def test_answers_fill_the_cache_to_its_last_position() -> None:
    items = [request(100, max_new_tokens=None), request(127, max_new_tokens=None)]
    wanted = alone("llama", items)
    with engine_of("llama") as engine:
        handles = [engine.submit(item) for item in items]
        found = drain(engine)
    assert [tokens(found[h, 0]) for h in handles] == wanted
    assert [len(ids) for ids in wanted] == [28, 1]


def test_requests_come_from_any_thread() -> None:
    items = [request(4 + i, i, max_new_tokens=7) for i in range(12)]
    wanted = alone("llama", items)
    with engine_of("llama", slots=4) as engine:
        handles: dict[int, Any] = {}

        def work(start: int) -> None:
            for index in range(start, 12, 3):
                handles[index] = engine.submit(items[index])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        found: Answers = defaultdict(list)
        while any(thread.is_alive() for thread in threads):
            for event in engine.step():
                found[event.handle, event.index].append(event)
        drain(engine, found)
    for index, ids in enumerate(wanted):
        assert tokens(found[handles[index], 0]) == ids


def test_weights_that_move_end_what_runs_and_are_used_from_then_on() -> None:
    mine: Any = copy.deepcopy(model("llama"))
    engine = structures.decode_engine(mine, max_len=64)
    running = engine.submit(request(6, max_new_tokens=40))
    for _ in range(4):
        engine.step()
    weight = mine.model.layers[1].mlp.up_proj.weight
    mine.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(weight.detach() * -1)
    later = engine.submit(request(7, max_new_tokens=5))
    found = drain(engine)
    assert found[running, 0][-1].finish_reason == "error"
    assert "moved or replaced" in str(found[running, 0][-1].error)
    loop = structures.decode_loop(mine, max_len=64)
    ids = torch.tensor([request(7).prompt_ids])
    wanted = loop.generate(ids, max_new_tokens=5, eos_token_id=())
    assert tokens(found[later, 0]) == wanted[0, 7:].tolist()
