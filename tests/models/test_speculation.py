"""Drafts never change an answer, and pay where the text repeats."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from decoders import host, model, prompt
from engines import drain, tokens
from test_decode_loop import Recorder, loop_of
from test_decode_loop_sampling import Words

from flash_rt import structures
from flash_rt.structures.loops import depth
from flash_rt.structures.loops.depth import Costs, Depth
from flash_rt.structures.loops.repeats import Repeats


@pytest.fixture
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify in every step, of every width in turn."""
    widths = iter(range(10**9))

    def best(self: Costs, expected: dict[int, float], room: int) -> int:
        fits = [w - 1 for w in depth.WIDTHS if w - 1 <= room]
        return fits[next(widths) % len(fits)] if fits else 0

    monkeypatch.setattr(Costs, "_best", best)


def repetitive(width: int) -> torch.Tensor:
    """A prompt in which things come again."""
    ids, _ = prompt(1, 12)
    return ids.repeat(1, width // 12 + 1)[:, :width]


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "phi3 partial rotary"])
@pytest.mark.parametrize("width", [3, 30])
def test_greedy_tokens_are_those_of_plain_steps(name: str, width: int) -> None:
    ids = repetitive(width)
    wanted = host(name, ids, torch.ones_like(ids), max_new_tokens=60, eos_token_id=None)
    attached = structures.attach(model(name))
    try:
        loop = structures.decode_loop(model(name), max_len=128, draft="lookup")
        for _ in range(2):
            assert torch.equal(loop.generate(ids, max_new_tokens=60, eos_token_id=()), wanted)
        assert loop.speculation.verified > 0
    finally:
        attached.detach()


FEW = {40: 7.0, 41: 7.5, 42: 7.0}  # so that a random model says things again
SETTINGS: list[dict[str, Any]] = [
    {"do_sample": True, "seed": 5, "logit_bias": FEW},
    {"do_sample": True, "seed": 6, "temperature": 0.3, "top_k": 8, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.1, "frequency_penalty": 0.05, "logit_bias": FEW},
    {"do_sample": True, "seed": 7, "presence_penalty": 0.5, "logit_bias": FEW},
    {"min_new_tokens": 20, "eos_token_id": list(range(20, 28))},
]


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("settings", SETTINGS)
def test_draws_are_those_of_plain_steps(settings: dict[str, Any]) -> None:
    ids = repetitive(40)
    options = {"max_new_tokens": 50, "eos_token_id": (), **settings}
    with loop_of("llama") as plain:
        wanted = plain.generate(ids, **options)
        loop = structures.decode_loop(model("llama"), max_len=128, draft="lookup")
        found = loop.generate(ids, **options)
        counts = loop.speculation
    assert torch.equal(found, wanted)
    assert counts.verified > 0
    if settings.get("logit_bias"):
        assert 0 < counts.accepted < counts.drafted


@pytest.mark.usefixtures("_always")
def test_ends_limits_streams_and_prefixes_are_those_of_plain_steps() -> None:
    ids = repetitive(40)
    with loop_of("llama") as plain:
        loop = structures.decode_loop(model("llama"), max_len=128, draft="lookup")
        free = plain.generate(ids, max_new_tokens=88, eos_token_id=())
        assert torch.equal(loop.generate(ids, eos_token_id=()), free)  # to the last position
        for count in range(1, 12):
            found = loop.generate(ids, max_new_tokens=count, eos_token_id=())
            assert torch.equal(found, free[:, : 40 + count])
        end = int(free[0, 60])
        first = free[0, 40:].tolist().index(end)
        stopped = loop.generate(ids, max_new_tokens=80, eos_token_id=end)
        assert torch.equal(stopped, free[:, : 40 + first + 1])
        recorder = Recorder()
        text = f" {int(free[0, 55])} {int(free[0, 56])}"
        options: dict[str, Any] = {"stop_strings": text, "tokenizer": Words()}
        wanted = plain.generate(ids, max_new_tokens=80, eos_token_id=(), **options)
        found = loop.generate(ids, max_new_tokens=80, eos_token_id=(), streamer=recorder, **options)
        assert torch.equal(found, wanted)
        assert recorder.puts == [ids[0].tolist(), *([i] for i in found[0, 40:].tolist())]
        assert recorder.ended == 1
        again = loop.generate(found, max_new_tokens=9, eos_token_id=(), reuse_prefix=True)
        assert torch.equal(again, plain.generate(found, max_new_tokens=9, eos_token_id=()))
        more = loop.generate(again, max_new_tokens=9, eos_token_id=(), reuse_prefix=True)
        assert torch.equal(more, plain.generate(again, max_new_tokens=9, eos_token_id=()))
        with_logprobs = loop.generate_with_logprobs(ids, max_new_tokens=9, eos_token_id=())
        assert torch.equal(with_logprobs.sequences, free[:, :49])


def test_rows_of_a_batch_are_decoded_plainly() -> None:
    ids, mask = prompt(2, 9)
    wanted = host("llama", ids, mask, max_new_tokens=9, eos_token_id=None)
    attached = structures.attach(model("llama"))
    try:
        loop = structures.decode_loop(model("llama"), max_len=64, batch_size=2, draft="lookup")
        assert torch.equal(loop.generate(ids, max_new_tokens=9, eos_token_id=()), wanted)
        assert loop.speculation.verified == 0
    finally:
        attached.detach()


def test_another_draft_is_refused() -> None:
    with pytest.raises(ValueError, match='draft must be "lookup" or a model, got .medusa.'):
        structures.decode_loop(model("llama"), max_len=64, draft="medusa")
    with pytest.raises(TypeError, match='decode_loop: draft must be "lookup" or a model, got 5'):
        structures.decode_loop(model("llama"), max_len=64, draft=5)
    with pytest.raises(ValueError, match="decode_engine: draft must be .*, got LlamaForCausalLM$"):
        structures.decode_engine(model("llama"), max_len=64, draft=model("llama"))


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 4, "logit_bias": FEW}])
def test_the_engine_drafts_for_an_answer_that_is_alone(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    queue = Repeats.queue

    def counted(self: Repeats, count: int, way: str) -> bool:
        runs.append(count)
        return queue(self, count, way)

    monkeypatch.setattr(Repeats, "queue", counted)
    sampling = structures.Sampling(**settings)
    items = [
        structures.GenerationRequest(
            repetitive(width)[0], max_new_tokens=count, stop_token_ids=(), sampling=sampling
        )
        for width, count in ((40, 60), (25, 30), (41, 87), (30, 1), (30, 2))
    ]
    stop = structures.GenerationRequest(
        repetitive(40)[0], max_new_tokens=80, stop_token_ids=tuple(range(40, 60))
    )
    attached = structures.attach(model("llama"))
    try:
        plain = structures.decode_engine(model("llama"), max_len=128, slots=3)
        engine = structures.decode_engine(model("llama"), max_len=128, slots=3, draft="lookup")
        engine.warm_up()
        recorded = engine.graphs_recorded
        for item in (*items, stop):  # one after the other
            wanted, found = (e.submit(item) for e in (plain, engine))
            assert tokens(drain(engine)[found, 0]) == tokens(drain(plain)[wanted, 0])
        assert runs and {*runs} == {1, 3, 7}
        assert engine.graphs_recorded == recorded
        handles = [[e.submit(item) for item in items] for e in (plain, engine)]  # and all at once
        answers = [drain(e) for e in (plain, engine)]
        for one, other in zip(*handles, strict=True):
            assert tokens(answers[0][one, 0]) == tokens(answers[1][other, 0])
    finally:
        attached.detach()


@functools.cache
def near(name: str) -> Any:
    """A model that agrees with ``name`` often, not always."""
    twin = copy.deepcopy(model(name))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in twin.model.layers[1].parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * 0.05 * parameter.abs().mean())
    return twin


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("settings", [{}, SETTINGS[0], SETTINGS[3]])
def test_drafts_of_a_model_change_nothing(settings: dict[str, Any]) -> None:
    ids, _ = prompt(1, 20)
    options = {"max_new_tokens": 60, "eos_token_id": (), **settings}
    with loop_of("llama") as plain:
        wanted = plain.generate(ids, **options)
        draft = copy.deepcopy(near("llama"))
        loop = structures.decode_loop(model("llama"), max_len=128, draft=draft)
        for _ in range(2):
            assert torch.equal(loop.generate(ids, **options), wanted)
        counts = loop.speculation
        assert counts.verified > 0
        assert 0 < counts.accepted <= counts.drafted
        full = loop.generate(ids, eos_token_id=())
        assert torch.equal(full, plain.generate(ids, eos_token_id=()))
        more = loop.generate(full[:, :90], max_new_tokens=9, eos_token_id=(), reuse_prefix=True)
        assert torch.equal(more, plain.generate(full[:, :90], max_new_tokens=9, eos_token_id=()))
        assert loop.memory_bytes > plain.memory_bytes
        loop.reset()
        assert loop.memory_bytes == 0
        assert torch.equal(loop.generate(ids, **options), wanted)


def test_the_model_itself_as_draft_is_always_right() -> None:
    ids, _ = prompt(1, 20)
    options: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": (), "do_sample": True}
    with loop_of("llama") as plain:
        loop = structures.decode_loop(
            model("llama"), max_len=128, draft=copy.deepcopy(near("llama"))
        )
        mine = copy.deepcopy(model("llama"))
        structures.attach(mine).detach()
        same = structures.decode_loop(model("llama"), max_len=128, draft=mine)
        for _ in range(20):
            same._depth.saw_verified(7, 7)
        wanted = plain.generate(ids, seed=1, **options)
        assert torch.equal(same.generate(ids, seed=1, **options), wanted)
        assert same.speculation.accepted == same.speculation.drafted > 0
        assert torch.equal(loop.generate(ids, seed=1, **options), wanted)


@pytest.mark.usefixtures("_always")
def test_a_draft_model_that_moves_is_recorded_again() -> None:
    ids, _ = prompt(1, 20)
    options: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": ()}
    draft = copy.deepcopy(near("llama"))
    with loop_of("llama") as plain:
        wanted = plain.generate(ids, **options)
        loop = structures.decode_loop(model("llama"), max_len=128, draft=draft)
        for _ in range(3):
            assert torch.equal(loop.generate(ids, **options), wanted)
            for layer in draft.model.layers:
                weight = layer.mlp.up_proj.weight.detach().clone()
                layer.mlp.up_proj.weight = torch.nn.Parameter(weight)
        [session] = loop._sessions._kept.values()
        names = {key[0] for key in session._recorded if str(key[0]).startswith("draft")}
        assert len(names) == 1


@pytest.mark.usefixtures("_always")
def test_a_request_inside_another_drafts_by_the_same_model_and_leaves_nothing() -> None:
    ids, _ = prompt(1, 20)
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": ()}
    inner: list[torch.Tensor] = []

    class Asking(Recorder):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.puts) in (3, 6):
                inner.append(loop.generate(ids[:, :7], **options))

    with loop_of("llama") as plain:
        wanted, within = plain.generate(ids, **options), plain.generate(ids[:, :7], **options)
        loop = structures.decode_loop(
            model("llama"), max_len=128, draft=copy.deepcopy(near("llama"))
        )
        for _ in range(2):
            assert torch.equal(loop.generate(ids, streamer=Asking(), **options), wanted)
        assert len(inner) == 4 and all(torch.equal(found, within) for found in inner)
        [session] = loop._sessions._kept.values()
        names = {key[0] for key in session._recorded if str(key[0]).startswith("draft")}
        assert len(names) == 1


def test_a_loop_that_is_reset_within_a_request_holds_nothing_behind_it() -> None:
    ids, _ = prompt(1, 20)
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": ()}
    sessions: list[weakref.ref[Any]] = []

    class Resetting(Recorder):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.puts) == 4:
                for each in (loop._sessions, loop.draft_sessions):
                    sessions.extend(map(weakref.ref, each._kept.values()))
                loop.reset()

    with loop_of("llama") as plain:
        wanted = plain.generate(ids, **options)
        loop = structures.decode_loop(
            model("llama"), max_len=128, draft=copy.deepcopy(near("llama"))
        )
        assert torch.equal(loop.generate(ids, streamer=Resetting(), **options), wanted)
        gc.collect()
        assert len(sessions) == 2 and [found() for found in sessions] == [None, None]
        assert torch.equal(loop.generate(ids, **options), wanted)


def test_a_draft_that_does_not_pay_stops_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Depth, "choose", lambda self, room: 0)
    ids, _ = prompt(1, 9)
    other = copy.deepcopy(model("qwen3"))
    with loop_of("llama", max_len=512) as plain:
        wanted = plain.generate(ids, max_new_tokens=400, eos_token_id=())
        loop = structures.decode_loop(model("llama"), max_len=512, draft=other)
        assert torch.equal(loop.generate(ids, max_new_tokens=400, eos_token_id=()), wanted)
        counts = loop.speculation
    assert counts.verified == counts.drafted == 3  # behind 32, 64 and 128 plain tokens
    assert 400 - 1 - counts.steps == counts.verified + counts.accepted


def test_a_draft_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="draft must have the model's 128 ids, got 101"):
        structures.decode_loop(
            copy.deepcopy(model("llama")),
            max_len=64,
            draft=copy.deepcopy(model("llama three layers, odd sizes")),
        )


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "temperature": 0.3}])
def test_generate_with_prompt_lookup_runs_on_the_loop(settings: dict[str, Any]) -> None:
    ids = repetitive(40)
    mask = torch.ones_like(ids)
    plan = structures.attach(model("llama"))
    try:
        torch.manual_seed(1)
        wanted = host("llama", ids, mask, max_new_tokens=40, **settings)
        torch.manual_seed(1)
        lookup = {"prompt_lookup_num_tokens": 5}
        streamer = Recorder()
        found = host("llama", ids, mask, max_new_tokens=40, streamer=streamer, **lookup, **settings)
        assert plan.generation.looped == 2
        between = host("llama", ids, mask, max_new_tokens=9, no_repeat_ngram_size=3, **lookup)
        assert plan.generation.between == 1
        assert between.shape == (1, 49)
    finally:
        plan.detach()
    assert torch.equal(found, wanted)
    assert streamer.ended == 1 and streamer.puts[1:] == [[i] for i in found[0, 40:].tolist()]


def test_generate_with_an_assistant_is_the_hosts() -> None:
    ids, mask = prompt(1, 9)
    wanted = host("llama", ids, mask, max_new_tokens=12)
    plan = structures.attach(model("llama"))
    try:
        options = {"assistant_model": near("llama"), "max_new_tokens": 12}
        assert torch.equal(host("llama", ids, mask, **options), wanted)
        assert plan.generation.looped == 0
    finally:
        plan.detach()
