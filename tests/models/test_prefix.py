"""A prompt that goes on from what the cache holds: new tokens only, exact, repeatable, bounded."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from decoders import host, model
from engines import drain, engine_of, tokens
from test_decode_loop import loop_of

from flash_rt import structures
from flash_rt.structures import GenerationRequest, Sampling
from flash_rt.structures.loops import prefill
from flash_rt.structures.loops.prefix import Prefixes


@contextmanager
def filled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """(start, count) of every chunk of a prompt that is computed."""
    chunks: list[tuple[int, int]] = []
    chunk = prefill.Prefill.chunk

    def counted(self: Any, row: int, ids: torch.Tensor, start: int, *, last: bool) -> None:
        chunks.append((start, ids.shape[0]))
        chunk(self, row, ids, start, last=last)

    with monkeypatch.context() as patch:
        patch.setattr(prefill.Prefill, "chunk", counted)
        yield chunks


def ids_of(count: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 97, (count,), generator=generator).tolist())


def hosts(name: str, ids: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Without a cache, so that an attached model does not take the loop."""
    prompt, options = torch.tensor([ids]), {"eos_token_id": None, "use_cache": False}
    out = host(name, prompt, torch.ones_like(prompt), max_new_tokens=count, **options)
    return tuple(out[0, len(ids) :].tolist())


def ask(engine: structures.Engine, ids: tuple[int, ...], count: int, **options: Any) -> Any:
    item = GenerationRequest(
        ids,
        max_new_tokens=count,
        stop_token_ids=(),
        sampling=Sampling(logprobs=True, top_logprobs=8),
        **options,
    )
    handle = engine.submit(item)
    events = drain(engine)[handle, 0]
    values = [(e.logprob, *(t.logprob for t in e.top_logprobs)) for e in events]
    return tuple(tokens(events)), values


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2 windowed"])
def test_the_next_turn_computes_its_own_tokens_only(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, more = ids_of(30, 1), ids_of(11, 2)
    said = hosts(name, first, 9)
    second = (*first, *said, *more)
    wanted = hosts(name, second, 8)
    with engine_of(name, slots=3) as engine, filled(monkeypatch) as chunks:
        assert ask(engine, first, 9)[0] == said
        warm = ask(engine, second, 8)
        assert warm[0] == wanted
        assert chunks == [(0, 30), (38, 12)]  # the last token was never read
        cold = ask(engine, second, 8, reuse_prefix=False)
        assert chunks[2:] == [(0, 50)]
    assert cold[0] == wanted
    torch.testing.assert_close(torch.tensor(warm[1]), torch.tensor(cold[1]), atol=2e-4, rtol=0)


def test_a_second_warm_run_repeats_the_first_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    first, more = ids_of(30, 1), ids_of(11, 2)
    with engine_of("llama", slots=2) as engine, filled(monkeypatch) as chunks:
        said, cold_values = ask(engine, first, 9)
        again = ask(engine, first, 9)
        assert again == (said, cold_values)
        assert chunks == [(0, 30)]  # the same prompt again needs nothing
        second = (*first, *said, *more)
        warm = ask(engine, second, 8)
        assert ask(engine, second, 8) == warm  # straight away
        assert ask(engine, first, 9) == (said, cold_values)  # after going back
        third = ask(engine, second, 8)
    assert third[0] == warm[0]
    assert chunks[1][0] == 38


def test_an_answer_that_a_template_changes_costs_what_is_behind_the_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, more = ids_of(30, 1), ids_of(11, 2)
    said = hosts("llama", first, 9)
    second = (*first, *said[:4], 5, *more)
    assert said[4] != 5
    with engine_of("llama", slots=2) as engine, filled(monkeypatch) as chunks:
        ask(engine, first, 9)
        assert ask(engine, second, 6)[0] == hosts("llama", second, 6)
    assert chunks == [(0, 30), (34, 12)]


def test_a_common_beginning_alone_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    system = ids_of(25, 3)
    with engine_of("llama", slots=2) as engine, filled(monkeypatch) as chunks:
        for seed in range(4):
            prompt = (*system, *ids_of(7, 50 + seed))
            assert ask(engine, prompt, 5)[0] == hosts("llama", prompt, 5)
    assert chunks == [(0, 32)] * 4


def test_conversations_keep_apart_and_the_oldest_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts = [ids_of(12 + i, i) for i in range(4)]
    said = [hosts("llama", ids, 5) for ids in starts]
    nexts = [(*ids, *out, 7, 8) for ids, out in zip(starts, said, strict=True)]
    with engine_of("llama", slots=3) as engine, filled(monkeypatch) as chunks:
        for ids, out in zip(starts, said, strict=True):
            assert ask(engine, ids, 5)[0] == out
        chunks.clear()
        for index in (3, 1, 2, 0):
            assert ask(engine, nexts[index], 4)[0] == hosts("llama", nexts[index], 4)
    begun = [start for start, _ in chunks]
    assert begun == [len(starts[i]) + 4 for i in (3, 1, 2)] + [0]


def test_turns_that_run_side_by_side_are_those_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = [ids_of(9 + 4 * i, i) for i in range(5)]
    with engine_of("qwen3", slots=5) as engine, filled(monkeypatch) as chunks:
        turns = list(starts)
        for turn in range(3):
            items = [
                GenerationRequest(ids, max_new_tokens=4 + index, stop_token_ids=())
                for index, ids in enumerate(turns)
            ]
            handles = [engine.submit(item) for item in items]
            found = drain(engine)
            for index, handle in enumerate(handles):
                out = tokens(found[handle, 0])
                assert tuple(out) == hosts("qwen3", turns[index], 4 + index)
                turns[index] = (*turns[index], *out, 10 + turn)
    assert [start for start, _ in chunks].count(0) == 5
    assert [count for _, count in chunks[5:]] == [2] * 10


def test_the_same_prompt_runs_beside_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ids_of(20, 5)
    with engine_of("llama", slots=4) as engine, filled(monkeypatch) as chunks:
        handles = [
            engine.submit(GenerationRequest(ids, max_new_tokens=6, stop_token_ids=()))
            for _ in range(4)
        ]
        found = drain(engine)
    assert all(tuple(tokens(found[h, 0])) == hosts("llama", ids, 6) for h in handles)
    assert chunks == [(0, 20)]


def test_weights_written_in_place_end_every_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    mine: Any = copy.deepcopy(model("llama"))
    ids = ids_of(20, 5)
    engine = structures.decode_engine(mine, max_len=64, slots=2)
    loop = structures.decode_loop(mine, max_len=64)
    prompt = torch.tensor([ids])
    with filled(monkeypatch) as chunks:
        before = ask(engine, ids, 6)[0]
        loop.generate(prompt, max_new_tokens=6, reuse_prefix=True)
        with torch.no_grad():
            mine.model.layers[0].mlp.down_proj.weight.mul_(-1)
        after = ask(engine, ids, 6)[0]
        looped = loop.generate(prompt, max_new_tokens=6, reuse_prefix=True, eos_token_id=())
        assert chunks == [(0, 20)] * 4
        structures.attach(mine).detach()
        structures.attach(mine)
        ask(engine, ids, 6)
        assert chunks == [(0, 20)] * 5
    assert after != before
    assert tuple(looped[0, 20:].tolist()) == after


def test_a_cancelled_prompt_is_gone_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flash_rt.structures.loops.joining.CHUNK", 16)
    ids = ids_of(60, 5)
    with engine_of("llama", slots=2) as engine, filled(monkeypatch) as chunks:
        handle = engine.submit(GenerationRequest(ids, max_new_tokens=6))
        engine.step()
        engine.step()
        engine.cancel(handle)
        drain(engine)
        assert ask(engine, ids, 6)[0] == hosts("llama", ids, 6)
    assert [start for start, _ in chunks] == [0, 16, 32, 48]


def test_the_loop_goes_on_from_its_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    first, more = ids_of(30, 1), ids_of(11, 2)
    said = hosts("llama", first, 9)
    second = (*first, *said, *more)
    wanted = hosts("llama", second, 8)
    with loop_of("llama") as loop, filled(monkeypatch) as chunks:

        def run(ids: tuple[int, ...], count: int, **options: Any) -> tuple[int, ...]:
            out = loop.generate(
                torch.tensor([ids]), max_new_tokens=count, eos_token_id=(), **options
            )
            return tuple(out[0, len(ids) :].tolist())

        assert run(first, 9, reuse_prefix=True) == said
        assert run(second, 8, reuse_prefix=True) == wanted
        assert run(second, 8, reuse_prefix=True) == wanted
        assert chunks == [(0, 30), (38, 12)]
        assert run(second, 8) == wanted  # without it nothing is used, and nothing kept
        assert run(second, 8, reuse_prefix=True) == wanted
        assert chunks[2:] == [(0, 50)] * 2
        drawn = run(second, 8, reuse_prefix=True, do_sample=True, seed=4)
        assert drawn == run(second, 8, do_sample=True, seed=4)


def test_rows_of_a_batch_go_on_each_from_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [ids_of(12, 1), ids_of(12, 2)]
    with loop_of("llama", batch_size=3) as loop, filled(monkeypatch) as chunks:
        ids = torch.tensor(rows)
        out = loop.generate(ids, max_new_tokens=5, eos_token_id=(), reuse_prefix=True)
        longer = torch.cat([out, torch.tensor([[5, 6], [7, 8]])], dim=1)
        again = loop.generate(longer, max_new_tokens=5, eos_token_id=(), reuse_prefix=True)
    assert chunks == [(0, 12), (0, 12), (16, 3), (16, 3)]
    for row in range(2):
        wanted = hosts("llama", tuple(longer[row].tolist()), 5)
        assert tuple(again[row, longer.shape[1] :].tolist()) == wanted


@pytest.mark.parametrize(
    ("held", "prompt", "asked", "length"),
    [
        ((1, 2, 3, 4), 2, (1, 2, 3, 4, 5), 4),
        ((1, 2, 3, 4), 2, (1, 2, 3, 9, 5), 3),
        ((1, 2, 3, 4), 2, (1, 2, 3, 4), 3),
        ((1, 2, 3, 4), 3, (1, 2, 9, 4, 5), 0),
        ((1, 2, 3, 4), 4, (1, 2, 3), 0),
        ((), 0, (1, 2), 0),
    ],
)
def test_how_much_of_a_row_is_used(held: Any, prompt: int, asked: Any, length: int) -> None:
    prefixes = Prefixes(2)
    prefixes.hold(1, held, prompt=prompt)
    assert prefixes.match(asked, [0, 1]).length == length
    assert prefixes.match(asked, [0]).length == 0
    assert prefixes.match(asked, [0, 1], reuse=False).length == 0
    prefixes.forget()
    assert prefixes.match(asked, [0, 1]).length == 0
