"""What is changed on a model after attach is followed, or is the host's; never passed over."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoders import model, prompt
from torch.nn.utils.prune import l1_unstructured

from flash_rt import structures

IDS, MASK = prompt(2, 9, padding=(0, 4))


def tokens(animal: Any) -> torch.Tensor:
    generated: torch.Tensor = animal.generate(
        IDS, attention_mask=MASK, max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    return generated


def logits(animal: Any, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return animal(IDS, attention_mask=MASK, **options).logits


def same(ours: Any, theirs: Any) -> None:
    assert torch.equal(tokens(ours), tokens(theirs))
    for _ in range(2):
        for options in ({"use_cache": True}, {"use_cache": False}):
            torch.testing.assert_close(
                logits(ours, **options), logits(theirs, **options), rtol=1e-3, atol=1e-3
            )


def on_layers(path: str, attribute: str, value: Any) -> Callable[[Any], Any]:
    def change(animal: Any) -> None:
        for layer in animal.model.layers:
            setattr(layer.get_submodule(path) if path else layer, attribute, value)

    return change


def on(path: str, attribute: str, value: Any) -> Callable[[Any], Any]:
    return lambda animal: setattr(animal.get_submodule(path), attribute, value)


def patched(path: str) -> Callable[[Any], Any]:
    def change(animal: Any) -> None:
        module = animal.get_submodule(path)
        forward = module.forward

        def mutant(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            if isinstance(result, torch.Tensor):
                return result.roll(1, -1)
            result["logits"] = result["logits"].roll(1, -1)
            return result

        mutant.__wrapped__ = forward  # type: ignore[attr-defined]
        module.forward = mutant

    return change


def slower_rotary(animal: Any) -> None:
    animal.model.rotary_emb.inv_freq.mul_(0.3)


def more_tokens(animal: Any) -> None:
    torch.manual_seed(3)
    animal.resize_token_embeddings(150)
    animal.eval()


def larger_embeddings(animal: Any) -> None:
    for name, buffer in animal.named_buffers():
        if "embed_scale" in name:
            buffer.mul_(2)


class Scaled(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 1.5 * self.inner(ids)


def scaled_embeddings(animal: Any) -> None:
    animal.model.embed_tokens = Scaled(animal.model.embed_tokens).eval()


def pruned_embeddings(animal: Any) -> None:
    l1_unstructured(animal.model.embed_tokens, "weight", amount=0.5)


FOLLOWED: list[tuple[str, Callable[[Any], Any]]] = [
    ("llama", slower_rotary),
    ("llama", on("model.rotary_emb", "attention_scaling", 1.7)),
    ("llama tied", lambda animal: animal.lm_head.weight.mul_(1.4).add_(0.1)),
    ("llama", more_tokens),
]
REFUSED: list[tuple[str, Callable[[Any], Any], str]] = [
    ("llama", on("model.norm", "variance_epsilon", 0.5), "model.norm.variance_epsilon was 1e-06"),
    ("llama", on_layers("input_layernorm", "variance_epsilon", 0.5), "and is 0.5"),
    ("llama", on_layers("self_attn", "scaling", 0.9), "self_attn.scaling was 0.25"),
    ("mistral", lambda animal: setattr(animal.config, "sliding_window", 2), "sliding_window was 5"),
    ("granite", on_layers("", "residual_multiplier", 2.0), "residual_multiplier was"),
    ("granite", lambda animal: setattr(animal.config, "logits_scaling", -3.0), "another scale"),
    ("gemma2", lambda animal: setattr(animal.config, "final_logit_softcapping", 1.0), "or cap"),
    (
        "gemma3",
        larger_embeddings,
        "the embedding's factor was 8.0 when the loop was proven and is 16.0",
    ),
    ("llama", scaled_embeddings, "model.embed_tokens was an embedding and holds no table"),
    ("llama", pruned_embeddings, "model.embed_tokens was an embedding and holds no table"),
    ("llama", patched("model.layers.0.mlp"), "layers.0.mlp carries its own instance forward"),
    ("llama", patched("model.norm"), "model.norm carries its own instance forward"),
    ("llama", patched(""), "LlamaForCausalLM carries its own instance forward"),
]


@pytest.mark.parametrize(("name", "change"), FOLLOWED)
def test_new_values_are_used(name: str, change: Callable[[Any], Any]) -> None:
    ours, theirs = copy.deepcopy(model(name)), copy.deepcopy(model(name))
    plan = structures.attach(ours)
    same(ours, theirs)
    before = plan.generation.looped
    for animal in (ours, theirs):
        with torch.no_grad():
            change(animal)
    same(ours, theirs)
    assert plan.generation.looped == before + 1
    plan.detach()
    same(ours, theirs)


@pytest.mark.parametrize(("name", "change", "reason"), REFUSED)
def test_another_formula_is_the_hosts(name: str, change: Callable[[Any], Any], reason: str) -> None:
    ours, theirs = copy.deepcopy(model(name)), copy.deepcopy(model(name))
    plan = structures.attach(ours)
    loop = structures.decode_loop(ours, max_len=64, batch_size=2)
    same(ours, theirs)
    for animal in (ours, theirs):
        with torch.no_grad():
            change(animal)
    same(ours, theirs)
    assert any(reason in line for line in plan.generation.hosted)
    with pytest.raises(RuntimeError, match=reason.replace(".", r"\.")):
        loop.generate(IDS, MASK, max_new_tokens=3)
    plan.detach()
    same(ours, theirs)


def test_a_number_that_is_put_back_brings_the_loop_back() -> None:
    ours = copy.deepcopy(model("llama"))
    plan = structures.attach(ours)
    wanted = tokens(ours)
    ours.model.norm.variance_epsilon, eps = 0.5, ours.model.norm.variance_epsilon
    tokens(ours)
    ours.model.norm.variance_epsilon = eps
    assert torch.equal(tokens(ours), wanted)
    assert (plan.generation.looped, plan.generation.hosted.total()) == (2, 1)
