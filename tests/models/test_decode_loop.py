"""The loop's tokens are the host's, for every dense decoder; batches, stops, streams, memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import decoders
import pytest
import torch
from decoders import host, model, prompt

from flash_rt import structures
from flash_rt.structures.loops import prefill

ALL = [*decoders.DECODERS, *decoders.VARIANTS]


@contextmanager
def loop_of(name: str, **sizes: int) -> Iterator[structures.DecodeLoop]:
    attached = structures.attach(model(name))
    try:
        yield structures.decode_loop(model(name), **{"max_len": 128, **sizes})
    finally:
        attached.detach()


@pytest.mark.parametrize("name", ALL)
def test_tokens_are_the_hosts(name: str) -> None:
    cases = [prompt(1, 1), prompt(1, 7), prompt(1, 16), prompt(1, 45)]
    wanted = [host(name, *case, max_new_tokens=24) for case in cases]
    with loop_of(name) as loop:
        for _ in range(2):  # the second round replays every graph
            for case, tokens in zip(cases, wanted, strict=True):
                assert torch.equal(loop.generate(*case, max_new_tokens=24), tokens)


@pytest.mark.parametrize("name", ALL)
def test_a_padded_batch_is_the_hosts(name: str) -> None:
    ids, mask = prompt(3, 19, padding=(12, 0, 5))
    wanted = host(name, ids, mask, max_new_tokens=20)
    with loop_of(name, batch_size=3) as loop:
        assert torch.equal(loop.generate(ids, mask, max_new_tokens=20), wanted)


@pytest.mark.parametrize("width", [255, 256, 257, 300, 600])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
def test_long_prompts(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flash_rt.structures.loops.prefill.CHUNK", 200)
    ids, mask = prompt(1, width)
    wanted = host(name, ids, mask, max_new_tokens=6)
    with loop_of(name, max_len=640) as loop:
        assert torch.equal(loop.generate(ids, max_new_tokens=6), wanted)


def test_a_cache_of_the_longest_prompts_and_a_prompt_of_several_chunks() -> None:
    ids, mask = prompt(1, 4500)
    wanted = host("qwen3", ids, mask, max_new_tokens=4)
    with loop_of("qwen3", max_len=2**18) as loop:
        assert torch.equal(loop.generate(ids, max_new_tokens=4), wanted)
        [session] = loop._sessions._kept.values()
        assert len(session.prefill._graphs) == 0  # long prompts record nothing


def test_a_long_prompt_that_fails_leaves_short_ones_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flash_rt.structures.loops.prefill.CHUNK", 200)
    layers, failing = prefill.Prefill._layers, []

    def run(self: Any, row: int, ids: torch.Tensor, start: int) -> Any:
        if start in failing:
            raise torch.OutOfMemoryError
        return layers(self, row, ids, start)

    monkeypatch.setattr(prefill.Prefill, "_layers", run)
    ids, _ = prompt(1, 9)
    with loop_of("llama", max_len=640) as loop:
        wanted = loop.generate(ids, max_new_tokens=6)
        failing.append(200)
        with pytest.raises(torch.OutOfMemoryError):
            loop.generate(prompt(1, 300)[0], max_new_tokens=6)
        assert torch.equal(loop.generate(ids, max_new_tokens=6), wanted)


@pytest.mark.parametrize("batch", [1, 2, 5, 8])
def test_a_rows_tokens_do_not_depend_on_its_batch(batch: int) -> None:
    ids, _ = prompt(8, 9)
    with loop_of("qwen3") as loop:
        rows = ids.split(1)[:batch]
        alone = [loop.generate(row, max_new_tokens=12, eos_token_id=()) for row in rows]
    with loop_of("qwen3", batch_size=8) as loop:
        together = loop.generate(ids[:batch], max_new_tokens=12, eos_token_id=())
    assert torch.equal(together, torch.cat(alone))


def test_a_row_stops_behind_an_end_token_and_is_padded() -> None:
    ids, mask = prompt(2, 6)
    free = host("llama", ids, mask, max_new_tokens=30, eos_token_id=None)
    end = int(free[0, 6 + 4])
    wanted = host("llama", ids, mask, max_new_tokens=30, eos_token_id=[end, 98], pad_token_id=5)
    with loop_of("llama", batch_size=2) as loop:
        tokens = loop.generate(ids, max_new_tokens=30, eos_token_id=[end, 98], pad_token_id=5)
        never = loop.generate(ids, max_new_tokens=30, eos_token_id=())
    assert torch.equal(tokens, wanted)
    assert torch.equal(never, free)


def test_generation_ends_early_when_every_row_has_stopped() -> None:
    ids, mask = prompt(1, 6)
    free = host("llama", ids, mask, max_new_tokens=30, eos_token_id=None)
    end = int(free[0, 6 + 3])
    first = (free[0, 6:] == end).nonzero()[0].item()
    with loop_of("llama") as loop:
        tokens = loop.generate(ids, max_new_tokens=30, eos_token_id=end)
    assert torch.equal(tokens, free[:, : 6 + int(first) + 1])


class Recorder:
    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer_gets_the_prompt_and_every_step() -> None:
    ids, mask = prompt(2, 6)
    free = host("llama", ids, mask, max_new_tokens=9, eos_token_id=None)
    end = int(free[1, 6 + 2])
    theirs, ours = Recorder(), Recorder()
    with loop_of("llama", batch_size=2) as loop:
        tokens = loop.generate(
            ids, max_new_tokens=9, eos_token_id=end, pad_token_id=7, streamer=ours
        )
    theirs.puts = [ids.flatten().tolist(), *tokens[:, 6:].t().tolist()]
    assert ours.puts == theirs.puts
    assert ours.ended == 1
    assert 7 in tokens[1].tolist()


def test_a_request_inside_another_ones_streamer_disturbs_neither() -> None:
    outer, inner = prompt(1, 11), prompt(1, 5)
    wanted = [host("llama", *case, max_new_tokens=10) for case in (outer, inner)]
    found: list[torch.Tensor] = []
    with loop_of("llama") as loop:

        class Nested(Recorder):
            def put(self, value: torch.Tensor) -> None:
                if len(found) < 3:
                    found.append(loop.generate(*inner, max_new_tokens=10))

        tokens = loop.generate(*outer, max_new_tokens=10, streamer=Nested())
    assert torch.equal(tokens, wanted[0])
    assert all(torch.equal(other, wanted[1]) for other in found)
    assert len(found) == 3


def test_threads_wait_for_each_other() -> None:
    cases = [prompt(1, width) for width in (3, 8, 12, 17)]
    wanted = [host("llama", *case, max_new_tokens=8) for case in cases]
    results: dict[int, torch.Tensor] = {}
    with loop_of("llama") as loop:

        def work(index: int) -> None:
            for _ in range(3):
                results[index] = loop.generate(*cases[index], max_new_tokens=8)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(results[i], tokens) for i, tokens in enumerate(wanted))


def test_memory_is_counted_and_given_back() -> None:
    with loop_of("llama", max_len=512) as loop:
        assert loop.memory_bytes == 0
        loop.generate(prompt(1, 5)[0], max_new_tokens=2)
        layers, heads, size = 2, 2, 16
        assert loop.memory_bytes > 2 * layers * heads * size * 512 * 4
        before = loop.memory_bytes
        loop.generate(prompt(1, 5)[0], max_new_tokens=2)
        assert loop.memory_bytes == before
        loop.reset()
        assert loop.memory_bytes == 0
        assert loop.generate(prompt(1, 5)[0], max_new_tokens=2).shape == (1, 7)


def test_weights_that_change_are_the_ones_used() -> None:
    import copy

    ids, mask = prompt(1, 9)
    mine: Any = copy.deepcopy(model("llama"))
    loop = structures.decode_loop(mine, max_len=64)
    first = loop.generate(ids, max_new_tokens=8)
    with torch.no_grad():
        mine.model.layers[0].mlp.down_proj.weight.mul_(-1)  # in place: the same address
    second = loop.generate(ids, max_new_tokens=8)
    weight = torch.nn.Parameter(mine.model.layers[1].mlp.up_proj.weight.detach() * -1)
    mine.model.layers[1].mlp.up_proj.weight = weight  # another address
    third = loop.generate(ids, max_new_tokens=8)
    structures.attach(mine).detach()
    wanted = mine.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert torch.equal(third, wanted)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_calls_in_and_outside_of_inference_mode_share_a_loop() -> None:
    ids, mask = prompt(1, 9)
    wanted = host("llama", ids, mask, max_new_tokens=6)
    with loop_of("llama") as loop:
        with torch.inference_mode():
            assert torch.equal(loop.generate(ids, max_new_tokens=6), wanted)
        assert torch.equal(loop.generate(ids, max_new_tokens=6), wanted)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(loop.generate(ids, max_new_tokens=6), wanted)
        with torch.inference_mode():
            assert torch.equal(host("llama", ids, mask, max_new_tokens=6), wanted)
        assert torch.equal(host("llama", ids, mask, max_new_tokens=6), wanted)


def test_a_default_device_of_the_callers_changes_no_proof() -> None:
    ids, mask = prompt(1, 9)
    wanted = host("gemma3", ids, mask, max_new_tokens=6)
    with torch.device("meta"):
        loop = structures.decode_loop(model("gemma3"), max_len=64)
    try:
        assert torch.equal(loop.generate(ids, max_new_tokens=6), wanted)
    finally:
        structures.attach(model("gemma3")).detach()
