"""Every architecture of the zoo: attached it agrees with itself, detached it is itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import zoo
from comparing import FP32_TOLERANCE, deviation, portrait, same_bits

from flash_rt import structures
from flash_rt.structures.region import owns_tensors

NAMES = list(zoo.ZOO)
LANGUAGE = [name for name, animal in zoo.ZOO.items() if animal.generates]
SAVING = NAMES

pytestmark = pytest.mark.filterwarnings("ignore")


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_attach_agrees_and_detach_restores_every_bit(name: str) -> None:
    model, inputs = zoo.shared(name), zoo.inputs(name)
    before, host = portrait(model), model(**inputs)
    plan = structures.attach(model, model.forward)
    try:
        attached = [model(**inputs) for _ in range(3)]
        bound = plan.bound()
        attached_state = {n: t.data_ptr() for n, t in model.state_dict().items()}
    finally:
        plan.detach()
    assert max(deviation(a, host) for a in attached) < FP32_TOLERANCE
    assert bound
    assert attached_state == {n: place[0] for n, place in before["storages"].items()}
    assert portrait(model) == before
    assert same_bits(model(**inputs), host)


@pytest.mark.parametrize("name", NAMES)
def test_explain_has_every_owner_in_exactly_one_row(name: str) -> None:
    model = zoo.shared(name)
    before = portrait(model)
    table = structures.explain(structures.plan(model))
    owners = [path for path, module in model.named_modules() if owns_tensors(module)]
    covered = [path for row in table for path in row.covers]
    assert sorted(covered) == sorted(owners)
    assert all(row.reason for row in table)
    text = str(table)
    assert all((row.path or "(model)") in text for row in table)
    assert portrait(model) == before


@torch.no_grad()
@pytest.mark.parametrize("name", LANGUAGE)
def test_prefill_then_decode_through_a_cache(name: str) -> None:
    model, tokens = zoo.shared(name), zoo.ids(2, 9)

    def run() -> list[torch.Tensor]:
        first = model(input_ids=tokens[:, :6], use_cache=True)
        cache = first.get("past_key_values", first.get("cache_params"))
        assert cache is not None
        keyword = "cache_params" if "cache_params" in first else "past_key_values"
        logits = [first.logits]
        for t in range(6, 9):
            step = model(input_ids=tokens[:, t : t + 1], use_cache=True, **{keyword: cache})
            logits.append(step.logits)
        return logits

    host = run()
    plan = structures.attach(model)
    try:
        ours = run()
    finally:
        plan.detach()
    assert deviation(ours, host) < FP32_TOLERANCE
    assert same_bits(run(), host)


@torch.no_grad()
@pytest.mark.parametrize("name", LANGUAGE)
def test_generate_gives_the_hosts_tokens(name: str) -> None:
    model = zoo.shared(name)
    arguments = {
        "input_ids": zoo.ids(2, 6),
        "attention_mask": torch.ones(2, 6, dtype=torch.long),
        "max_new_tokens": 6,
        "do_sample": False,
    }
    host = model.generate(**arguments)
    plan = structures.attach(model)
    try:
        ours = model.generate(**arguments)
    finally:
        plan.detach()
    assert torch.equal(ours, host)
    assert torch.equal(model.generate(**arguments), host)


@pytest.mark.parametrize("name", SAVING)
def test_saved_while_attached_is_the_hosts_checkpoint(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = zoo.shared(name)
    model.save_pretrained(tmp_path / "host")
    plan = structures.attach(model)
    try:
        model.save_pretrained(tmp_path / "attached")
    finally:
        plan.detach()
    host, attached = tmp_path / "host", tmp_path / "attached"
    assert sorted(p.name for p in host.iterdir()) == sorted(p.name for p in attached.iterdir())
    for config in host.glob("*.json"):
        assert json.loads(config.read_text()) == json.loads((attached / config.name).read_text())
    for file in host.glob("*.safetensors"):
        saved, wanted = load_file(attached / file.name), load_file(file)
        assert saved.keys() == wanted.keys()
        assert all(torch.equal(saved[key], wanted[key]) for key in wanted)


@torch.no_grad()
@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "gpt2", "olmo2", "bert", "t5", "siglip", "wan"]
)
def test_bf16_is_as_close_to_fp32_as_the_host(name: str) -> None:
    exact = zoo.make(name).to(torch.float64)
    model, inputs = zoo.make(name, torch.bfloat16), zoo.inputs(name, torch.bfloat16)
    exact.load_state_dict(model.state_dict())
    truth = exact(**{k: _double(v) for k, v in inputs.items()})
    host_error = deviation_rms(model(**inputs), truth)
    plan = structures.attach(model)
    ours_error = deviation_rms(model(**inputs), truth)
    plan.detach()
    assert ours_error <= 1.25 * host_error


def _double(value: object) -> object:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if floating else value  # type: ignore[attr-defined]


def deviation_rms(got: object, truth: object) -> float:
    from comparing import tensors

    mine, exact = next(tensors(got)).double(), next(tensors(truth)).double()
    return float((mine - exact).square().mean().sqrt() / exact.square().mean().sqrt())
