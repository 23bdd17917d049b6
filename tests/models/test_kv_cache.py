"""FP8 caches of the loops: near the host, half the bytes, the same answer whatever came before."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import zoo
from comparing import portrait
from decoders import host, model, prompt
from engines import alone, drain, engine_of, request, tokens
from test_decode_loop import loop_of

from flash_rt import structures
from flash_rt.structures import kv_format
from flash_rt.structures.loops.sessions import decoder_device, plain_tensors

FP8 = torch.float8_e4m3fn
NAMES = ["llama", "qwen3", "gemma2", "phi3", "llama one head"]


def logits_of(loop: Any, ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Logits behind each prefix of the last 8 of ``ids``: of the prompt, then of decode steps."""
    sessions, found = loop._sessions, []
    with plain_tensors(decoder_device(loop._model, sessions.spec)), sessions.use(1, 64) as session:
        session.prefixes.forget()
        session.state.begin(max_new=1, eos=())
        session.prefill.run(0, ids[:-8])
        found.append(session.step.logits[0].clone())
        for position in range(ids.shape[0] - 8, ids.shape[0]):
            session.state.lengths.fill_(position)
            session.state.next_ids.copy_(ids[position])
            session.step.forward()
            found.append(session.step.logits[0].clone())
    return torch.stack(found), session


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_near_those_of_the_full_cache(name: str) -> None:
    ids = prompt(1, 40)[0][0]
    with loop_of(name, max_len=64) as loop:
        wanted, full = logits_of(loop, ids)
    with loop_of(name, max_len=64, kv_cache="fp8") as loop:
        actual, session = logits_of(loop, ids)
    near = torch.cosine_similarity(actual.double(), wanted.double(), dim=-1)
    assert float(near.min()) > 0.99, near
    assert not torch.equal(actual, wanted)
    for cache, kept in zip(session.state.k + session.state.v, full.state.k + full.state.v,
                           strict=True):  # fmt: skip
        assert cache.dtype == FP8 and cache.shape == kept.shape
        assert cache.element_size() == 1
    assert session.state.memory_bytes < full.state.memory_bytes


@pytest.mark.parametrize("name", NAMES)
def test_what_is_stored_is_within_a_sixteenth(name: str) -> None:
    ids = prompt(1, 40)[0][0]
    with loop_of(name, max_len=64) as loop:
        full = logits_of(loop, ids)[1].state
    with loop_of(name, max_len=64, kv_cache="fp8") as loop:
        state = logits_of(loop, ids)[1].state
    scales = state.scales[0]  # keys and values of the first layer do not depend on the cache
    for cache, kept, scale in ((state.k, full.k, "k_scale"), (state.v, full.v, "v_scale")):
        assert torch.equal(torch.exp2(torch.log2(scales[scale]).round()), scales[scale])
        read = kv_format.widened(cache[0], scales[scale], torch.float32)[:, :, :40]
        error = (read - kept[0][:, :, :40].float()).abs()
        assert bool(
            (error <= kept[0][:, :, :40].float().abs() / 16 + scales[scale].max() / 512).all()
        )
        assert float(cache[0][:, :, :40].float().abs().max()) < kv_format.LARGEST


def test_answers_do_not_depend_on_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    short, longer = prompt(1, 9), prompt(1, 45)
    with loop_of("llama", kv_cache="fp8") as loop:
        first = loop.generate(*short, max_new_tokens=20)
        loop.generate(*longer, max_new_tokens=20)
        assert torch.equal(loop.generate(*short, max_new_tokens=20), first)
        wanted = loop.generate(*longer, max_new_tokens=20)
    with loop_of("llama", kv_cache="fp8", batch_size=2) as loop:
        both = torch.cat((longer[0], prompt(1, 45)[0].flip(1)))
        assert torch.equal(loop.generate(both, max_new_tokens=20)[:1], wanted)
    monkeypatch.setattr("flash_rt.structures.loops.prefill.CAPTURED", 7)
    monkeypatch.setattr("flash_rt.structures.loops.prefill.CHUNK", 11)
    with loop_of("llama", kv_cache="fp8") as loop:  # a prompt in pieces sees what is stored
        assert torch.equal(loop.generate(*longer, max_new_tokens=20), wanted)


def test_prefix_reuse() -> None:
    ids, _ = prompt(1, 30)
    with loop_of("llama", kv_cache="fp8") as loop:
        turn = loop.generate(ids, max_new_tokens=8, eos_token_id=())
        longer = torch.cat((turn, prompt(1, 5)[0]), dim=1)
        cold = loop.generate(longer, max_new_tokens=12, eos_token_id=())
        loop.generate(ids, max_new_tokens=8, eos_token_id=(), reuse_prefix=True)
        warm = loop.generate(longer, max_new_tokens=12, eos_token_id=(), reuse_prefix=True)
    assert torch.equal(warm, cold)


def test_engine_answers_as_the_loop() -> None:
    requests = [request(width, max_new_tokens=12) for width in (5, 30, 17)]
    with engine_of("llama", kv_cache="fp8") as engine:
        handles = [engine.submit(item) for item in requests]
        found = drain(engine)
    plan = structures.attach(model("llama"), kv_cache="fp8")
    try:
        loop = structures.decode_loop(model("llama"), max_len=128)
        for handle, item in zip(handles, requests, strict=True):
            ids = torch.as_tensor(item.prompt_ids)[None]
            out = loop.generate(ids, max_new_tokens=12, eos_token_id=())
            assert tokens(found[handle, 0]) == out[0, ids.shape[1] :].tolist()
    finally:
        plan.detach()
    assert len(alone("llama", requests)) == 3


def test_attach_decides_for_generate_and_loops() -> None:
    ids, mask = prompt(1, 20)
    with loop_of("qwen3", kv_cache="fp8") as loop:
        wanted = loop.generate(ids, mask, max_new_tokens=20)
    plan = structures.attach(model("qwen3"), kv_cache="fp8")
    try:
        assert "kv_cache=fp8" in str(plan.settings)
        assert torch.equal(host("qwen3", ids, mask, max_new_tokens=20), wanted)
        assert plan.generation is not None and plan.generation.sessions is not None
        (session,) = plan.generation.sessions._kept.values()
        assert session.state.k[0].dtype == FP8
        loop = structures.decode_loop(model("qwen3"), max_len=64)
        assert torch.equal(loop.generate(ids, mask, max_new_tokens=20), wanted)
        with pytest.raises(
            ValueError, match="attach: model is attached with precision='auto'.*kv_cache=fp8, asked"
        ):
            structures.attach(model("qwen3"))
    finally:
        plan.detach()


@pytest.mark.parametrize("open_it", ["attach", "plan", "decode_loop", "decode_engine"])
def test_other_formats_are_errors(open_it: str) -> None:
    sizes: dict[str, Any] = {} if open_it in ("attach", "plan") else {"max_len": 64}
    where = "attach" if open_it == "plan" else open_it
    with pytest.raises(ValueError, match=f"{where}: kv_cache must be \"fp8\" or None, got 'int8'"):
        getattr(structures, open_it)(model("llama"), kv_cache="int8", **sizes)


@pytest.mark.parametrize("open_it", [structures.attach, structures.plan])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt2", "GPT2LMHeadModel: one token embedding is wanted, found ['wte', 'wpe']"),
        ("qwen3_moe", "Qwen3MoeForCausalLM: 2 of 2 decoder layers are not bound:"),
        ("vit", "ViTModel: one child with a list of layers is wanted"),
        ("t5", "T5ForConditionalGeneration: one child with a list of layers is wanted"),
    ],
)
def test_a_format_for_a_model_without_a_loop_is_an_error(
    open_it: Any, name: str, reason: str
) -> None:
    animal = zoo.make(name)
    before = portrait(animal)
    rule = "attach: kv_cache must be None for a model that the decode loop cannot run, got 'fp8'; "
    with pytest.raises(ValueError, match=re.escape(rule + reason)):
        open_it(animal, kv_cache="fp8")
    assert portrait(animal) == before
