"""Statistics of a calibration are cached, for the weights, precision and data they are of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from calibrating import text, tokens
from torch import nn

from flash_rt import structures
from flash_rt.structures.precision import cache

pytestmark = pytest.mark.usefixtures("statistics_folder")


def run(model: nn.Module, **options: Any) -> tuple[bool, structures.Plan]:
    """Attach and detach; whether the statistics came from the cache."""
    options = {"precision": "fp8", "calibration": tokens(4, 40), "min_cosine": None, **options}
    plan = structures.attach(model, **options)
    hit = "statistics: from the cache" in text(plan)
    assert hit != ("statistics: measured now" in text(plan))
    plan.detach()
    return hit, plan


def test_statistics_are_cached_and_the_same(statistics_folder: Path) -> None:
    model = zoo.make("llama")
    (miss, first), (hit, second) = run(model), run(model)
    assert (miss, hit) == (False, True)
    assert first.packing is not None and second.packing is not None
    assert first.packing.scales == second.packing.scales != {}
    assert len([*statistics_folder.iterdir()]) == 1


def test_anything_that_differs_is_measured_again(statistics_folder: Path) -> None:
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
def test_a_damaged_file_is_measured_again_and_replaced(
    statistics_folder: Path, damage: Any
) -> None:
    model = zoo.make("llama")
    run(model)
    [file] = statistics_folder.iterdir()
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
