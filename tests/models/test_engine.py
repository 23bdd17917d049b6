"""The slot engine: answers are what they would be alone, whoever comes and goes beside them."""

from __future__ import annotations

import copy
import random
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from decoders import model

from flash_rt import structures
from flash_rt.structures import GenerationRequest
from flash_rt.structures.capture.tape import TapeBackend
from flash_rt.structures.loops.joining import Pace

Answers = dict[tuple[Any, int], list[Any]]


@contextmanager
def engine_of(name: str, **sizes: int) -> Iterator[structures.Engine]:
    attached = structures.attach(model(name))
    try:
        yield structures.decode_engine(model(name), **{"max_len": 128, **sizes})
    finally:
        attached.detach()


def drain(engine: structures.Engine, found: Answers | None = None) -> Answers:
    """Step until nothing is left; events by answer."""
    found = defaultdict(list) if found is None else found
    while not engine.idle:
        for event in engine.step():
            found[event.handle, event.index].append(event)
    return found


def tokens(events: list[Any]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]


def request(width: int, seed: int = 0, **options: Any) -> GenerationRequest:
    generator = torch.Generator().manual_seed(1000 * seed + width)
    ids = torch.randint(3, 97, (width,), generator=generator)
    return GenerationRequest(**{"prompt_ids": ids, "stop_token_ids": (), **options})


def alone(name: str, requests: list[GenerationRequest], **sizes: int) -> list[list[int]]:
    """What each request gets from the loop, greedily."""
    plan = structures.attach(model(name))
    try:
        loop = structures.decode_loop(model(name), **{"max_len": 128, **sizes})
        answers = []
        for wanted in requests:
            ids = torch.tensor([wanted.prompt_ids])
            limit, stops = wanted.max_new_tokens, wanted.stop_token_ids
            out = loop.generate(ids, max_new_tokens=limit, eos_token_id=stops)
            answers.append(out[0, ids.shape[1] :].tolist())
        return answers
    finally:
        plan.detach()


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


def test_a_long_prompt_comes_in_chunks_between_the_steps_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flash_rt.structures.loops.joining.CHUNK", 64)
    monkeypatch.setattr("flash_rt.structures.loops.prefill.CHUNK", 64)
    monkeypatch.setattr("flash_rt.structures.loops.prefill.CAPTURED", 64)
    short, long = request(7, max_new_tokens=30), request(500, max_new_tokens=5)
    wanted = alone("llama", [short, long], max_len=512)
    with engine_of("llama", max_len=512) as engine:
        first = engine.submit(short)
        for _ in range(3):
            engine.step()
        second = engine.submit(long)
        steps = [[(e.handle, e.token_id) for e in engine.step()] for _ in range(9)]
        assert all(len([h for h, _ in events if h is first]) == 1 for events in steps)
        assert [h for events in steps[:7] for h, _ in events] == [first] * 7
        found = drain(engine)
    begun = [t for events in steps for h, t in events if h is second]
    assert begun + tokens(found[second, 0]) == wanted[1]


def test_prompts_take_turns_so_that_a_short_one_does_not_wait_for_long_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flash_rt.structures.loops.joining.CHUNK", 64)
    monkeypatch.setattr("flash_rt.structures.loops.prefill.CHUNK", 64)
    monkeypatch.setattr("flash_rt.structures.loops.prefill.CAPTURED", 64)
    items = [request(w, max_new_tokens=6) for w in (400, 300, 7, 130)]
    wanted = alone("llama", items, max_len=512)
    with engine_of("llama", slots=4, max_len=512) as engine:
        running = engine.submit(request(9, max_new_tokens=40))
        engine.step()
        handles = [engine.submit(item) for item in items]
        first: dict[Any, int] = {}
        found: Answers = defaultdict(list)
        for index in range(200):
            for event in engine.step():
                first.setdefault(event.handle, index)
                found[event.handle, event.index].append(event)
            if engine.idle:
                break
    assert first[handles[2]] == 2  # the third turn was its own
    assert first[handles[0]] > first[handles[1]] > first[handles[2]]
    assert [tokens(found[h, 0]) for h in handles] == wanted
    assert len(tokens(found[running, 0])) == 39  # and the one of the first step


def test_at_most_two_chunks_are_queued_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flash_rt.structures.loops.joining.CHUNK", 16)
    queued: list[Any] = []
    most = 0

    class Event:
        def record(self) -> None:
            nonlocal most
            queued.append(self)
            most = max(most, len(queued))

        def synchronize(self) -> None:
            assert queued.pop(0) is self

    with engine_of("llama", slots=2) as engine:
        engine._pace = Pace(Event)
        handle = engine.submit(request(90, max_new_tokens=3))
        assert len(tokens(drain(engine)[handle, 0])) == 3
    assert most == 2


def test_weights_written_while_a_prompt_is_read_make_it_be_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flash_rt.structures.loops.joining.CHUNK", 16)
    mine: Any = copy.deepcopy(model("llama"))
    engine = structures.decode_engine(mine, max_len=128, slots=2)
    handle = engine.submit(request(60, max_new_tokens=5))
    engine.step()
    engine.step()
    with torch.no_grad():
        mine.model.layers[0].mlp.down_proj.weight.mul_(-1)
    other = engine.submit(request(7, max_new_tokens=5))
    found = drain(engine)
    loop = structures.decode_loop(mine, max_len=128)
    for item, width in ((handle, 60), (other, 7)):
        ids = torch.tensor([request(width).prompt_ids])
        wanted = loop.generate(ids, max_new_tokens=5, eos_token_id=())
        assert tokens(found[item, 0]) == wanted[0, width:].tolist()


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


def test_a_cancelled_prompt_leaves_others_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flash_rt.structures.loops.joining.CHUNK", 20)
    item = request(9, max_new_tokens=8)
    wanted = alone("llama", [item])[0]
    with engine_of("llama") as engine:
        cancelled = engine.submit(request(90, max_new_tokens=8))
        engine.step()
        engine.cancel(cancelled)
        handle = engine.submit(item)
        found = drain(engine)
    assert [e.finish_reason for e in found[cancelled, 0]] == ["cancelled"]
    assert tokens(found[handle, 0]) == wanted


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


def test_a_hook_is_refused_by_name() -> None:
    with engine_of("llama") as engine:
        module = model("llama").model.layers[0].mlp
        removable = module.register_forward_hook(lambda *a: None)
        try:
            handle = engine.submit(request(6, max_new_tokens=4))
            events = drain(engine)[handle, 0]
        finally:
            removable.remove()
        assert [e.finish_reason for e in events] == ["error"]
        assert "a forward hook is registered" in str(events[0].error)
        again = engine.submit(request(6, max_new_tokens=4))
        assert len(tokens(drain(engine)[again, 0])) == 4


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt_ids": ()}, "prompt_ids must have at least one id"),
    ({"prompt_ids": (3, -1)}, "prompt_ids must be ids of at least 0, got -1"),
    ({"prompt_ids": "text"}, "prompt_ids must be a list of ids"),
    ({"prompt_ids": (0.5,)}, "prompt_ids must be a list of integers, got (0.5,)"),
    ({"max_new_tokens": 0}, "max_new_tokens must be 1 to 2147483647, got 0"),
    ({"n": 129}, "n must be 1 to 128, got 129"),
    ({"sampling": 3}, "sampling must be a Sampling"),
    ({"mask": 3}, "mask must be callable"),
    ({"reuse_prefix": 1}, "reuse_prefix must be True or False, got 1"),
]


@pytest.mark.parametrize(("fields", "text"), WRONG)
def test_wrong_requests_say_what_is_wrong(fields: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(text)):
        GenerationRequest(**{"prompt_ids": (5,), **fields})


WRONG_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature must be at least 0, got -0.1"),
    ({"temperature": float("nan")}, "temperature must be at least 0, got nan"),
    ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
    ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
    ({"min_p": 1.5}, "min_p must be at least 0 and at most 1, got 1.5"),
    ({"top_k": -1}, "top_k must be 0 to 2147483647, got -1"),
    ({"repetition_penalty": 0}, "repetition_penalty must be above 0, got 0"),
    ({"presence_penalty": float("inf")}, "presence_penalty must be finite, got inf"),
    ({"seed": -1}, "seed must be 0 to"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs must be 0 to 20, got 21"),
    ({"top_logprobs": 2}, "top_logprobs needs logprobs=True"),
    ({"logit_bias": {-3: 1.0}}, "logit_bias must have ids of at least 0, got -3"),
    ({"logit_bias": {3: float("nan")}}, "logit_bias must be finite or -inf, got nan"),
]


@pytest.mark.parametrize(("fields", "text"), WRONG_SAMPLING)
def test_wrong_sampling_says_what_is_wrong(fields: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        structures.Sampling(**fields)


def test_what_does_not_fit_is_refused_at_once() -> None:
    with engine_of("llama", max_len=32, slots=2) as engine:
        with pytest.raises(ValueError, match="must fit max_len = 32, got 30 \\+ 3"):
            engine.submit(request(30, max_new_tokens=3))
        with pytest.raises(ValueError, match="must fit max_len = 32, got 32 \\+ 1"):
            engine.submit(request(32))
        with pytest.raises(ValueError, match="ids must be from 0 to 127, got 128"):
            engine.submit(GenerationRequest((5, 128)))
        assert engine.idle and engine.step() == []
        handle = engine.submit(request(6, max_new_tokens=3))
        with pytest.raises(ValueError, match="cancel: index must be 0 to 0, got 1"):
            engine.cancel(handle, 1)
        assert len(tokens(drain(engine)[handle, 0])) == 3
    with pytest.raises(ValueError, match="slots must be 1 to 8, got 9"):
        structures.decode_engine(model("llama"), max_len=32, slots=9)
    with pytest.raises(ValueError, match="decode_engine: max_len must be at least 2, got 1"):
        structures.decode_engine(model("llama"), max_len=1)
