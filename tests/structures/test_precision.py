"""Packed weights: what every path computes with them, and what detach gives back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from comparing import deviation, portrait, same_bits
from torch import nn

from flash_rt import structures
from flash_rt.structures import products
from flash_rt.structures.precision import check
from flash_rt.structures.precision.formats import QUANTISED, packer, unpack
from flash_rt.structures.weights import COPY, copy_of

NAMES = ("llama", "qwen3", "gemma3", "gpt2")


def dequantised(name: str, plan: structures.Plan, model: nn.Module) -> Any:
    """A host whose weights are what the plan's packed copies stand for."""
    twin = zoo.make(name)
    theirs = dict(twin.named_parameters())
    assert plan.packing is not None
    with torch.no_grad():
        for unit in plan.packing.quantised:
            for leaf in unit.leaves:
                target = theirs.get(f"{leaf.path}.weight")
                if target is None:  # tied
                    target = twin.get_submodule(leaf.path).weight
                target.copy_(leaf.unpacked(torch.float32))
    return twin


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("name", NAMES)
def test_forward_and_generate_are_the_dequantised_hosts(name: str, precision: str) -> None:
    model, ids = zoo.make(name), zoo.ids(2, 12)
    before = portrait(model)
    with torch.no_grad():
        full = model(input_ids=ids, use_cache=False).logits
    plan = structures.attach(model, precision=precision, min_cosine=None)
    twin = dequantised(name, plan, model)
    options: dict[str, Any] = dict(do_sample=False, max_new_tokens=9, pad_token_id=0)
    with torch.no_grad():
        for tokens in (12, 3):  # many rows, and six
            wanted = twin(input_ids=ids[:, :tokens], use_cache=False).logits
            for _ in range(3):  # eager, recorded, replayed
                got = model(input_ids=ids[:, :tokens], use_cache=False).logits
                assert deviation(got, wanted) < 1e-5
        assert deviation(full, twin(input_ids=ids, use_cache=False).logits) > 1e-3
        assert torch.equal(model.generate(ids, **options), twin.generate(ids, **options))
    assert plan.captured is not None and plan.captured.stats.replays == 4
    plan.detach()
    assert portrait(model) == before
    assert not any(hasattr(p, COPY) for p in model.parameters())
    with torch.no_grad():
        assert same_bits(model(input_ids=ids, use_cache=False).logits, full)


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("name", ("llama", "qwen3", "gemma3", "phi3", "gemma2"))
def test_the_loop_reads_packed_weights(name: str, precision: str) -> None:
    model, ids = zoo.make(name), zoo.ids(2, 12)
    plan = structures.attach(model, precision=precision, min_cosine=None)
    twin = dequantised(name, plan, model)
    wanted = twin.generate(
        ids, do_sample=False, max_new_tokens=12, pad_token_id=0, eos_token_id=None
    )
    loop = structures.decode_loop(model, max_len=64, batch_size=2)
    for _ in range(2):
        tokens = loop.generate(ids, max_new_tokens=12, eos_token_id=())
        assert torch.equal(tokens, wanted)
    plan.detach()


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("name", ["llama", "phi3", "gemma2", "gpt2"])
def test_many_rows_multiply_in_fp8_where_the_device_can(
    name: str, calibrated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU plays a GPU with E4M3 products: inputs then go through E4M3, and once only."""
    model, ids = zoo.make(name), zoo.ids(2, 12)
    data = ids if calibrated else None
    plan = structures.attach(model, precision="fp8", min_cosine=None, calibration=data)
    twin = dequantised(name, plan, model)
    assert plan.packing is not None
    hooks = []
    for unit in plan.packing.quantised:
        if unit.precision != "fp8":
            assert unit.vocabulary and unit.precision == "int8"
            continue
        packed = copy_of(unit.leaves[0].parameter)
        assert packed is not None
        assert (packed.input_scale is not None) == calibrated

        def through_fp8(_: Any, args: Any, scale: torch.Tensor | None = packed.input_scale) -> Any:
            return (rounded(args[0], scale), *args[1:])

        hooks += [
            twin.get_submodule(leaf.path).register_forward_pre_hook(through_fp8)
            for leaf in unit.leaves
        ]
    monkeypatch.setattr(products, "has_fp8_products", lambda device: True)
    with torch.no_grad():
        for tokens in (12, 3):  # six rows do not
            if tokens == 3:
                for hook in hooks:
                    hook.remove()
            wanted = twin(input_ids=ids[:, :tokens], use_cache=False).logits
            got = model(input_ids=ids[:, :tokens], use_cache=False).logits
            assert deviation(got, wanted) < 2e-3  # one element may round the other way
        with products.as_decoded():
            exact = model(input_ids=ids, use_cache=False, output_hidden_states=False).logits
        wanted = twin(input_ids=ids, use_cache=False).logits
        assert deviation(exact, wanted) < 1e-5
    plan.detach()


def rounded(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """``x`` through E4M3 by a static scale, or by one of each row."""
    if scale is None:
        scale = x.abs().amax(-1, keepdim=True) / 448.0
    return (x / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_is_proven_by_its_product(
    precision: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = (zoo.draw(200, 90) * 0.1).to(dtype)
    packed = packer(precision)(weight)
    assert check.packed_disproof(packed, dtype) is None
    monkeypatch.setattr(check, "_PART_ELEMENTS", 128 * 90)  # in parts, the second one of 72 rows
    assert check.packed_disproof(packed, dtype) is None

    def otherwise(part: Any, dtype: torch.dtype) -> torch.Tensor:
        return unpack(part, dtype) * (1.0 if part.shape[0] == 128 else 1.1)

    monkeypatch.setattr(check, "unpack", otherwise)
    assert "numbers: error" in str(check.packed_disproof(packed, dtype))


def test_a_copy_that_is_not_proven_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    prove = check.packed_disproof

    def doubtful(packed: Any, dtype: torch.dtype) -> str | None:
        return "numbers: too far" if packed.shape == (64, 96) else prove(packed, dtype)

    monkeypatch.setattr("flash_rt.structures.precision.packing.packed_disproof", doubtful)
    model = zoo.make("llama")
    plan = structures.attach(model, precision="int8", min_cosine=None)
    rows = {row.path: row for row in structures.explain(plan)}
    assert rows["model.layers.0"].precision == "int8, down_proj fp32"
    assert "down_proj: bf16, not int8: " in str(structures.explain(plan))
    assert copy_of(model.model.layers[0].mlp.down_proj.weight) is None
    plan.detach()
