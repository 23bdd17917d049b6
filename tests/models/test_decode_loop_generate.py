"""``model.generate`` of an attached model: the loop's where it can be, else the host's and told."""

from __future__ import annotations

from typing import Any

import decoders
import pytest
import torch
import zoo
from decoders import host, model, prompt
from generating import notes

from flash_rt import structures


@pytest.mark.parametrize("name", decoders.DECODERS)
def test_greedy_generate_is_the_hosts_and_runs_on_the_loop(name: str) -> None:
    ids, mask = prompt(2, 19, padding=(13, 0))
    wanted = host(name, ids, mask, max_new_tokens=15)
    plan = structures.attach(model(name))
    try:
        assert torch.equal(host(name, ids, mask, max_new_tokens=15), wanted)
        assert (plan.generation.looped, plan.generation.between) == (1, 0)
        assert "requests run on the decode loop (1 requests so far" in notes(plan)
    finally:
        plan.detach()


@pytest.mark.parametrize("name", ["llama", "gemma3", "granite"])
def test_processors_run_between_steps(name: str) -> None:
    ids, mask = prompt(2, 9, padding=(0, 4))
    options: list[dict[str, Any]] = [
        {"no_repeat_ngram_size": 2},
        {"no_repeat_ngram_size": 3, "repetition_penalty": 1.4},
        {"min_new_tokens": 8, "eos_token_id": list(range(3, 50))},
        {"bad_words_ids": [[5], [7, 8]]},
        {"no_repeat_ngram_size": 2, "max_time": 1000.0},
    ]
    wanted = [host(name, ids, mask, max_new_tokens=12, **o) for o in options]
    plan = structures.attach(model(name))
    try:
        for option, tokens in zip(options, wanted, strict=True):
            assert torch.equal(host(name, ids, mask, max_new_tokens=12, **option), tokens)
        assert plan.generation.between == len(options)
    finally:
        plan.detach()


IN_STEPS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"min_new_tokens": 8, "eos_token_id": list(range(3, 11))},
    {"min_length": 14, "eos_token_id": list(range(3, 11)), "repetition_penalty": 1.2},
    {"eos_token_id": list(range(3, 50))},
    {"max_time": 1000.0},
]


@pytest.mark.parametrize("name", ["llama", "gemma3", "granite"])
def test_processors_that_are_settings_run_in_the_steps(name: str) -> None:
    ids, mask = prompt(2, 9, padding=(0, 4))
    wanted = [host(name, ids, mask, max_new_tokens=12, **o) for o in IN_STEPS]
    plan = structures.attach(model(name))
    try:
        for option, tokens in zip(IN_STEPS, wanted, strict=True):
            assert torch.equal(host(name, ids, mask, max_new_tokens=12, **option), tokens)
        assert (plan.generation.looped, plan.generation.between) == (len(IN_STEPS), 0)
    finally:
        plan.detach()


DRAWS: list[dict[str, Any]] = [
    {"top_k": 0},
    {"temperature": 0.7, "top_k": 12},
    {"top_p": 0.8, "min_p": 0.02},
    {"repetition_penalty": 1.3, "temperature": 1.2},
]


@pytest.mark.parametrize("option", DRAWS)
def test_draws_follow_torchs_seed_and_the_hosts_distribution(option: dict[str, Any]) -> None:
    """The first token, drawn often: chi-square against what the host draws from."""
    ids, mask = prompt(1, 7)
    options = {"do_sample": True, **option}
    scores = host(
        "llama", ids, mask, max_new_tokens=1, return_dict_in_generate=True, output_scores=True,
        **options,
    ).scores[0][0]  # fmt: skip
    exact = scores.softmax(-1)
    plan = structures.attach(model("llama"))
    try:
        torch.manual_seed(5)
        drawn = [
            host("llama", ids, mask, max_new_tokens=1, num_return_sequences=8, **options)[:, -1]
            for _ in range(150)
        ]
        torch.manual_seed(5)
        again = host("llama", ids, mask, max_new_tokens=1, num_return_sequences=8, **options)
        assert plan.generation.looped == 151
    finally:
        plan.detach()
    assert torch.equal(again[:, -1], drawn[0])
    counts = torch.bincount(torch.cat(drawn), minlength=exact.numel()).float()
    expected = exact * counts.sum()
    assert counts[exact == 0].sum() == 0
    common = expected >= 5
    pairs = [(counts[common], expected[common])]
    rest = (counts[~common].sum(), expected[~common].sum())
    if rest[1] >= 5:
        pairs.append((rest[0][None], rest[1][None]))
    statistic = float(sum(((c - e) ** 2 / e).sum() for c, e in pairs))
    freedom = sum(c.numel() for c, _ in pairs) - 1
    tail = torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2))
    assert float(tail) > 0.001


def test_draws_behind_processors_of_the_hosts_are_its_own(llama: tuple[Any, Any]) -> None:
    ids, mask = prompt(2, 7)
    options: dict[str, Any] = {"do_sample": True, "no_repeat_ngram_size": 2, "top_k": 20}
    torch.manual_seed(3)
    ours = host("llama", ids, mask, max_new_tokens=9, **options)
    assert llama[1].generation.between == 1
    llama[1].detach()
    torch.manual_seed(3)
    assert torch.equal(ours, host("llama", ids, mask, max_new_tokens=9, **options))


def words() -> Any:
    """A tokenizer whose token i is the word w<i>."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(WordLevel({f"w{i}": i for i in range(zoo.VOCAB)}, unk_token="w0"))
    raw.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="w0", eos_token="w2", padding_side="left"
    )


def test_pipeline_runs_on_the_loop() -> None:
    from transformers import pipeline

    tokenizer = words()

    def answers() -> list[str]:
        generator = pipeline(
            "text-generation", model=model("llama"), tokenizer=tokenizer, device="cpu"
        )
        options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}
        one = generator("w5 w6 w7", **options)
        two = generator(["w5 w6 w7 w8", "w9"], batch_size=2, **options)
        return [one[0]["generated_text"], *(t[0]["generated_text"] for t in two)]

    wanted = answers()
    plan = structures.attach(model("llama"))
    try:
        assert answers() == wanted
        assert plan.generation.looped >= 2
    finally:
        plan.detach()
