"""Prompts come in chunks, by turns, between the steps of what runs."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from decoders import model
from engines import Answers, alone, drain, engine_of, request, tokens

from flash_rt import structures
from flash_rt.structures.loops.joining import Pace


@pytest.fixture
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flash_rt.structures.loops.joining.CHUNK", 64)
    monkeypatch.setattr("flash_rt.structures.loops.prefill.CHUNK", 64)
    monkeypatch.setattr("flash_rt.structures.loops.prefill.CAPTURED", 64)


@pytest.mark.usefixtures("_short_chunks")
def test_a_long_prompt_comes_in_chunks_between_the_steps_of_others() -> None:
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


@pytest.mark.usefixtures("_short_chunks")
def test_prompts_take_turns_so_that_a_short_one_does_not_wait_for_long_ones() -> None:
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
        engine._scheduler._pace = Pace(Event)
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
