"""Calibration, fidelity, promotion and the cache of statistics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import nn

from flash_rt import structures
from flash_rt.structures.precision import cache, data, prices, settle
from flash_rt.structures.precision.formats import unpack
from flash_rt.structures.weights import copy_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASH_RT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "calibration"


def tokens(rows: int, count: int, seed: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, zoo.VOCAB, (rows, count), generator=generator)


def precisions(plan: structures.Plan) -> dict[str, str]:
    assert plan.packing is not None
    return {unit.name: unit.precision for unit in plan.packing.units}


def text(plan: structures.Plan) -> str:
    return str(structures.explain(plan))


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


def test_a_language_model_samples_its_own_text() -> None:
    model = zoo.make("qwen3")
    plan = structures.attach(model, precision="int8")
    assert plan.packing is not None and plan.packing.fidelity is not None
    assert plan.packing.fidelity.text == settle.SAMPLED
    assert plan.packing.fidelity.enough
    assert plan.packing.scales == {}
    plan.detach()
    first = data.sample_text(model, torch.device("cpu"))
    assert torch.equal(first, data.sample_text(model, torch.device("cpu")))
    assert first.shape == (data.SAMPLED_ROWS, data.SAMPLED_TOKENS)
    assert (first[:, 1:] != first[:, :-1]).float().mean() > 0.5


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


def test_static_scales_are_the_largest_input_over_448() -> None:
    model, ids = zoo.make("llama"), tokens(4, 50)
    seen: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    hook.remove()
    everything = {"*": "fp8", "lm_head": "fp8"}
    plan = structures.attach(model, precision=everything, calibration=ids, min_cosine=None)
    packed = copy_of(model.lm_head.weight)
    assert packed is not None and packed.input_scale is not None
    assert float(packed.input_scale) == pytest.approx(float(seen[0].abs().max()) / 448.0)
    plan.detach()
    plan = structures.attach(
        model, precision=everything, calibration=ids, observer="p99", min_cosine=None
    )
    packed = copy_of(model.lm_head.weight)
    assert packed is not None and packed.input_scale is not None
    wanted = float(seen[0].abs().flatten().quantile(0.99)) / 448.0
    assert float(packed.input_scale) == pytest.approx(wanted, rel=2e-2)
    plan.detach()


FORMS: dict[str, Any] = {
    "batch": lambda ids: ids,
    "rows": lambda ids: [*ids],
    "lists": lambda ids: ids.tolist(),
    "dicts": lambda ids: ({"input_ids": row[None]} for row in ids),
    "callable": lambda ids: lambda model: [model(input_ids=r[None], use_cache=False) for r in ids],
}


@pytest.mark.parametrize("form", FORMS)
def test_calibration_data_of_every_form(form: str) -> None:
    model, ids = zoo.make("llama"), tokens(4, 40)
    calls = data.read_calls(FORMS[form](ids), model)
    assert data.total(calls) == 160
    given = [call.kwargs["input_ids"] for call in calls]
    assert torch.equal(torch.cat(given), ids)
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("calibration", "error", "message"),
    [
        (["some text"], TypeError, "text has to be tokenised first"),
        ([], ValueError, "at least one item, got none"),
        ([torch.zeros(1, 2, 3, dtype=torch.int64)], TypeError, "token ids int64"),
        (torch.full((1, 8), 10**6), ValueError, r"token ids from 0 to \d+, got 1000000"),
        (torch.full((1, 8), -1), ValueError, r"token ids from 0 to \d+, got -1"),
        (torch.zeros(0, 8, dtype=torch.int64), ValueError, r"token ids, got .* shape \(0, 8\)"),
        (nn.Linear(2, 2), TypeError, "data or a function, got a module"),
        (lambda model: model(input_ids=[]), TypeError, None),
    ],
)
def test_bad_calibration_data(
    calibration: Any, error: type[Exception], message: str | None
) -> None:
    model = zoo.make("llama")
    with pytest.raises((error, AttributeError), match=message):
        structures.attach(model, precision="fp8", calibration=calibration)
    assert not hasattr(model, "_flashrt_plan")


def test_padding_counts_nowhere() -> None:
    model, ids = zoo.make("llama"), tokens(8, 20)
    mask = torch.ones_like(ids)
    mask[:, :6] = 0
    rows = [
        {"input_ids": i[None], "attention_mask": m[None]} for i, m in zip(ids, mask, strict=True)
    ]
    plan = structures.attach(model, precision="int8", calibration=[*rows, *rows], min_cosine=0.5)
    assert plan.packing is not None and plan.packing.fidelity is not None
    # Eight rows of 14 held out, and the model's own text because that is not enough.
    sampled = plan.packing.fidelity.decode.positions - 8 * 14
    assert sampled % data.SAMPLED_TOKENS == 0
    plan.detach()


def test_columns_with_large_inputs_count_more_in_four_bits() -> None:
    model, ids = zoo.make("llama"), tokens(8, 60)
    name, seen = "model.layers.0.mlp.down_proj", []
    weight = model.get_submodule(name).weight

    def error(**options: Any) -> float:
        plan = structures.attach(model, precision="nvfp4", min_cosine=None, **options)
        packed = copy_of(weight)
        assert packed is not None
        wrong = unpack(packed.weight(), torch.float32) - weight
        plan.detach()
        return float((seen[0].flatten(0, 1) @ wrong.T).square().mean())

    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, a: seen.append(a[0]))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[::7] *= 20.0
        model(input_ids=ids, use_cache=False)
        hook.remove()
        assert error(calibration=ids) < 0.7 * error()
        assert error(calibration=ids) == error(calibration=ids)  # measured and cached


# The cache.


def run(model: nn.Module, **options: Any) -> tuple[bool, structures.Plan]:
    """Attach and detach; whether the statistics came from the cache."""
    options = {"precision": "fp8", "calibration": tokens(4, 40), "min_cosine": None, **options}
    plan = structures.attach(model, **options)
    hit = "statistics: from the cache" in text(plan)
    assert hit != ("statistics: measured now" in text(plan))
    plan.detach()
    return hit, plan


def test_statistics_are_cached_and_the_same(folder: Path) -> None:
    model = zoo.make("llama")
    (miss, first), (hit, second) = run(model), run(model)
    assert (miss, hit) == (False, True)
    assert first.packing is not None and second.packing is not None
    assert first.packing.scales == second.packing.scales != {}
    assert len([*folder.iterdir()]) == 1


def test_anything_that_differs_is_measured_again(folder: Path) -> None:
    model = zoo.make("llama")
    assert not run(model)[0]
    assert not run(model, calibration=tokens(4, 40, seed=6))[0]
    assert not run(model, precision="nvfp4")[0]
    assert not run(model, observer="p99")[0]
    for parameter in (model.model.embed_tokens.weight, model.model.norm.weight):
        bits = parameter.data.view(torch.uint8).flatten()
        bits[-1] ^= 1
        assert not run(model)[0]
        bits[-1] ^= 1
    assert run(model)[0]


def test_the_hash_sees_every_byte_and_every_place() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.arange(1003, dtype=torch.float32).to(torch.bfloat16))
    found = {cache.weights_digest(module)}
    flat = module.weight.data.view(torch.uint8)
    for place in (0, 7, 8, 1000, 2000, 2005):
        for bit in (1, 128):
            flat[place] ^= bit
            found.add(cache.weights_digest(module))
            flat[place] ^= bit
    assert len(found) == 13
    module.weight.data[[3, 900]] = module.weight.data[[900, 3]]
    assert cache.weights_digest(module) not in found


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: "",
        lambda content: "[1, 2]",
        lambda content: "[" * 100_000,
        lambda content: json.dumps({**json.loads(content), "schema": 0}),
        lambda content: json.dumps({**json.loads(content), "key": "another"}),
        lambda content: json.dumps({**json.loads(content), "scales": {"lm_head": "large"}}),
        lambda content: json.dumps({**json.loads(content), "scales": {"nobody": 1.0}}),
        lambda content: json.dumps({**json.loads(content), "prices": {"lm_head": {"fp3": 1.0}}}),
        lambda content: json.dumps({**json.loads(content), "sampled": [[1]]}),
        lambda content: json.dumps({**json.loads(content), "importance": {"lm_head": "AAA="}}),
        lambda content: content.replace('"lm_head": 0.', '"lm_head": NaN, "x": 0.'),
    ],
)
def test_a_damaged_file_is_measured_again_and_replaced(folder: Path, damage: Any) -> None:
    model = zoo.make("llama")
    run(model)
    [file] = folder.iterdir()
    content = file.read_text()
    file.write_text(damage(content))
    assert not run(model)[0]
    assert json.loads(file.read_text()) == json.loads(content)
    assert run(model)[0]


def test_a_folder_that_cannot_be_written_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("FLASH_RT_CACHE", str(blocked))
    hit, plan = run(zoo.make("llama"))
    assert not hit
    assert "statistics could not be cached" in text(plan)


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
