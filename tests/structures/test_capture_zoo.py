"""Whole models through a captured forward: other inputs, same answers, or a reason."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import zoo
from comparing import deviation

from flash_rt.structures.capture import CapturedForward

pytestmark = pytest.mark.filterwarnings("ignore")

# What the host does that a graph cannot hold.
NOT_CAPTURABLE = {
    "falcon": "host data",  # its alibi constants
    "paligemma": "wait for the device",  # compares the number of image tokens
    "qwen3_vl": "creates state",  # has no use_cache on this forward
    "pi0": "creates state",
}
# Their experts call grouped_mm, which has no kernel for fp32 on a GPU.
GROUPED = ["qwen3_moe", "mixtral", "deepseek_v3"]


def others(inputs: dict[str, Any], seed: int) -> dict[str, Any]:
    """Inputs of the same form with other content; masks and the like stay."""
    generator = torch.Generator().manual_seed(seed)

    def other(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or "mask" in name:
            return value
        if value.is_floating_point():
            noise = torch.randn(value.shape, generator=generator).to(value)
            return value + noise.mul(0.1)
        if name.endswith("input_ids"):
            order = torch.randperm(value.shape[1], generator=generator).to(value.device)
            return value[:, order]
        return value

    return {name: other(name, value) for name, value in inputs.items()}


@torch.no_grad()
@pytest.mark.parametrize("name", list(zoo.ZOO))
def test_replays_agree_with_the_host(name: str, device: torch.device) -> None:
    model = zoo.shared(name) if device.type == "cpu" else zoo.make(name, device=str(device))
    inputs = zoo.inputs(name, device=str(device))
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    c = CapturedForward(model, model.forward)
    for seed in range(3):
        call = others(inputs, seed)
        got, want = c(**call), model(**call)
        assert type(got) is type(want)
        assert deviation(got, want) < (1e-6 if device.type == "cpu" else 1e-4)
    if name in NOT_CAPTURABLE:
        assert c.stats.captures == 0
        assert c.stats.fallbacks
        if device.type == "cpu":  # a GPU words it as an error of the CUDA runtime
            assert all(NOT_CAPTURABLE[name] in reason for reason in c.stats.fallbacks)
    elif name in GROUPED and device.type == "cuda":
        assert (c.stats.captures, sum(c.stats.fallbacks.values())) == (0, 3)
        assert all("_grouped_mm.default of torch.float32" in why for why in c.stats.fallbacks)
    else:
        assert not c.stats.fallbacks
        assert (c.stats.captures, c.stats.replays) == (1, 2)


@torch.no_grad()
@pytest.mark.parametrize("experts", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", GROUPED)
def test_replays_of_experts_agree_with_the_host(
    name: str, experts: str, device: torch.device
) -> None:
    """Both ways that transformers has to run experts without waiting for the device."""
    dtype = torch.float32
    if experts == "grouped_mm" and device.type == "cuda":
        dtype = torch.bfloat16
        if torch.cuda.get_device_capability(device)[0] not in (9, 10):
            pytest.skip("grouped_mm of bfloat16 waits for the device but on sm_90 and sm_100")
    model: Any = zoo.make(name, dtype, str(device))
    model.set_experts_implementation(experts)
    inputs = zoo.inputs(name, dtype, str(device)) | {"use_cache": False}
    c = CapturedForward(model, model.forward)
    for seed in range(3):
        call = others(inputs, seed)
        assert deviation(c(**call), model(**call)) < (1e-4 if dtype is torch.float32 else 2e-2)
    assert not c.stats.fallbacks
    assert (c.stats.captures, c.stats.replays) == (1, 2)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "smollm3"])
def test_what_the_host_decides_from_content_is_right_for_every_content(
    name: str, device: torch.device
) -> None:
    """In eager mode transformers looks whether positions are packed and masks are all ones."""
    model = zoo.shared(name) if device.type == "cpu" else zoo.make(name, device=str(device))
    c = CapturedForward(model, model.forward)
    tokens = zoo.ids(1, 9).to(device)
    plain = torch.arange(9, device=device)[None]
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]], device=device)
    full = torch.ones(1, 9, dtype=torch.int64, device=device)
    padded = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]], device=device)
    for key, first, second in (
        ("position_ids", plain, packed),
        ("attention_mask", full, padded),
    ):
        for value in (first, second, first, second):
            call = {"input_ids": tokens, "use_cache": False, key: value}
            got, want = c(**call).logits, model(**call).logits
            kept = slice(2, None) if value is padded else slice(None)
            assert deviation(got[:, kept], want[:, kept]) < 1e-4
    assert (c.stats.captures, c.stats.replays) == (2, 6)


@torch.no_grad()
def test_hidden_states_and_tuples_come_back_as_the_host_gives_them(device: torch.device) -> None:
    model = zoo.make("qwen3", device=str(device))
    c = CapturedForward(model, model.forward)
    for seed in range(3):
        call = others({"input_ids": zoo.ids(2, 5).to(device)}, seed) | {"use_cache": False}
        got = c(**call, output_hidden_states=True)
        want = model(**call, output_hidden_states=True)
        assert len(got.hidden_states) == len(want.hidden_states) == 3
        assert deviation(list(got.hidden_states), list(want.hidden_states)) < 1e-4
        assert deviation(c(**call, return_dict=False), model(**call, return_dict=False)) < 1e-4
    assert c.stats.captures == 2
    assert c.stats.replays == 4
    assert isinstance(c(**call, return_dict=False), tuple)


@torch.no_grad()
def test_an_outer_forward_that_collects_hidden_states_gets_them(device: torch.device) -> None:
    model = zoo.make("qwen3", device=str(device))
    inner = model.model
    call = {"input_ids": zoo.ids(2, 5).to(device), "use_cache": False}
    want = model(**call, output_hidden_states=True)
    c = CapturedForward(inner, inner.forward)
    inner.forward = c
    try:
        for _ in range(3):
            model(**call)
        got = model(**call, output_hidden_states=True)
    finally:
        del inner.forward
    assert c.stats.replays >= 1
    assert len(got.hidden_states) == 3
    assert deviation(list(got.hidden_states), list(want.hidden_states)) < 1e-4
