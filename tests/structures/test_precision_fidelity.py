"""Fidelity: what is measured, the price of each weight and which are promoted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from calibrating import precisions, text, tokens
from torch import nn

from flash_rt import structures
from flash_rt.structures.precision import data, prices
from flash_rt.structures.weights import copy_of

pytestmark = pytest.mark.usefixtures("statistics_folder")


SENSITIVE = "model.layers.1.mlp.down_proj"


def planted() -> Any:
    """A llama with one weight that a scale for each row cannot hold, and that is harmless itself.

    A column 500 times larger than the others makes the steps coarse; its input is always zero.
    """
    model = zoo.make("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.gate_proj.weight[3] = 0.0
        model.get_submodule(SENSITIVE).weight[:, 3] = 50.0
    return model


def test_what_is_measured_is_the_cosine_of_all_logits() -> None:
    model, ids = zoo.make("llama"), tokens(24, 100)
    plan = structures.attach(model, precision="int8", calibration=ids, min_cosine=0.5)
    assert plan.packing is not None
    found = plan.packing.fidelity
    assert found is not None
    with torch.no_grad():
        held_out = ids[1::2][:11]  # every second row, until there are 1024 positions
        ours = model(input_ids=held_out, use_cache=False).logits.double()
        plan.detach()
        full = model(input_ids=held_out, use_cache=False).logits.double()
    cosine = torch.nn.functional.cosine_similarity
    whole = float(cosine(ours.flatten(), full.flatten(), 0))
    rows = cosine(ours.flatten(0, 1), full.flatten(0, 1), -1)
    for path in (found.decode, found.prefill):
        assert path.positions == held_out.numel() == 1100
        assert path.cosine == pytest.approx(whole, abs=1e-6)
        assert path.worst == pytest.approx(float(rows.quantile(0.01)), abs=1e-5)
    assert 0.99 < found.decode.worst < found.decode.cosine < 1.0


def test_one_sensitive_weight_is_promoted_and_nothing_else() -> None:
    model = planted()
    plan = structures.attach(model, precision="int8", calibration=tokens(24, 100))
    found = precisions(plan)
    assert found.pop(SENSITIVE) == "bf16"
    assert set(found.values()) == {"int8"}
    assert plan.packing is not None
    [step] = plan.packing.promotions
    assert (step.unit, step.before, step.after) == (SENSITIVE, "int8", "bf16")
    assert step.extra_bytes == 64 * 96 * 4 - (64 * 96 + 64 * 4)
    assert plan.packing.fidelity is not None and plan.packing.fidelity.cosine >= 0.999
    assert copy_of(model.get_submodule(SENSITIVE).weight) is None
    rows = {row.path: row for row in structures.explain(plan)}
    assert rows["model.layers.1"].precision == "int8, down_proj fp32"
    assert f"promoted: {SENSITIVE}: int8 -> bf16" in text(plan)
    assert f"price of {SENSITIVE} (bf16): " in text(plan)
    plan.detach()


def test_without_a_floor_nothing_is_measured_or_promoted() -> None:
    plan = structures.attach(planted(), precision="int8", min_cosine=None)
    assert set(precisions(plan).values()) == {"int8"}
    assert "fidelity: not measured (min_cosine=None)" in text(plan)
    plan.detach()


def test_a_floor_that_no_precision_holds_gives_the_host() -> None:
    model, ids = zoo.make("llama"), tokens(24, 100)
    with torch.no_grad():
        wanted = model(input_ids=ids[:2], use_cache=False).logits
    plan = structures.attach(model, precision="nvfp4", calibration=ids, min_cosine=0.999999999)
    assert set(precisions(plan).values()) == {"bf16"}
    with torch.no_grad():
        got = model(input_ids=ids[:2], use_cache=False).logits
    assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-5)
    plan.detach()


def test_promotion_takes_what_costs_no_bytes_first() -> None:
    plan = structures.attach(zoo.make("llama"), precision="fp8", calibration=tokens(24, 100))
    assert plan.packing is not None
    steps = plan.packing.promotions
    assert steps and {(s.before, s.after, s.extra_bytes) for s in steps} == {("fp8", "int8", 0)}
    gains = [step.gain for step in steps]
    assert gains == sorted(gains, reverse=True)
    plan.detach()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_prices_foretell_what_is_measured(name: str) -> None:
    plan = structures.attach(
        zoo.make(name), precision="fp8", calibration=tokens(24, 100), min_cosine=0.5
    )
    assert plan.packing is not None and plan.packing.fidelity is not None
    foretold = sum(plan.packing.prices[unit.name][unit.precision] for unit in plan.packing.units)
    measured = 1.0 - plan.packing.fidelity.decode.cosine
    assert measured / 1.6 < foretold < measured * 1.6
    plan.detach()


def test_a_model_without_gradients_is_priced_by_its_units(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no gradients here")

    monkeypatch.setattr(prices, "_gradients", fail)
    plan = structures.attach(planted(), precision="int8", calibration=tokens(24, 100))
    assert "the model has no gradients: RuntimeError: no gradients here" in text(plan)
    assert precisions(plan)[SENSITIVE] == "bf16"
    plan.detach()


class ByName(nn.Module):
    """A model that calls its layers by keyword, and takes no ids."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(input=torch.relu(self.first(input=x)))


def test_any_module_can_be_calibrated_and_promoted() -> None:
    model = zoo.redraw(ByName())
    with torch.no_grad():
        model.second.weight[:, 3] = 80.0
        model.first.weight[3], model.first.bias[3] = 0.0, -1.0  # relu makes it zero
    batches = [torch.randn(600, 32, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    plan = structures.attach(model, precision="int8", calibration=batches)
    assert precisions(plan) == {"first": "int8", "second": "bf16"}
    assert plan.packing is not None and plan.packing.fidelity is not None
    assert plan.packing.fidelity.output == "output" and plan.packing.fidelity.enough
    plan.detach()


def test_a_floor_that_cannot_be_measured_is_said() -> None:
    model = zoo.make("vit")
    plan = structures.attach(model, precision="int8")
    assert plan.packing is not None and plan.packing.fidelity is None
    assert "fidelity: not measured, because there is no calibration data and it is no" in text(plan)
    assert "nothing says that the floor of 0.999 holds" in text(plan)
    plan.detach()


def test_few_positions_are_said() -> None:
    model = zoo.make("vit")
    pixels = [zoo.draw(1, 3, 32, 32), 2 * zoo.draw(1, 3, 32, 32)]
    plan = structures.attach(model, precision="int8", calibration=pixels, min_cosine=0.9)
    assert plan.packing is not None and plan.packing.fidelity is not None
    assert not plan.packing.fidelity.enough
    assert "are fewer than the 1024" in text(plan)
    plan.detach()


def test_prices_do_not_depend_on_how_weights_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = zoo.make("llama"), tokens(6, 50)
    units = structures.plan(model, precision="fp8").packing.units  # type: ignore[union-attr]
    calls = [data.Call(kwargs={"input_ids": ids})]
    cpu = torch.device("cpu")
    whole, _ = prices.measure_prices(model, units, calls, {}, cpu)
    monkeypatch.setattr(prices, "BLOCK_ELEMENTS", 64 * 32)
    cut, _ = prices.measure_prices(model, units, calls, {}, cpu)
    for name, costs in whole.items():
        for precision, cost in costs.items():
            assert cut[name][precision] == pytest.approx(cost, rel=1e-3)


def test_both_paths_are_measured_where_they_differ(place: str) -> None:
    dtype = torch.float32 if place == "cpu" else torch.bfloat16
    model = zoo.make("llama", dtype, place)
    plan = structures.attach(
        model, precision="fp8", calibration=tokens(24, 100), min_cosine=0.5, keep_host="cpu"
    )
    assert plan.packing is not None and plan.packing.fidelity is not None
    found = plan.packing.fidelity
    assert 0.98 < found.prefill.cosine <= found.decode.cosine < 1.0
    in_fp8 = place == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
    assert (found.prefill.cosine < found.decode.cosine) == in_fp8
    foretold = sum(plan.packing.prices[unit.name][unit.precision] for unit in plan.packing.units)
    measured = 1.0 - found.prefill.cosine
    assert measured / 1.6 < foretold < measured * 1.6
    plan.detach()
    assert all(p.device.type == place for p in model.parameters())
