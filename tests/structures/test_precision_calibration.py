"""Calibration data of every form, and what is taken from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from calibrating import tokens
from torch import nn

from flash_rt import structures
from flash_rt.structures.precision import data, settle
from flash_rt.structures.precision.formats import unpack
from flash_rt.structures.weights import copy_of

pytestmark = pytest.mark.usefixtures("statistics_folder")


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
