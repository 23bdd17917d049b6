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
    model: Any = model_in(name, dtype, place(device))
    ids, mask = decoders.prompt(2, 21, padding=(9, 0))
    ids, mask = ids.to(device), mask.to(device)
    loop = structures.decode_loop(model, max_len=128, batch_size=2)
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
    own, wide = own[:, 20:-1], wide[:, 20:-1]
    error = float((own - wide).abs().max())
    chosen = wide.gather(-1, tokens[:, 21:, None])[..., 0]
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
