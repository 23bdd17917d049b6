"""Every architecture of the zoo: attached it agrees with itself, detached it is itself."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from comparing import FP32_TOLERANCE, deviation, portrait, same_bits, tensors

from flash_rt import structures
from flash_rt.structures.region import owns_tensors

NAMES = list(zoo.ZOO)
LANGUAGE = [name for name, animal in zoo.ZOO.items() if animal.generates]
SAVING = NAMES

# fp32 on a GPU: matrix products are the host's, but a graph may pick another algorithm for them.
TOLERANCE = {"cpu": FP32_TOLERANCE, "cuda": 1e-4}

pytestmark = pytest.mark.filterwarnings("ignore")


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_attach_agrees_and_detach_restores_every_bit(name: str, place: str) -> None:
    model, inputs = zoo.shared(name, place), zoo.inputs(name, device=place)
    before, host = portrait(model), model(**inputs)
    plan = structures.attach(model, model.forward)
    try:
        attached = [model(**inputs) for _ in range(3)]
        bound = plan.bound()
        attached_state = {n: t.data_ptr() for n, t in model.state_dict().items()}
    finally:
        plan.detach()
    assert max(deviation(a, host) for a in attached) < TOLERANCE[place]
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
def test_prefill_then_decode_through_a_cache(name: str, place: str) -> None:
    model, tokens = zoo.shared(name, place), zoo.ids(2, 9).to(place)

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
    assert deviation(ours, host) < TOLERANCE[place]
    assert same_bits(run(), host)


@torch.no_grad()
@pytest.mark.parametrize("name", LANGUAGE)
def test_generate_gives_the_hosts_tokens(name: str, place: str) -> None:
    model = zoo.shared(name, place)
    arguments = {
        "input_ids": zoo.ids(2, 6).to(place),
        "attention_mask": torch.ones(2, 6, dtype=torch.long, device=place),
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
@pytest.mark.parametrize("name", NAMES)
def test_bf16_is_as_close_to_the_truth_as_the_host(name: str, place: str) -> None:
    model = zoo.make(name, torch.bfloat16, place)
    inputs = zoo.inputs(name, torch.bfloat16, place)
    host = model(**inputs)
    plan = structures.attach(model)
    ours = [model(**inputs) for _ in range(2)]
    plan.detach()
    assert plan.bound()
    assert same_bits(model(**inputs), host)
    truth = copy.deepcopy(model).float()(**{k: _fp32(v) for k, v in inputs.items()})
    limit = 1.25 * _error(host, truth)
    assert all(_error(result, truth) <= limit for result in ours)


def _fp32(value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.float() if floating else value


def _error(got: Any, truth: Any) -> float:
    mine, exact = next(tensors(got)).double(), next(tensors(truth)).double()
    return float((mine - exact).square().mean().sqrt() / exact.square().mean().sqrt())
