"""Draws, penalties, stop strings and log-probabilities of the loop's ``generate``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoders import host, model, prompt
from test_decode_loop import Recorder, loop_of
from test_engine_sampling import by_hand

from flash_rt.structures import Sampling


class Words:
    """A tokenizer whose token i reads " i"."""

    def decode(self, ids: list[int], **options: Any) -> str:
        return "".join(f" {i}" for i in ids)


OPTIONS: list[dict[str, Any]] = [
    {"do_sample": True, "seed": 3},
    {"do_sample": True, "seed": 4, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.5, "presence_penalty": 0.2, "frequency_penalty": 0.3},
    {"logit_bias": {17: 5.0, 4: -float("inf")}, "do_sample": True, "seed": 9},
]


@pytest.mark.parametrize("name", ["qwen3", "granite"])
@pytest.mark.parametrize("options", OPTIONS)
def test_rows_draw_from_the_hosts_logits_whatever_is_beside_them(
    name: str, options: dict[str, Any]
) -> None:
    ids, mask = prompt(3, 9, padding=(0, 3, 6))
    given = {k: v for k, v in options.items() if k != "do_sample"}
    if options.get("do_sample"):
        given.setdefault("temperature", 1.0)
    settings = Sampling(**given)
    with loop_of(name, batch_size=3) as loop:
        for _ in range(2):
            tokens = loop.generate(ids, mask, max_new_tokens=10, eos_token_id=(), **options)
        alone = loop.generate(ids[:1], max_new_tokens=10, eos_token_id=(), **options)
    assert torch.equal(alone[0], tokens[0])
    for row, padding in enumerate((0, 3, 6)):
        seeded = Sampling(**{**given, "seed": settings.seed_of(row, 0)})
        wanted, _ = by_hand(name, tuple(ids[row, padding:].tolist()), seeded, 10)
        assert tokens[row, 9:].tolist() == wanted


def test_torchs_seed_decides_where_none_is_given() -> None:
    ids, _ = prompt(1, 7)
    with loop_of("llama") as loop:
        torch.manual_seed(1)
        first, second = (loop.generate(ids, max_new_tokens=9, do_sample=True) for _ in range(2))
        torch.manual_seed(1)
        again = loop.generate(ids, max_new_tokens=9, do_sample=True)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_several_answers_to_each_prompt() -> None:
    ids, mask = prompt(2, 8, padding=(3, 0))
    options: dict[str, Any] = {"max_new_tokens": 7, "eos_token_id": (), "do_sample": True}
    recorder = Recorder()
    with loop_of("llama", batch_size=6) as loop:
        tokens = loop.generate(
            ids, mask, num_return_sequences=3, seed=2, streamer=recorder, **options
        )
        greedy = loop.generate(ids, mask, num_return_sequences=3, max_new_tokens=7, eos_token_id=())
    settings = Sampling(temperature=1.0, seed=2)
    for row in range(6):
        seeded = Sampling(temperature=1.0, seed=settings.seed_of(row, 0))
        start = (3, 0)[row // 3]
        wanted, _ = by_hand("llama", tuple(ids[row // 3, start:].tolist()), seeded, 7)
        assert tokens[row, 8:].tolist() == wanted
    assert recorder.puts[0] == ids.flatten().tolist()
    wanted_greedy = host("llama", ids, mask, max_new_tokens=7, eos_token_id=None)
    assert torch.equal(greedy, wanted_greedy.repeat_interleave(3, 0))


def test_rows_stop_behind_the_token_that_completes_a_stop_string() -> None:
    ids, mask = prompt(2, 6)
    free = host("llama", ids, mask, max_new_tokens=20, eos_token_id=None)
    new = free[:, 6:].tolist()
    stop = f"{str(new[0][3])[-1]} {new[0][4]} "  # over tokens 3, 4 and into 5
    with loop_of("llama", batch_size=2) as loop:
        recorder = Recorder()
        tokens = loop.generate(
            ids,
            max_new_tokens=20,
            eos_token_id=(),
            pad_token_id=1,
            stop_strings=[stop, "never"],
            tokenizer=Words(),
            streamer=recorder,
        )
        again = loop.generate(ids, max_new_tokens=20, eos_token_id=())
    assert torch.equal(again, free)
    text = Words().decode(new[0])
    count = next(n for n in range(1, 21) if stop in Words().decode(new[0][:n]))
    assert stop in text and count < 20
    assert tokens[0, 6:].tolist() == new[0][:count] + [1] * (tokens.shape[1] - 6 - count)
    length = tokens.shape[1] - 6
    other = next((n for n in range(1, 21) if stop in Words().decode(new[1][:n])), 20)
    assert tokens[1, 6 : 6 + min(other, length)].tolist() == new[1][: min(other, length)]
    assert recorder.puts[1:] == tokens[:, 6:].t().tolist()


def test_the_loop_ends_when_every_row_has_its_stop_string() -> None:
    ids, mask = prompt(1, 6)
    free = host("llama", ids, mask, max_new_tokens=20, eos_token_id=None)[0, 6:].tolist()
    stop = f" {free[2]} {free[3]}"
    with loop_of("llama") as loop:
        tokens = loop.generate(
            ids, max_new_tokens=20, eos_token_id=(), stop_strings=stop, tokenizer=Words()
        )
    count = next(n for n in range(1, 21) if stop in Words().decode(free[:n]))
    assert tokens[0, 6:].tolist() == free[:count]


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 1, "temperature": 0.5}])
def test_logprobs_are_of_the_models_own_softmax(options: dict[str, Any]) -> None:
    ids, _ = prompt(2, 8)
    with loop_of("llama", batch_size=3) as loop:
        found = loop.generate_with_logprobs(
            ids, max_new_tokens=6, eos_token_id=(), top_logprobs=3, **options
        )
        plain = loop.generate(ids, max_new_tokens=6, eos_token_id=(), **options)
        none = loop.generate_with_logprobs(ids, max_new_tokens=2, eos_token_id=(), **options)
    assert torch.equal(found.sequences, plain)
    with torch.no_grad():
        logits = model("llama")(found.sequences).logits[:, 7:-1].float()
    wanted = logits.log_softmax(-1)
    chosen = wanted.gather(2, found.sequences[:, 8:, None])[..., 0]
    torch.testing.assert_close(found.logprobs, chosen, atol=1e-4, rtol=0)
    best = wanted.topk(3)
    assert torch.equal(found.top_ids, best.indices)
    torch.testing.assert_close(found.top_logprobs, best.values, atol=1e-4, rtol=0)
    assert none.top_ids.shape == (2, 2, 0)
    with pytest.raises(ValueError, match="top_logprobs must be 0 to 20, got 30"):
        loop.generate_with_logprobs(ids, top_logprobs=30)


def test_end_tokens_wait_for_min_new_tokens() -> None:
    ids, mask = prompt(1, 6)
    options: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": [*range(10, 18)]}
    wanted = host("llama", ids, mask, min_new_tokens=9, **options)
    with loop_of("llama") as loop:
        tokens = loop.generate(ids, min_new_tokens=9, **options)
    assert torch.equal(tokens, wanted)
