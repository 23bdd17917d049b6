"""In bf16, on every device: batching, drafts and warm prompts change no token."""

from __future__ import annotations

import copy
from typing import Any

import decoders
import pytest
import torch
import zoo
from engines import drain, tokens
from test_decode_loop_dtypes import DEVICES, place

from flash_rt import structures
from flash_rt.structures import GenerationRequest, Sampling

FEW = {40: 7.0, 41: 7.5, 42: 7.0}
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.9, seed=1),
    Sampling(temperature=1.1, top_k=20, top_p=0.9, min_p=0.01, seed=2),
    Sampling(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1),
    Sampling(temperature=1.0, seed=3, logit_bias=FEW, min_new_tokens=4),
]


def made(device: str) -> Any:
    """A model whose heads are of a size that the kernels are built for."""
    torch.manual_seed(0)
    model = zoo.redraw(zoo.causal("Llama", head_dim=64, num_hidden_layers=2)())
    return model.eval().to(torch.bfloat16).to(device)


def options_of(sampling: Sampling) -> dict[str, Any]:
    """The loop's keywords for the same settings."""
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_new_tokens")
    found: dict[str, Any] = {name: getattr(sampling, name) for name in names}
    found["logit_bias"] = dict(sampling.logit_bias)
    if sampling.temperature:
        names = ("temperature", "top_k", "top_p", "min_p", "seed")
        found |= {"do_sample": True} | {name: getattr(sampling, name) for name in names}
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_answers_of_the_engine_are_those_of_the_loop(device: str) -> None:
    model = made(place(device))
    loop = structures.decode_loop(model, max_len=256)
    items = [
        GenerationRequest(
            decoders.prompt(1, 5 + 23 * i)[0][0],
            max_new_tokens=12 + 5 * i,
            stop_token_ids=(),
            sampling=sampling,
        )
        for i, sampling in enumerate([*SAMPLINGS, *SAMPLINGS[:3]])
    ]
    wanted = []
    for item in items:
        ids = torch.tensor([item.prompt_ids], device=device)
        limit, options = item.max_new_tokens, options_of(item.sampling)
        out = loop.generate(ids, max_new_tokens=limit, eos_token_id=(), **options)
        wanted.append(out[0, ids.shape[1] :].tolist())
    engine = structures.decode_engine(model, max_len=256, slots=5)
    engine.warm_up()
    for _ in range(2):
        handles = [engine.submit(item) for item in items]
        found = drain(engine)
        assert [tokens(found[handle, 0]) for handle in handles] == wanted
    structures.attach(model).detach()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["lookup", "model"])
def test_drafts_change_no_token(kind: str, device: str) -> None:
    model = made(place(device))
    draft: Any = "lookup"
    if kind == "model":
        draft = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in draft.model.layers[1].parameters():
                parameter.mul_(1.02)
    plain = structures.decode_loop(model, max_len=256)
    loop = structures.decode_loop(model, max_len=256, draft=draft)
    ids = decoders.prompt(1, 12)[0].repeat(1, 5).to(device)
    for sampling in SAMPLINGS:
        options = options_of(sampling)
        wanted = plain.generate(ids, max_new_tokens=90, eos_token_id=(), **options)
        for _ in range(2):
            found = loop.generate(ids, max_new_tokens=90, eos_token_id=(), **options)
            assert torch.equal(found, wanted)
    assert 0 < loop.speculation.accepted <= loop.speculation.drafted
    structures.attach(model).detach()


@pytest.mark.parametrize("device", DEVICES)
def test_a_warm_answer_repeats_bit_for_bit(device: str) -> None:
    model = made(place(device))
    loop = structures.decode_loop(model, max_len=512)
    options: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": (), "reuse_prefix": True}
    first = loop.generate_with_logprobs(decoders.prompt(1, 300)[0].to(device), **options)
    more = decoders.prompt(1, 31)[0].to(device)
    turn = torch.cat([first.sequences, more], dim=1)
    warm = loop.generate_with_logprobs(turn, top_logprobs=5, **options)
    again = loop.generate_with_logprobs(turn, top_logprobs=5, **options)
    assert all(torch.equal(one, other) for one, other in zip(warm, again, strict=True))
    options["reuse_prefix"] = False
    cold = loop.generate_with_logprobs(turn, top_logprobs=5, **options)
    # Behind the same first token; later ones may differ where two are near.
    torch.testing.assert_close(warm.logprobs[:, 0], cold.logprobs[:, 0], atol=0.05, rtol=0)
    torch.testing.assert_close(warm.top_logprobs[:, 0], cold.top_logprobs[:, 0], atol=0.05, rtol=0)
    structures.attach(model).detach()
