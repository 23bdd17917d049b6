"""What a host does around its layers is proven: a host that does something else is refused."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any

import decoders
import pytest
import torch
import zoo
from comparing import portrait
from decoders import model
from torch import nn
from torch.nn.utils.prune import l1_unstructured

from flash_rt import structures
from flash_rt.structures.loops.sdpa import causal_attention


def modeling(name: str) -> Any:
    return sys.modules[type(model(name)).__mro__[0].__module__]


def refusal(animal: Any) -> str:
    """Why the loop refuses a model; empty when it does not."""
    plan = structures.attach(animal)
    try:
        return plan.generation.refusal or ""
    finally:
        plan.detach()


@pytest.mark.parametrize("name", [*decoders.DECODERS, *decoders.VARIANTS])
def test_the_proof_passes_and_leaves_the_host_alone(name: str) -> None:
    before = portrait(model(name))
    assert refusal(model(name)) == ""
    assert portrait(model(name)) == before


def wrapped(cls: type, change: Callable[..., Any]) -> Callable[..., Any]:
    forward = cls.forward

    def mutant(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(self, forward, *args, **kwargs)

    mutant.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return mutant


def test_a_factor_on_the_embedding_that_no_one_names() -> None:
    class Doubled(nn.Embedding):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    animal: Any = zoo.make("llama")
    table = animal.model.embed_tokens
    animal.model.embed_tokens = Doubled(*table.weight.shape)
    assert "embedding: differs from the host by " in refusal(animal.eval())


def test_a_window_that_the_mask_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mistral", "gemma2"):
        module = modeling(name)
        with monkeypatch.context() as patch:
            patch.setattr(module, "create_sliding_window_causal_mask", module.create_causal_mask)
            assert "the host's mask is not causal with window 5" in refusal(model(name))


def test_a_window_that_the_attention_does_not_know() -> None:
    animal: Any = zoo.make("gemma2")
    animal.model.layers[0].self_attn.sliding_window = None
    assert "the host's mask is not causal with window None" in refusal(animal)


def test_positions_that_do_not_count_from_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(self: Any, forward: Any, x: Any, position_ids: Any, **kw: Any) -> Any:
        return forward(self, x, position_ids=position_ids * 2, **kw)

    cls = type(model("llama").model.rotary_emb)
    # The table is made by the same rotary, so only a model that calls it otherwise shows.
    model_cls = type(model("llama").model)

    def shifted(self: Any, forward: Any, *args: Any, **kw: Any) -> Any:
        return forward(self, *args, **{**kw, "position_ids": kw["position_ids"] + 1})

    monkeypatch.setattr(model_cls, "forward", wrapped(model_cls, shifted))
    assert "layer 0: cos: differs from the host by " in refusal(model("llama"))
    monkeypatch.undo()
    monkeypatch.setattr(cls, "forward", wrapped(cls, late))
    assert refusal(model("llama")) == ""


def test_layers_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(self: Any, forward: Any, *args: Any, **kw: Any) -> Any:
        kept = self._modules["layers"]
        self._modules["layers"] = nn.ModuleList([kept[1], kept[1]])
        try:
            return forward(self, *args, **kw)
        finally:
            self._modules["layers"] = kept

    cls = type(model("qwen3").model)
    monkeypatch.setattr(cls, "forward", wrapped(cls, backwards))
    assert "of 2 layers the host calls, in order, [1, 1]" in refusal(model("qwen3"))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [("granite", "logits_scaling", 2.0), ("gemma2", "final_logit_softcapping", 1.5)],
)
def test_the_head_follows_the_configuration(name: str, field: str, value: float) -> None:
    animal: Any = zoo.make(name)
    setattr(animal.config, field, value)
    plan = structures.attach(animal)
    head = plan.generation.spec.head
    plan.detach()
    assert head.scale * value == 1.0 if name == "granite" else head.soft_cap == value


def test_logits_that_are_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def tempered(self: Any, forward: Any, *args: Any, **kw: Any) -> Any:
        out = forward(self, *args, **kw)
        out.logits = out.logits * 0.9
        return out

    cls = type(model("llama"))
    monkeypatch.setattr(cls, "forward", wrapped(cls, tempered))
    assert "logits: differs from the host by 1.1e-01" in refusal(model("llama"))


def generated(animal: Any) -> torch.Tensor:
    ids, mask = decoders.prompt(1, 7)
    tokens: torch.Tensor = animal.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    return tokens


def weight_norm(path: str) -> Callable[[Any], Any]:
    normed = torch.nn.utils.parametrizations.weight_norm
    return lambda animal: normed(animal.get_submodule(path))


def pruned(path: str) -> Callable[[Any], Any]:
    return lambda animal: l1_unstructured(animal.get_submodule(path), "weight", amount=0.5)


def patched(path: str) -> Callable[[Any], Any]:
    def change(animal: Any) -> None:
        module = animal.get_submodule(path)
        forward = module.forward

        def mutant(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            if isinstance(result, torch.Tensor):
                return result.roll(1, -1)
            name = "logits" if hasattr(result, "logits") else "last_hidden_state"
            result[name] = result[name].roll(1, -1)
            return result

        mutant.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
        module.forward = mutant

    return change


def one_layer_twice(animal: Any) -> None:
    animal.model.layers[1] = animal.model.layers[0]


OWN_CODE = [
    (weight_norm("lm_head"), "no vocabulary projection"),
    (weight_norm("model.embed_tokens"), "its weight is computed and no parameter"),
    (weight_norm("model.layers.0.self_attn.q_proj"), "1 of 2 decoder layers are not bound"),
    (pruned("lm_head"), "no vocabulary projection"),
    (pruned("model.embed_tokens"), "its weight is computed and no parameter"),
    (pruned("model.layers.0.self_attn.q_proj"), "1 of 2 decoder layers are not bound"),
    (patched(""), "LlamaForCausalLM carries its own instance forward"),
    (patched("model"), "model carries its own instance forward"),
    (patched("lm_head"), "lm_head carries its own instance forward"),
    (one_layer_twice, "model.layers.1 is the same module as model.layers.0"),
]


@pytest.mark.parametrize(("change", "reason"), OWN_CODE)
def test_computed_weights_and_own_code_are_the_hosts(change: Any, reason: str) -> None:
    animal = copy.deepcopy(model("llama"))
    change(animal)
    animal.eval()
    wanted = generated(animal)
    plan = structures.attach(animal)
    assert torch.equal(generated(animal), wanted)
    assert reason in plan.generation.refusal
    assert plan.generation.looped == 0
    plan.detach()
    assert torch.equal(generated(animal), wanted)


def test_a_number_on_the_model_that_no_loop_reads() -> None:
    animal: Any = zoo.make("llama")
    animal.model.temperature = 0.7
    assert "no loop reads temperature = 0.7" in refusal(animal)


def test_a_refused_layer_is_named_with_its_reason() -> None:
    animal: Any = copy.deepcopy(model("llama"))
    animal.model.layers[1].self_attn.scale_by = 3.5
    reason = refusal(animal)
    assert "1 of 2 decoder layers are not bound" in reason
    assert "model.layers.1: self_attn: attribute scale_by = 3.5" in reason


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 3, 20])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (9, 9), (4, 9), (300, 310)])
def test_causal_attention(queries: int, keys: int, window: int | None, soft_cap: Any) -> None:
    generator = torch.Generator().manual_seed(queries)
    q = torch.randn(2, 6, queries, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(2, 2, keys, 8, generator=generator, dtype=torch.float64) for _ in "kv")
    got = causal_attention(q, k, v, scaling=0.4, window=window, soft_cap=soft_cap)
    wanted = torch.empty_like(q)
    for head in range(6):
        for row in range(queries):
            last = keys - queries + row
            first = 0 if window is None else max(0, last - window + 1)
            seen = slice(first, last + 1)
            scores = 0.4 * (k[:, head // 3, seen] @ q[:, head, row, :, None])[..., 0]
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            weights = scores.softmax(-1)[:, None]
            wanted[:, head, row] = (weights @ v[:, head // 3, seen])[:, 0]
    tolerance = 1e-5 if soft_cap is not None else 1e-12  # capped scores are kept in fp32
    assert float((got - wanted).abs().max()) < tolerance
