"""Attention and decoder layers: bound where host and spec agree, refused for every mutant."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import zoo
from comparing import FP32_TOLERANCE, deviation
from torch import nn

from flash_rt import structures
from flash_rt.structures.catalogue.attention import Attention
from flash_rt.structures.catalogue.decoder_layer import DecoderLayer
from flash_rt.structures.discover import Candidate, Discovery
from flash_rt.structures.region import Region

DECODERS = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "smollm3",
    "olmo2",
    "granite",
]
BOTH = [Attention(), DecoderLayer()]


def regions(model: Any, structure: Any) -> list[Region]:
    layers = model.model.layers
    if structure.name == "attention":
        return [Region(f"model.layers.{i}.self_attn", x.self_attn) for i, x in enumerate(layers)]
    return [Region(f"model.layers.{i}", x) for i, x in enumerate(layers)]


def settled(model: Any, structure: Any) -> list[Any]:
    discovery = Discovery()
    return [discovery.settle(region, structure) for region in regions(model, structure)]


@pytest.mark.parametrize("structure", BOTH, ids=lambda s: s.name)
@pytest.mark.parametrize("name", DECODERS)
def test_every_layer_of_a_dense_decoder_is_proven(name: str, structure: Any) -> None:
    assert all(isinstance(found, Candidate) for found in settled(zoo.shared(name), structure))


def spec_of(name: str, index: int = 0) -> Any:
    return settled(zoo.shared(name), DecoderLayer())[index].spec


def test_specs_hold_what_the_hosts_are_made_of() -> None:
    llama, gemma2, olmo2 = spec_of("llama"), spec_of("gemma2"), spec_of("olmo2")
    assert (llama.attention_norm.path, llama.attention_out_norm) == ("input_layernorm", None)
    assert gemma2.attention_out_norm.path == "post_attention_layernorm"
    assert gemma2.mlp_norm.path == "pre_feedforward_layernorm"
    assert gemma2.attention_norm.zero_centered
    config = zoo.shared("gemma2").config
    if config._attn_implementation == "eager":  # sdpa has no soft cap, and some versions choose it
        assert gemma2.attention.soft_cap == config.attn_logit_softcapping
    assert olmo2.attention_norm is None
    assert olmo2.mlp_out_norm.path == "post_feedforward_layernorm"
    assert olmo2.attention.norm_scope == "all"
    assert spec_of("qwen3").attention.norm_scope == "head"
    assert spec_of("phi3").attention.fused
    assert spec_of("phi3").mlp.gate.path == spec_of("phi3").mlp.up.path
    assert spec_of("granite").residual_scale == zoo.shared("granite").config.residual_multiplier
    assert spec_of("mistral").attention.window == zoo.shared("mistral").config.sliding_window
    rotaries = [
        found.spec.attention.rotary for found in settled(zoo.shared("smollm3"), DecoderLayer())
    ]
    wanted = ["half" if r else None for r in zoo.shared("smollm3").config.no_rope_layers]
    assert rotaries == wanted


# Mutants of what a class computes; its form stays.


def around(cls: type, mutate: Callable[..., Any]) -> Callable[..., Any]:
    forward = cls.forward

    @functools.wraps(forward)
    def mutant(self: Any, *args: Any, **kwargs: Any) -> Any:
        return mutate(self, forward, *args, **kwargs)

    return mutant


@contextmanager
def child_replaced(module: nn.Module, name: str, other: nn.Module) -> Iterator[None]:
    kept = module._modules[name]
    module._modules[name] = other
    try:
        yield
    finally:
        module._modules[name] = kept


def identity_layer(self: Any, forward: Any, hidden_states: torch.Tensor, **kw: Any) -> Any:
    return hidden_states


def scaled_layer(self: Any, forward: Any, hidden_states: torch.Tensor, **kw: Any) -> Any:
    return 1.001 * forward(self, hidden_states, **kw)


def no_mlp(self: Any, forward: Any, hidden_states: torch.Tensor, **kw: Any) -> Any:
    class Nothing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(x)

    with child_replaced(self, "mlp", Nothing()):
        return forward(self, hidden_states, **kw)


def norms_swapped(self: Any, forward: Any, hidden_states: torch.Tensor, **kw: Any) -> Any:
    first, *_, last = [n for n in self._modules if n.endswith("layernorm")]
    with child_replaced(self, first, self._modules[last]):
        return forward(self, hidden_states, **kw)


def forgets_the_cache(self: Any, forward: Any, *args: Any, **kw: Any) -> Any:
    names = ("past_key_values", "cache")
    return forward(self, *args, **{k: None if k in names else v for k, v in kw.items()})


def forgets_the_mask(self: Any, forward: Any, *args: Any, **kw: Any) -> Any:
    return forward(self, *args, **{k: v * 0 if k == "attention_mask" else v for k, v in kw.items()})


def other_scaling(self: Any, forward: Any, *args: Any, **kw: Any) -> Any:
    kept, self.scaling = self.scaling, 1.1 * self.scaling
    try:
        return forward(self, *args, **kw)
    finally:
        self.scaling = kept


def positions_shifted(self: Any, forward: Any, *args: Any, **kw: Any) -> Any:
    cos, sin = kw["position_embeddings"]
    kw["position_embeddings"] = (sin, cos)
    return forward(self, *args, **kw)


def heads_rolled(self: Any, forward: Any, *args: Any, **kw: Any) -> Any:
    class Rolled(nn.Module):
        def __init__(self, inner: nn.Module, size: int) -> None:
            super().__init__()
            self.inner, self.size = inner, size

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.roll(self.size, -1))

    with child_replaced(self, "o_proj", Rolled(self.o_proj, self.head_dim)):
        return forward(self, *args, **kw)


def no_qk_norm(self: Any, forward: Any, *args: Any, **kw: Any) -> Any:
    with child_replaced(self, "q_norm", nn.Identity()):
        return forward(self, *args, **kw)


def no_bias(self: Any, forward: Any, *args: Any, **kw: Any) -> Any:
    bias = self.q_proj._parameters["bias"]
    self.q_proj._parameters["bias"] = None
    try:
        return forward(self, *args, **kw)
    finally:
        self.q_proj._parameters["bias"] = bias


IN_LAYER = (identity_layer, scaled_layer, no_mlp, norms_swapped)
IN_ATTENTION = (
    *(forgets_the_cache, forgets_the_mask, other_scaling, positions_shifted, heads_rolled),
    *(no_qk_norm, no_bias),
)


def applies(mutate: Any, attention: Any) -> bool:
    if mutate is no_qk_norm:
        return hasattr(attention, "q_norm")
    if mutate is no_bias:
        projection = getattr(attention, "q_proj", None)
        return projection is not None and projection.bias is not None
    return mutate is not positions_shifted or getattr(attention, "use_rope", True)


@pytest.mark.parametrize("mutate", IN_LAYER)
@pytest.mark.parametrize("name", DECODERS)
def test_a_mutant_layer_is_refused(name: str, mutate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.shared(name)
    cls = type(model.model.layers[0])
    monkeypatch.setattr(cls, "forward", around(cls, mutate))
    for found in settled(model, DecoderLayer()):
        assert found.reason.startswith("meaning: ")


@pytest.mark.parametrize("mutate", IN_ATTENTION)
@pytest.mark.parametrize("name", DECODERS)
def test_a_mutant_attention_is_refused(
    name: str, mutate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.shared(name)
    attentions = [layer.self_attn for layer in model.model.layers]
    hit = [i for i, attention in enumerate(attentions) if applies(mutate, attention)]
    cls = type(attentions[0])
    monkeypatch.setattr(cls, "forward", around(cls, mutate))
    alone, layers = settled(model, Attention()), settled(model, DecoderLayer())
    for index in hit:
        assert alone[index].reason.startswith("meaning: ")
        assert not isinstance(layers[index], Candidate)


@pytest.mark.parametrize("name", DECODERS)
def test_without_rotary_positions_a_layer_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.shared(name)
    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, cos, sin, **kw: (q, k))
    for layer, found in zip(model.model.layers, settled(model, Attention()), strict=True):
        if getattr(layer.self_attn, "use_rope", True):
            assert found.reason.startswith("meaning: ")


def test_without_its_soft_cap_attention_is_bound_as_what_it_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = zoo.shared("gemma2")
    module = sys.modules[type(model).__module__]
    eager = module.eager_attention_forward

    def uncapped(*args: Any, softcap: Any = None, **kwargs: Any) -> Any:
        return eager(*args, **kwargs)

    monkeypatch.setattr(module, "eager_attention_forward", uncapped)
    assert settled(model, Attention())[0].spec.soft_cap is None


@pytest.mark.parametrize("name", DECODERS)
def test_an_unknown_scalar_is_a_refusal(name: str) -> None:
    model: Any = zoo.make(name)
    model.model.layers[0].self_attn.temperature = 0.7
    found = settled(model, Attention())[0]
    assert "temperature = 0.7" in found.reason


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 4, 9])
@pytest.mark.parametrize("name", DECODERS)
def test_attached_layers_agree_through_a_cache_with_padding(name: str, tokens: int) -> None:
    from transformers import DynamicCache

    model: Any = zoo.shared(name)
    ids = zoo.ids(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    names = inspect.signature(model.forward).parameters
    keyword = "cache" if "cache" in names else "past_key_values"  # the newer name came with 5.24

    def run() -> list[torch.Tensor]:
        cache = DynamicCache(config=model.config)
        outputs = []
        for start in range(0, ids.shape[1], tokens):
            stop = min(start + tokens, ids.shape[1])
            out = model(
                input_ids=ids[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=(mask[:, :stop].cumsum(-1) - 1).clamp_min(0)[:, start:stop],
                use_cache=True,
                **{keyword: cache},
            )
            outputs.append(out.logits[:, :, :] * mask[:, start:stop, None])
        return outputs

    host = run()
    plan = structures.attach(model)
    try:
        assert len(plan.bound("decoder_layer")) == len(model.model.layers)
        assert deviation(run(), host) < FP32_TOLERANCE
    finally:
        plan.detach()
