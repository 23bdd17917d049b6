"""Draws, penalties, bias, grammars and logprobs of the engine, against the host's logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from decoders import model
from engines import drain, engine_of, request, tokens

from flash_rt import structures
from flash_rt.structures import Sampling
from flash_rt.structures.kernels import family
from flash_rt.structures.loops.controls import check_controls

VOCABULARY = 128


def by_hand(
    name: str, prompt: tuple[int, ...], settings: Sampling, count: int, stops: tuple[int, ...] = ()
) -> tuple[list[int], list[torch.Tensor]]:
    """Tokens drawn from the host's own logits with the ``sampling`` family, and those logits."""
    sampling = family("sampling")

    def row(value: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([value], dtype=dtype)

    ids, real, integer = list(prompt), torch.float32, torch.int32
    occurrences = torch.zeros(1, VOCABULARY, dtype=integer)
    sampling.record_prompt(occurrences, torch.tensor([ids]), torch.tensor([len(ids)]))
    state = dict(
        tokens=torch.zeros(1, 64, dtype=torch.int64),
        counts=row(0, integer),
        lengths=row(len(prompt) - 1, integer),
        finished=row(False, torch.bool),
        next_ids=row(0, torch.int64),
    )
    seen = []
    for _ in range(count):
        with torch.no_grad():
            logits = model(name)(torch.tensor([ids])).logits[:, -1].float()
        seen.append(logits[0])
        sampling.sample_step(
            logits,
            **state,
            eos=torch.tensor(stops, dtype=torch.int64),
            max_new=row(count, integer),
            temperature=row(settings.temperature, real),
            seed=row(settings.seed or 0, torch.int64),
            top_k=row(settings.top_k, integer),
            top_p=row(settings.top_p, real),
            min_p=row(settings.min_p, real),
            min_new=row(settings.min_new_tokens, integer),
            repetition_penalty=row(settings.repetition_penalty, real),
            presence_penalty=row(settings.presence_penalty, real),
            frequency_penalty=row(settings.frequency_penalty, real),
            occurrences=occurrences,
            bias_ids=torch.tensor([[*settings.logit_bias]], dtype=torch.int64).view(1, -1),
            bias_values=torch.tensor([[*settings.logit_bias.values()]]).view(1, -1),
            pad_id=0,
        )
        ids.append(int(state["next_ids"]))
        if bool(state["finished"]):
            break
    return ids[len(prompt) :], seen


SETTINGS = [
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.7, top_k=9, seed=2),
    Sampling(temperature=1.3, top_p=0.8, seed=3),
    Sampling(temperature=1.0, min_p=0.05, seed=2**63 - 1),
    Sampling(repetition_penalty=1.5),
    Sampling(temperature=1.0, presence_penalty=0.9, frequency_penalty=0.4, seed=5),
    Sampling(logit_bias={7: 4.0, 9: -float("inf")}),
    Sampling(temperature=0.9, top_k=30, top_p=0.9, logit_bias={5: 2.0}, seed=8),
]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_draws_are_those_from_the_hosts_logits_beside_any_others(name: str) -> None:
    requests = [
        request(4 + 5 * i, i, max_new_tokens=10 + i, sampling=settings)
        for i, settings in enumerate(SETTINGS)
    ]
    with engine_of(name, slots=5) as engine:
        handles = [engine.submit(item) for item in requests]
        found = drain(engine)
    for item, handle in zip(requests, handles, strict=True):
        count = item.max_new_tokens or 0
        wanted, _ = by_hand(name, tuple(item.prompt_ids), item.sampling, count)
        assert tokens(found[handle, 0]) == wanted


def test_answers_of_one_request_draw_apart_and_the_first_by_its_seed() -> None:
    settings = Sampling(temperature=1.0, seed=11)
    with engine_of("llama", slots=4) as engine:
        several = engine.submit(request(8, max_new_tokens=12, sampling=settings, n=6))
        one = engine.submit(request(8, max_new_tokens=12, sampling=settings))
        unseeded = [
            engine.submit(request(8, max_new_tokens=12, sampling=Sampling(temperature=1.0)))
            for _ in range(2)
        ]
        found = drain(engine)
    answers = [tuple(tokens(found[several, i])) for i in range(6)]
    assert answers[0] == tuple(tokens(found[one, 0]))
    assert len(set(answers)) == 6
    assert tokens(found[unseeded[0], 0]) != tokens(found[unseeded[1], 0])


def test_stop_ids_are_forbidden_before_the_least_number_of_tokens() -> None:
    settings = Sampling(temperature=1.0, seed=4, min_new_tokens=6)
    stops = tuple(range(10, 18))
    item = request(8, max_new_tokens=40, sampling=settings, stop_token_ids=stops)
    wanted, _ = by_hand("llama", tuple(item.prompt_ids), settings, 40, stops)
    with engine_of("llama") as engine:
        handle = engine.submit(item)
        events = drain(engine)[handle, 0]
    assert tokens(events) == wanted
    assert not set(wanted[:6]) & set(stops)
    assert events[-1].finish_reason == "stop" and wanted[-1] in stops


def test_logprobs_are_of_the_models_own_softmax() -> None:
    settings = Sampling(temperature=0.8, seed=3, top_k=5, logprobs=True, top_logprobs=4)
    item = request(8, max_new_tokens=7, sampling=settings)
    wanted, logits = by_hand("llama", tuple(item.prompt_ids), settings, 7)
    with engine_of("llama", slots=3) as engine:
        engine.submit(request(5, max_new_tokens=9))
        handle = engine.submit(item)
        bare = engine.submit(request(6, max_new_tokens=3, sampling=Sampling(logprobs=True)))
        found = drain(engine)
    assert tokens(found[handle, 0]) == wanted
    for event, row in zip(found[handle, 0], logits, strict=True):
        values = row.log_softmax(-1)
        assert event.logprob == pytest.approx(float(values[event.token_id]), abs=1e-4)
        best = values.topk(4)
        assert [t.token_id for t in event.top_logprobs] == best.indices.tolist()
        found_values = torch.tensor([t.logprob for t in event.top_logprobs])
        torch.testing.assert_close(found_values, best.values, atol=1e-4, rtol=0)
    assert all(e.logprob is not None and e.top_logprobs == () for e in found[bare, 0])


class Digits:
    """Allows ids of a repeating pattern, and ends after ``count``."""

    def __init__(self, count: int) -> None:
        self.seen: list[int] = []
        self._count = count

    def allowed(self) -> torch.Tensor | None:
        words = torch.zeros(4, dtype=torch.int32)
        words[len(self.seen) % 4] = 0b1010
        return words

    def accept(self, token_id: int) -> bool:
        self.seen.append(token_id)
        return len(self.seen) == self._count


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_decides_what_may_come_and_when_it_ends(temperature: float) -> None:
    masks: list[Digits] = []

    def make() -> Digits:
        masks.append(Digits(7))
        return masks[-1]

    settings = Sampling(temperature=temperature, seed=1)
    free = request(9, 3, max_new_tokens=12)
    with engine_of("llama", slots=3) as engine:
        before = engine.submit(free)
        handle = engine.submit(request(6, max_new_tokens=30, sampling=settings, mask=make, n=2))
        found = drain(engine)
        alone = engine.submit(free)
        assert tokens(drain(engine)[alone, 0]) == tokens(found[before, 0])
    for index in range(2):
        events = found[handle, index]
        ids = tokens(events)
        assert events[-1].finish_reason == "stop" and len(ids) == 7
        assert all(t // 32 == i % 4 and t % 32 in (1, 3) for i, t in enumerate(ids))
    assert sorted(m.seen for m in masks) == sorted(tokens(found[handle, i]) for i in range(2))


def test_a_grammar_that_fails_ends_its_own_answer_only() -> None:
    class Failing(Digits):
        def accept(self, token_id: int) -> bool:
            if len(self.seen) == 2:
                raise ValueError("no such state")
            return super().accept(token_id)

    class Wide(Digits):
        def allowed(self) -> torch.Tensor | None:
            return torch.zeros(5, dtype=torch.int32)

    free = request(9, 3, max_new_tokens=12)
    with engine_of("llama") as engine:
        failing = engine.submit(request(6, max_new_tokens=30, mask=lambda: Failing(9)))
        wide = engine.submit(request(6, max_new_tokens=30, mask=lambda: Wide(9)))
        other = engine.submit(free)
        found = drain(engine)
        alone = engine.submit(free)
        assert tokens(drain(engine)[alone, 0]) == tokens(found[other, 0])
    assert found[failing, 0][-1].finish_reason == "error"
    assert str(found[failing, 0][-1].error) == "no such state"
    assert "must return int32 [4]" in str(found[wide, 0][-1].error)


@pytest.fixture
def small() -> Iterator[structures.Engine]:
    with engine_of("llama", max_len=32) as engine:
        yield engine


def test_settings_with_too_many_entries_are_refused(small: structures.Engine) -> None:
    many = tuple(range(9))
    with pytest.raises(ValueError, match="at most 8 stop ids, got 9"):
        small.submit(request(4, stop_token_ids=many, sampling=Sampling(min_new_tokens=1)))
    with pytest.raises(ValueError, match="logit_bias must have at most 512 ids, got 513"):
        check_controls("submit", Sampling(logit_bias=dict.fromkeys(range(513), 1.0)), ())
    with pytest.raises(ValueError, match="ids must be from 0 to 127, got 128"):
        small.submit(request(4, sampling=Sampling(logit_bias={128: 1.0})))
