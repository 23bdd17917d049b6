"""Requests and states of a model that ``model.generate`` leaves to the host, and says so."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import zoo
from decoders import host, model, prompt
from generating import notes

from flash_rt import structures

HOSTED: list[tuple[dict[str, Any], str]] = [
    ({"cache_implementation": "static"}, "cache_implementation='static'"),
    ({"use_cache": False}, "use_cache=False"),
    ({"num_beams": 2}, ""),
    ({"return_dict_in_generate": True}, "return_dict_in_generate=True"),
]


@pytest.mark.parametrize(("option", "reason"), HOSTED)
def test_what_the_loop_does_not_do_is_the_hosts(option: dict[str, Any], reason: str) -> None:
    ids, mask = prompt(1, 7)

    def run() -> torch.Tensor:
        torch.manual_seed(11)
        result: Any = host("llama", ids, mask, max_new_tokens=9, **option)
        tokens: torch.Tensor = getattr(result, "sequences", result)
        return tokens

    wanted = run()
    plan = structures.attach(model("llama"))
    try:
        assert torch.equal(run(), wanted)
        assert plan.generation.looped == 0
        assert reason in notes(plan)
    finally:
        plan.detach()


def test_a_cache_of_the_callers_is_filled_as_by_the_host(llama: tuple[Any, Any]) -> None:
    from transformers import DynamicCache, StaticCache

    attached, plan = llama
    name = "cache" if "cache" in inspect.signature(attached.forward).parameters else None
    ids, mask = prompt(1, 7)
    for make in (
        lambda: DynamicCache(config=attached.config),
        lambda: StaticCache(config=attached.config, max_cache_len=32),
    ):
        cache = make()
        tokens = host("llama", ids, mask, max_new_tokens=5, **{name or "past_key_values": cache})
        assert int(cache.get_seq_length()) == 7 + 4
        assert torch.equal(tokens, host("llama", ids, mask, max_new_tokens=5))
    assert "the caller passed a cache" in notes(plan)


IDS, MASK = prompt(1, 7)
# What transformers lets through to the decoding itself, where the host has its own answer or error.
ODD: list[tuple[dict[str, Any], str]] = [
    ({"inputs": IDS.float()}, "input_ids are not int64"),
    ({"inputs": IDS.to(torch.int16)}, "input_ids are not int64"),
    ({"inputs": IDS[None], "attention_mask": None}, "input_ids are not int64"),
    ({"inputs": IDS + 1000}, "outside the vocabulary"),
    ({"inputs": IDS - 500}, "outside the vocabulary"),
    ({"inputs": IDS[:0], "attention_mask": None}, "a batch of 0"),
    ({"position_ids": torch.arange(5)[None]}, "position_ids do not count"),
    ({"position_ids": torch.arange(8)[None]}, "position_ids do not count"),
    ({"position_ids": torch.arange(21).view(3, 7)}, "position_ids do not count"),
    ({"position_ids": torch.arange(7)[None] + 3}, "position_ids do not count"),
    ({"position_ids": [[0, 1, 2, 3, 4, 5, 6]]}, "position_ids do not count"),
    ({"attention_mask": torch.ones(1, 8)}, "position_ids do not count"),
    ({"attention_mask": torch.zeros(1, 7)}, "the attention mask is not padding on the left"),
    ({"prefill_chunk_size": 0}, "prefill_chunk_size=0"),
]


@pytest.mark.parametrize(("arguments", "reason"), ODD)
def test_odd_requests_get_the_hosts_answer_or_error(arguments: dict[str, Any], reason: str) -> None:
    attached = copy.deepcopy(model("llama"))
    call = {"inputs": IDS, "attention_mask": MASK, "max_new_tokens": 5, "do_sample": False}

    def answer(options: dict[str, Any]) -> Any:
        try:
            return attached.generate(**{**call, "pad_token_id": 0, **options}).tolist()
        except (RuntimeError, IndexError, AttributeError, ValueError):
            return "an error"

    wanted, usual = answer(arguments), answer({})
    plan = structures.attach(attached)
    assert answer(arguments) == wanted
    assert plan.generation.looped == 0
    assert reason in notes(plan)
    assert answer({}) == usual
    assert plan.generation.looped == 1


def test_more_than_eight_rows_and_right_padding_are_the_hosts(llama: tuple[Any, Any]) -> None:
    ids, mask = prompt(9, 4)
    assert host("llama", ids, mask, max_new_tokens=3).shape == (9, 7)
    ids, mask = prompt(2, 6)
    mask[0, -2:] = 0
    host("llama", ids, mask, max_new_tokens=3)
    text = notes(llama[1])
    assert "a batch of 9; the loop runs up to 8 rows" in text
    assert "the attention mask is not padding on the left" in text
    assert llama[1].generation.looped == 0


def test_training_and_hooks_are_the_hosts(llama: tuple[Any, Any]) -> None:
    attached, plan = llama
    ids, mask = prompt(1, 7)
    wanted = host("llama", ids, mask, max_new_tokens=5)
    calls: list[int] = []
    handle = attached.model.layers[0].mlp.register_forward_hook(lambda *a: calls.append(1))
    assert torch.equal(host("llama", ids, mask, max_new_tokens=5), wanted)
    assert len(calls) == 5
    handle.remove()
    attached.train()
    try:
        assert host("llama", ids, mask, max_new_tokens=5).shape == (1, 12)
    finally:
        attached.eval()
    text = notes(plan)
    assert "a forward hook is registered on model.layers.0.mlp" in text
    assert "the model is in training mode" in text
    assert plan.generation.looped == 1


def test_an_adapter_put_in_after_attach_is_the_hosts_until_it_is_taken_out() -> None:
    class Adapter(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1.5 * self.inner(x)

    mine = copy.deepcopy(model("llama"))
    ids, mask = prompt(1, 7)

    def run() -> torch.Tensor:
        tokens: torch.Tensor = mine.generate(
            ids, attention_mask=mask, max_new_tokens=8, do_sample=False
        )
        return tokens

    plain, attention = run(), mine.model.layers[0].self_attn
    attention.v_proj = Adapter(attention.v_proj).eval()
    adapted = run()
    attention.v_proj = attention.v_proj.inner
    plan = structures.attach(mine)
    assert torch.equal(run(), plain)
    attention.v_proj = Adapter(attention.v_proj).eval()
    assert torch.equal(run(), adapted)
    attention.v_proj = attention.v_proj.inner
    assert torch.equal(run(), plain)
    mine.double()
    assert torch.equal(run(), plain)
    mine.float()
    assert torch.equal(run(), plain)
    assert plan.generation.looped == 3
    text = notes(plan)
    assert "v_proj was a Linear when the loop was proven and is a Adapter" in text
    assert "parameters are torch.float64" in text
    assert not torch.equal(plain, adapted)


def test_detach_restores_generate_and_copies_are_hosts(llama: tuple[Any, Any]) -> None:
    attached, plan = llama
    cls = type(attached).__mro__
    ids, mask = prompt(1, 7)
    wanted = host("llama", ids, mask, max_new_tokens=5)
    twin = copy.deepcopy(attached)
    assert type(twin).generate is type(model("llama")).__mro__[2].generate
    tokens = twin.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert torch.equal(tokens, wanted)
    assert plan.generation.looped == 1
    assert type(attached).__name__ == "LlamaForCausalLM"
    plan.detach()
    assert len(type(attached).__mro__) == len(cls) - 2
    assert torch.equal(host("llama", ids, mask, max_new_tokens=5), wanted)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt2", "gpt_neox", "starcoder2", "falcon"])
def test_other_decoders_generate_on_the_host_and_say_why(name: str) -> None:
    animal: Any = zoo.shared(name)
    ids, mask = prompt(1, 7)
    arguments: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    wanted = animal.generate(ids, **arguments)
    plan = structures.attach(animal)
    try:
        assert torch.equal(animal.generate(ids, **arguments), wanted)
        assert "generate: the host's own code, because " in notes(plan)
        with pytest.raises(ValueError, match="cannot run on the loop: "):
            structures.decode_loop(animal, max_len=64)
    finally:
        plan.detach()
