"""In half precision the loop chooses what an fp32 host would, as often as the host does itself."""

from __future__ import annotations

import os
from typing import Any

import decoders
import pytest
import torch
import zoo

from flash_rt import structures

DEVICES = ["cpu", "cuda"]


def place(device: str) -> str:
    if device == "cuda" and not torch.cuda.is_available():
        if os.environ.get("FLASH_RT_REQUIRE_GPU") == "1":
            pytest.fail("no GPU, and FLASH_RT_REQUIRE_GPU=1")
        pytest.skip("needs a CUDA GPU")
    return device


def model_in(name: str, dtype: torch.dtype, device: str) -> Any:
    build = {**decoders.DECODERS, **decoders.VARIANTS}[name]
    torch.manual_seed(0)
    return zoo.redraw(build()).eval().to(dtype).to(device)


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*decoders.DECODERS, *decoders.VARIANTS])
def test_chosen_tokens_are_the_best_within_the_dtypes_error(
    name: str, dtype: torch.dtype, device: str
) -> None:
    check_fidelity(model_in(name, dtype, place(device)), 21, device)


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "phi3 partial rotary"])
def test_long_prompts_in_pieces(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flash_rt.structures.loops.prefill.CHUNK", 200)
    check_fidelity(model_in(name, torch.bfloat16, place(device)), 430, device)


def check_fidelity(model: Any, width: int, device: str) -> None:
    ids, mask = decoders.prompt(2, width, padding=(9, 0))
    ids, mask = ids.to(device), mask.to(device)
    loop = structures.decode_loop(model, max_len=width + 24, batch_size=2)
    tokens = loop.generate(ids, mask, max_new_tokens=24, eos_token_id=())
    assert torch.equal(loop.generate(ids, mask, max_new_tokens=24, eos_token_id=()), tokens)
    structures.attach(model).detach()

    full = torch.cat([mask, mask.new_ones(2, 24)], dim=1)
    arguments = {
        "input_ids": tokens,
        "attention_mask": full,
        "position_ids": (full.cumsum(-1) - 1).clamp_min(0),
        "use_cache": False,
    }
    own = model(**arguments).logits.float()
    wide = model.float()(**arguments).logits
    # Logits that chose the new tokens; padding never did.
    own, wide = own[:, width - 1 : -1], wide[:, width - 1 : -1]
    error = float((own - wide).abs().max())
    chosen = wide.gather(-1, tokens[:, width:, None])[..., 0]
    lost = wide.amax(-1) - chosen
    assert float(lost.max()) <= 2 * 2 * error  # two logits, each off by at most twice the host's


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2"])
def test_rows_and_cache_sizes_do_not_change_the_tokens(name: str, device: str) -> None:
    model = model_in(name, torch.bfloat16, place(device))
    ids = decoders.prompt(8, 13)[0].to(device)
    options: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": ()}
    single = structures.decode_loop(model, max_len=64)
    alone = torch.cat([single.generate(row, **options) for row in ids.split(1)])
    eight = structures.decode_loop(model, max_len=64, batch_size=8)
    larger = structures.decode_loop(model, max_len=700, batch_size=3)
    assert torch.equal(eight.generate(ids, **options), alone)
    assert torch.equal(larger.generate(ids[3:6], **options), alone[3:6])
    structures.attach(model).detach()


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_every_way_to_the_loop_gives_the_same_tokens(name: str, device: str) -> None:
    from transformers import LogitsProcessor

    class Nothing(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores

    class Kept:
        def __init__(self) -> None:
            self.tokens: list[torch.Tensor] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens.append(value.reshape(value.shape[0], -1))

        def end(self) -> None: ...

    model = model_in(name, torch.bfloat16, place(device))
    ids, mask = decoders.prompt(2, 12, padding=(3, 0))
    ids, mask = ids.to(device), mask.to(device)
    loop = structures.decode_loop(model, max_len=64, batch_size=2)
    free = loop.generate(ids, mask, max_new_tokens=20, eos_token_id=())
    end, streamer = int(free[0, 17]), Kept()
    options: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": end, "pad_token_id": 3}
    wanted = loop.generate(ids, mask, streamer=streamer, **options)
    options |= {"attention_mask": mask, "do_sample": False}
    assert torch.equal(torch.cat(streamer.tokens, dim=1), wanted.cpu())
    assert torch.equal(model.generate(ids, **options), wanted)
    assert torch.equal(model.generate(ids, logits_processor=[Nothing()], **options), wanted)
    door = structures.attach(model).generation
    assert (door.looped, door.between, sum(door.hosted.values())) == (1, 1, 0)
    structures.attach(model).detach()
    for row in range(2):
        length = int((free[row, 12:] == end).nonzero()[0]) + 13 if end in free[row, 12:] else 32
        assert torch.equal(wanted[row, :length], free[row, :length])
        assert bool((wanted[row, length:] == 3).all())
