"""A model that is quantised on its way to a device, which never holds it in full precision.

Without a GPU the device is an imagined one: what is brought there is copied and counted.
"""

from __future__ import annotations

import copy
import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import nn

from flash_rt import structures
from flash_rt.structures import lending


class Far:
    """The imagined device: the bytes of full precision that are on it, now and at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here: dict[int, int] = {}
        self.most = 0
        monkeypatch.setattr(lending, "is_away", lambda t, device: self.address(t) not in self.here)
        monkeypatch.setattr(lending, "copied", lambda data, device: self.copied(data))

    @staticmethod
    def address(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    def copied(self, data: torch.Tensor) -> torch.Tensor:
        storage = data.clone().untyped_storage()
        found = torch.empty(0, dtype=data.dtype).set_(storage, 0, data.shape, data.stride())
        place = storage.data_ptr()
        self.here[place] = storage.nbytes()
        weakref.finalize(storage, self.here.pop, place)
        self.most = max(self.most, sum(self.here.values()))
        return found


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_RT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Far:
    return Far(monkeypatch)


def deep(layers: int = 8, **fields: Any) -> Any:
    torch.manual_seed(0)
    return zoo.redraw(zoo.causal("Llama", num_hidden_layers=layers, **fields)())


def weight_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def layer_bytes(model: Any) -> int:
    return weight_bytes(model.model.layers[0])


@pytest.mark.parametrize("options", [{"min_cosine": None}, {"min_cosine": 0.9}])
@pytest.mark.parametrize("keep_host", ["cpu", False])
def test_the_device_holds_one_region_at_a_time(
    far: Far, options: dict[str, Any], keep_host: Any
) -> None:
    model = deep()
    stays = sum(weight_bytes(m) for m in (model.model.embed_tokens, model.model.norm))
    plan = structures.attach(model, precision="int8", keep_host=keep_host, device="cpu", **options)
    assert plan.attached
    assert 0 < far.most <= stays + 2 * layer_bytes(model) < weight_bytes(deep()) / 2


@pytest.mark.parametrize("tied", [False, True])
def test_the_result_is_that_of_a_model_that_was_there(tied: bool, request: Any) -> None:
    ids = zoo.ids(3, 40)
    models, plans, outputs = [], [], []
    for far_away in (False, True):
        if far_away:
            Far(request.getfixturevalue("monkeypatch"))
        model = deep(2, tie_word_embeddings=tied)
        given = torch.randint(0, zoo.VOCAB, (24, 100), generator=torch.Generator().manual_seed(5))
        plan = structures.attach(
            model,
            precision="nvfp4",
            calibration=given,
            min_cosine=0.9,
            **({"device": "cpu"} if far_away else {}),
        )
        models.append(model)
        plans.append(plan)
        with torch.no_grad():
            outputs.append(model(ids).logits)
    near, away = plans
    assert near.packing is not None and away.packing is not None
    assert torch.equal(*outputs)
    assert near.packing.fidelity == away.packing.fidelity
    assert near.packing.prices == away.packing.prices
    assert [u.precision for u in near.packing.units] == [u.precision for u in away.packing.units]


def test_detach_leaves_the_host_bit_for_bit(far: Far) -> None:
    model = deep(2)
    before = copy.deepcopy(model.state_dict())
    plan = structures.attach(model, precision="fp8", min_cosine=None, device="cpu")
    plan.detach()
    assert type(model).__name__ == "LlamaForCausalLM"
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_an_error_leaves_the_host_where_it_was(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_rt.structures import attach as attached

    model = deep(2)
    before = {name: far.address(tensor) for name, tensor in model.state_dict().items()}

    def fails(*args: Any) -> None:
        raise RuntimeError("no graphs here")

    module = __import__("sys").modules[structures.attach.__module__]
    assert attached is structures.attach
    monkeypatch.setattr(module, "_open_generate", fails)
    with pytest.raises(RuntimeError, match="no graphs here"):
        structures.attach(model, precision="int8", min_cosine=None, device="cpu")
    assert {n: far.address(t) for n, t in model.state_dict().items()} == before
    assert not any(hasattr(p, "_flashrt_packed") for p in model.parameters())


def test_full_precision_simply_moves(far: Far) -> None:
    model = deep(2)
    plan = structures.attach(model, device="cpu")
    assert all(far.address(p) in far.here for p in model.parameters())
    assert plan.attached


def test_a_plan_moves_nothing(far: Far) -> None:
    model = deep(2)
    before = {name: far.address(tensor) for name, tensor in model.state_dict().items()}
    structures.plan(model, precision="int8", device="cpu")
    assert {n: far.address(t) for n, t in model.state_dict().items()} == before
    assert far.here == {}


def test_gradients_pass_through_lent_weights(far: Far) -> None:
    from flash_rt.structures.precision.streaming import streamed

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).requires_grad_(False)
    x = torch.randn(5, 8, requires_grad=True)
    (wanted,) = torch.autograd.grad(model(x).square().sum(), x)
    with streamed(model, [model[0].weight, model[2].weight], torch.device("cpu")):
        out = model(x).square().sum()
        assert far.here == {}
        (found,) = torch.autograd.grad(out, x)
    assert torch.equal(found, wanted)
    assert 0 < far.most <= model[0].weight.nbytes


@pytest.mark.gpu
def test_a_gpu_never_holds_the_model_in_full_precision() -> None:
    if not torch.cuda.is_available():
        if os.environ.get("FLASH_RT_REQUIRE_GPU") == "1":
            pytest.fail("FLASH_RT_REQUIRE_GPU=1, and torch sees no GPU")
        pytest.skip("torch sees no GPU")
    # Wide rather than deep: what the backward pass that prices weights keeps of each layer grows
    # with the width, weights with its square. The workspace of cuBLAS (32 MiB) counts too.
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8}
    model = deep(12, **sizes).to(torch.bfloat16)
    total = weight_bytes(model)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    plan = structures.attach(model, precision="fp8", device="cuda")
    assert torch.cuda.max_memory_allocated() - before < 0.8 * total
    assert plan.attached
    assert {p.device.type for p in model.model.norm.parameters()} == {"cuda"}
    plan.detach()
    assert {p.device.type for p in model.parameters()} == {"cuda"}
