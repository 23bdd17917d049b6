"""Which weights get which precision: names, patterns, what is refused, what a dry run says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from comparing import portrait
from torch import nn

from flash_rt import structures
from flash_rt.structures import plan as plan_function


def precisions(plan: structures.Plan) -> dict[str, str]:
    assert plan.packing is not None
    return {leaf.path: u.precision for u in plan.packing.units for leaf in u.leaves}


def test_auto_and_bf16_quantise_nothing() -> None:
    model = zoo.shared("llama")
    assert plan_function(model).packing is None
    assert plan_function(model, precision={"*": "bf16", "lm_head": "auto"}).packing is None


def test_the_last_pattern_that_matches_decides() -> None:
    chosen = {
        "*": "fp8",
        "model.layers.1": "int8",
        "model.layers.*.mlp.down_proj": "nvfp4",
        "lm_head": "bf16",
    }
    found = precisions(plan_function(zoo.shared("llama"), precision=chosen))
    assert found["model.layers.0.self_attn.q_proj"] == "fp8"
    assert found["model.layers.0.mlp.down_proj"] == "nvfp4"
    assert found["model.layers.1.self_attn.o_proj"] == "int8"
    assert found["model.layers.1.mlp.down_proj"] == "nvfp4"
    assert found["lm_head"] == "bf16"


def test_what_no_pattern_matches_stays_as_it_is() -> None:
    found = precisions(plan_function(zoo.shared("llama"), precision={"*.mlp": "int8"}))
    assert {name for name, p in found.items() if p == "int8"} == {
        f"model.layers.{i}.mlp.{part}_proj" for i in (0, 1) for part in ("gate", "up", "down")
    }
    assert {p for name, p in found.items() if ".mlp." not in name} == {"auto"}


@pytest.mark.parametrize(
    ("precision", "error", "text"),
    [
        ("fp4", ValueError, r"plan: precision must be one of .*, got 'fp4'"),
        ({"*": "fp4"}, ValueError, r"plan: precision must be one of .*, got 'fp4'"),
        ({}, ValueError, "at least one pattern"),
        ({"": "fp8"}, TypeError, "patterns as keys, got ''"),
        (8, TypeError, "a name or a dict of patterns, got int"),
        ({"*.mpl": "fp8"}, ValueError, r"'\*\.mpl', which matches no module"),
        ({"*": "fp8", "model.norm": "fp8"}, ValueError, "matches model.norm and no linear"),
        ({"*.q_proj": "fp8"}, ValueError, r"one kernel reads, got .*q_proj: fp8, .*k_proj: auto"),
    ],
)
def test_bad_precisions(precision: Any, error: type[Exception], text: str) -> None:
    model = zoo.shared("llama")
    before = portrait(model)
    for call in (plan_function, structures.attach):
        with pytest.raises(error, match=text):
            call(model, precision=precision)
    assert portrait(model) == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep_host": "disk"}, "keep_host must be 'cpu', 'gpu' or False, got 'disk'"),
        ({"keep_host": True}, "keep_host must be 'cpu', 'gpu' or False, got True"),
        ({"min_cosine": 1.0}, "min_cosine must be None or a number above 0 and below 1, got 1.0"),
        ({"min_cosine": True}, "min_cosine must be None or a number"),
        ({"observer": "p10"}, "observer must be 'max' or 'p50' to 'p100'"),
        ({"observer": 5}, "observer must be 'max' or 'p50' to 'p100'"),
    ],
)
def test_bad_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        structures.attach(zoo.shared("llama"), precision="fp8", **options)


def test_calibration_without_a_use_is_refused() -> None:
    with pytest.raises(ValueError, match="calibration must be None where nothing is quantised"):
        structures.attach(zoo.shared("llama"), calibration=zoo.ids())


def test_a_dry_run_touches_nothing_and_names_bytes() -> None:
    model = zoo.make("llama")
    before = portrait(model)
    found = plan_function(model, model.forward, precision="nvfp4", keep_host=False)
    assert portrait(model) == before
    assert not found.attached
    rows = {row.path: row for row in structures.explain(found)}
    assert rows["model.layers.0"].precision == "nvfp4"
    assert rows["lm_head"].precision == "int8"  # 128 x 64, and a scale for each row
    assert rows["lm_head"].packed_bytes == 128 * 64 + 128 * 4
    assert rows["model.norm"].packed_bytes == 0
    assert "a vocabulary keeps 8 bits" in str(structures.explain(found))


def test_a_mixed_layer_names_what_differs() -> None:
    found = plan_function(
        zoo.shared("llama"), precision={"*.layers": "fp8", "*.layers.*.down_proj": "bf16"}
    )
    rows = {row.path: row for row in structures.explain(found)}
    assert rows["model.layers.0"].precision == "fp8, down_proj fp32"


@pytest.mark.parametrize(
    ("chosen", "head"),
    [
        ("fp8", "int8"),
        ("nvfp4", "int8"),
        ("int8", "int8"),
        ({"*": "fp8"}, "int8"),
        ({"*": "fp8", "lm_head": "fp8"}, "fp8"),
        ({"*": "fp8", "lm_head": "nvfp4"}, "int8"),
        ({"*": "fp8", "lm_*": "bf16"}, "bf16"),
    ],
)
def test_a_vocabulary_keeps_eight_good_bits(chosen: Any, head: str) -> None:
    for name in ("llama", "gemma3"):  # alone, and tied to the embedding
        found = plan_function(zoo.shared(name), precision=chosen)
        assert precisions(found)["lm_head"] == head


def test_equal_settings_return_the_plan_and_others_are_refused() -> None:
    model = zoo.make("llama")
    plan = structures.attach(model, precision={"*": "int8"}, min_cosine=None)
    assert structures.attach(model, precision={"*": "int8"}, min_cosine=None) is plan
    with pytest.raises(ValueError, match="model is attached with precision=.*keep_host='cpu'"):
        structures.attach(model, precision={"*": "int8"}, min_cosine=None, keep_host="gpu")
    plan.detach()


class TiedToCode(nn.Module):
    """A model whose own code reads the weight of its linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32, bias=False)
        self.other = nn.Bilinear(32, 32, 4)
        self.second = nn.Linear(32, 32)
        self.reader = Reader(self.first.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.reader(self.second(self.first(x)))


class Reader(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.table = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.table + self.table.sum()


def test_a_weight_that_other_code_reads_keeps_its_precision() -> None:
    model = zoo.redraw(TiedToCode())
    plan = structures.attach(model, precision="int8", min_cosine=None)
    assert precisions(plan) == {"first": "bf16", "second": "int8"}
    text = str(structures.explain(plan))
    assert "first: bf16, not int8: " in text
    assert "reader reads first.weight too" in text
    plan.detach()
