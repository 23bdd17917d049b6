"""What becomes of the host's own weights: kept, moved, released, written to, saved, copied."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from comparing import portrait, same_bits
from test_attach import model as plain_model
from torch import nn

from flash_rt import structures
from flash_rt.structures.precision import packing
from flash_rt.structures.precision.formats import packer
from flash_rt.structures.precision.host_weights import HostWeights
from flash_rt.structures.weights import COPY, copy_of, packed_bytes

DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def attach(model: nn.Module, keep_host: Any, precision: Any = "int8") -> structures.Plan:
    return structures.attach(model, precision=precision, min_cosine=None, keep_host=keep_host)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return out


@pytest.mark.parametrize("keep_host", ["cpu", "gpu"])
def test_detach_restores_objects_ties_and_bits(keep_host: str, place: str) -> None:
    model = zoo.make("gemma3", DTYPES[place], place)  # its head is tied to its embedding
    ids = zoo.ids().to(place)
    parameters = dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in parameters.items()}
    wanted = logits(model, ids)
    plan = attach(model, keep_host)
    assert model.device.type == place
    assert model.lm_head.weight is model.model.embed_tokens.weight
    if place == "cuda":
        away = {n for n, p in parameters.items() if p.device.type != "cuda"}
        packed = {n for n, p in parameters.items() if copy_of(p) is not None}
        assert away == (packed if keep_host == "cpu" else set())
        assert packed
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.to(place), values.get(name, tensor.to(place)))
    plan.detach()
    assert {n: id(p) for n, p in model.named_parameters()} == {
        n: id(p) for n, p in parameters.items()
    }
    assert all(torch.equal(p, values[n]) and p.device.type == place for n, p in parameters.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert same_bits(logits(model, ids), wanted)


def test_released_weights_cannot_be_saved_copied_or_restored(place: str, tmp_path: Path) -> None:
    model = zoo.make("gemma3", DTYPES[place], place)
    ids = zoo.ids().to(place)
    kept = zoo.make("gemma3", DTYPES[place], place)
    plan, other = attach(model, False), attach(kept, "gpu")
    assert torch.equal(logits(model, ids), logits(kept, ids))
    options: dict[str, Any] = dict(do_sample=False, max_new_tokens=5, pad_token_id=0)
    assert torch.equal(model.generate(ids, **options), kept.generate(ids, **options))
    loop = structures.decode_loop(model, max_len=40, batch_size=2)
    assert torch.equal(
        loop.generate(ids, max_new_tokens=5, pad_token_id=0),
        structures.decode_loop(kept, max_len=40, batch_size=2).generate(
            ids, max_new_tokens=5, pad_token_id=0
        ),
    )
    weights = [p for p in model.parameters() if copy_of(p) is not None]
    assert weights and all(p.is_meta for p in weights)
    attempts = (
        model.state_dict,
        model.model.layers[0].state_dict,
        lambda: model.save_pretrained(tmp_path),
        lambda: model.load_state_dict(kept.state_dict()),
        lambda: copy.deepcopy(model),
        lambda: pickle.dumps(model),
        lambda: torch.save(model, io.BytesIO()),
        plan.detach,
    )
    for attempt in attempts:
        with pytest.raises(RuntimeError, match="were released"):
            attempt()
    assert plan.attached
    with pytest.raises(RuntimeError, match="its full-precision values were released"):
        model.train()(input_ids=ids)
    with pytest.raises(RuntimeError, match="Embedding needs.*values were released"):
        model.model.embed_tokens(ids)
    assert torch.equal(logits(model.eval(), ids), logits(kept, ids))
    other.detach()


def test_copies_and_pickles_are_hosts(place: str) -> None:
    model = zoo.make("gemma3", DTYPES[place], place)
    ids = zoo.ids().to(place)
    wanted = logits(model, ids)
    plan = attach(model, "cpu")
    twin = copy.deepcopy(model)
    assert not any(getattr(p, COPY, None) for p in twin.parameters())
    assert all(p.device.type == place for p in twin.parameters())
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert same_bits(logits(twin, ids), wanted)
    plan.detach()


def test_pickles_are_hosts() -> None:
    model, x = plain_model(), torch.randn(2, 5, 32)
    with torch.no_grad():
        wanted = model(x)
    plan = attach(model, "cpu")
    loaded = pickle.loads(pickle.dumps(model))
    assert not any(getattr(p, COPY, None) for p in loaded.parameters())
    with torch.no_grad():
        assert torch.equal(loaded(x), wanted)
        assert not torch.equal(model(x), wanted)
    plan.detach()


def test_saving_gives_the_hosts_checkpoint(tmp_path: Any) -> None:
    model = zoo.make("gemma3")
    plan = attach(model, "cpu", "nvfp4")
    model.save_pretrained(tmp_path)
    plan.detach()
    again = type(model).from_pretrained(tmp_path)
    for (name, ours), theirs in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_training_and_autograd_get_the_host_where_its_weights_are() -> None:
    model, ids = zoo.make("llama"), zoo.ids()
    model.requires_grad_(True)
    wanted = model(input_ids=ids).logits
    plan = attach(model, "gpu")
    got = model.train()(input_ids=ids).logits
    assert torch.equal(got, wanted)
    got.sum().backward()
    assert model.lm_head.weight.grad is not None
    model.eval()
    plan.detach()


@pytest.mark.parametrize("precision", ["fp8", "int8", "nvfp4"])
def test_writes_to_host_weights_are_packed_again(precision: str) -> None:
    model, ids = zoo.make("llama"), zoo.ids()
    other = zoo.redraw(zoo.make("llama"), seed=11)
    plan, fresh = attach(model, "gpu", precision), attach(other, "gpu", precision)
    wanted = logits(other, ids)
    options: dict[str, Any] = dict(max_new_tokens=6, eos_token_id=())
    loop = structures.decode_loop(model, max_len=64, batch_size=2)
    theirs = structures.decode_loop(other, max_len=64, batch_size=2).generate(ids, **options)
    before = logits(model, ids)
    for _ in range(2):  # recorded, replayed
        assert torch.equal(logits(model, ids), before)
        loop.generate(ids, **options)
    model.load_state_dict(other.state_dict())
    assert torch.equal(logits(model, ids), wanted)
    assert torch.equal(loop.generate(ids, **options), theirs)
    assert plan.captured is not None and plan.captured.stats.captures == 1  # same addresses
    assert "packed again" in str(structures.explain(plan))
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    assert torch.allclose(logits(model, ids), 2.0 * wanted, rtol=1e-5)
    plan.detach()
    fresh.detach()


def test_attached_in_inference_mode_and_written_outside() -> None:
    model, ids = zoo.make("llama"), zoo.ids()
    with torch.inference_mode():
        plan = structures.attach(model, precision="int8", calibration=ids, min_cosine=0.5)
        before = model(input_ids=ids, use_cache=False).logits
    other = zoo.redraw(zoo.make("llama"), seed=11)
    model.load_state_dict(other.state_dict())
    changed = logits(model, ids)
    assert not torch.equal(changed, before)
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, changed)
    plan.detach()
    assert torch.equal(model.lm_head.weight, other.lm_head.weight)


def test_another_default_device_and_dtype_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for strange in (False, True):
        monkeypatch.setenv("FLASH_RT_CACHE", str(tmp_path / str(strange)))
        model = zoo.make("llama")
        torch.set_default_device("meta" if strange else "cpu")
        torch.set_default_dtype(torch.float64 if strange else torch.float32)
        try:
            plan = structures.attach(model, precision="nvfp4", min_cosine=0.9)
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
        assert plan.packing is not None and plan.packing.fidelity is not None
        found.append((plan.packing.fidelity, plan.packing.prices, logits(model, zoo.ids())))
        plan.detach()
    assert found[0][:2] == found[1][:2]
    assert torch.equal(found[0][2], found[1][2])


def test_a_layer_called_alone_packs_again_too() -> None:
    model = zoo.make("llama")
    plan = attach(model, "gpu")
    x = zoo.draw(1, 3, 64)
    with torch.no_grad():
        before = model.lm_head(x)
        model.lm_head.weight.neg_()
        assert torch.equal(model.lm_head(x), -before)
    plan.detach()


def test_an_old_loop_follows_detach() -> None:
    model, ids = zoo.make("llama"), zoo.ids()
    options: dict[str, Any] = dict(max_new_tokens=8, eos_token_id=())
    bare = structures.attach(model)
    wanted = structures.decode_loop(model, max_len=64, batch_size=2).generate(ids, **options)
    bare.detach()
    plan = attach(model, "gpu", "nvfp4")
    loop = structures.decode_loop(model, max_len=64, batch_size=2)
    assert not torch.equal(loop.generate(ids, **options), wanted)
    plan.detach()
    assert torch.equal(loop.generate(ids, **options), wanted)


def test_an_error_while_packing_leaves_the_host_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.make("gemma3")
    before = portrait(model)
    made: list[Any] = []

    def failing(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        if len(made) > 5:
            raise torch.OutOfMemoryError("no room")
        return packer(*args, **kwargs)

    monkeypatch.setattr(packing, "packer", failing)
    with pytest.raises(torch.OutOfMemoryError):
        attach(model, "cpu")
    assert portrait(model) == before
    assert not any(hasattr(p, COPY) for p in model.parameters())


def test_packing_goes_weight_by_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU plays a device that weights move away from; what is left there is counted."""
    model = zoo.redraw(zoo.causal("Llama", num_hidden_layers=8)()).to(torch.bfloat16)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    away: set[int] = set()
    seen: list[int] = []

    def move(self: HostWeights, parameter: torch.Tensor) -> None:
        away.add(id(parameter))

    def counting(precision: str, **options: Any) -> Any:
        pack = packer(precision, **options)

        def count(weight: torch.Tensor) -> Any:
            made = pack(weight)
            seen.append(resident(model, away) + packed_bytes(made))
            return made

        return count

    monkeypatch.setattr(HostWeights, "move", move)
    monkeypatch.setattr(packing, "packer", counting)
    plan = attach(model, "cpu")
    assert len(seen) == 8 * 7 + 1
    assert max(seen) <= 1.15 * weights
    assert resident(model, away) < 0.65 * weights  # 8 bits, scales, the embedding
    plan.detach()


def resident(model: nn.Module, away: set[int]) -> int:
    """Bytes of parameters that are not away, and of all packed copies."""
    size = 0
    for parameter in model.parameters():
        packed = copy_of(parameter)
        size += 0 if packed is None else packed.memory_bytes
        size += 0 if id(parameter) in away else parameter.numel() * parameter.element_size()
    return size


@pytest.mark.parametrize("place", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@pytest.mark.parametrize("keep_host", ["cpu", False])
@pytest.mark.parametrize("precision", ["fp8", "nvfp4"])
def test_attaching_stays_below_115_percent_of_the_weights(
    keep_host: Any, precision: str, place: str
) -> None:
    sizes = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=16, vocab_size=8192)
    heads = dict(num_attention_heads=8, num_key_value_heads=4)
    model = zoo.redraw(zoo.causal("Llama", **sizes, **heads)()).to(place, torch.bfloat16)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    plan = attach(model, keep_host, precision)
    assert torch.cuda.max_memory_allocated() - before + weights <= 1.15 * weights
    assert torch.cuda.memory_allocated() - before + weights <= 0.75 * weights
    if keep_host:
        plan.detach()
        assert all(p.is_cuda for p in model.parameters())
