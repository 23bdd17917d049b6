"""load_model with a precision: packed weights behind the same handle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from huggingface_hub.utils.tqdm import are_progress_bars_disabled
from transformers.utils import logging

import flash_rt
from flash_rt import structures
from flash_rt.structures.precision import settle


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_RT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.save(tmp_path / "model", checkpoints.text_model())


def load(folder: Path, **options: Any) -> Any:
    return flash_rt.load_model(folder, **{"device": "cpu", "progress": False, **options})


def packed(handle: Any) -> set[str]:
    return {unit.precision for unit in handle.plan.packing.units}


@pytest.mark.parametrize("precision", ["fp8", "int8", "nvfp4"])
def test_the_answer_is_that_of_the_attached_model(folder: Path, precision: str) -> None:
    model = checkpoints.text_model()
    plan = structures.attach(model, precision=precision, min_cosine=None)
    ids = torch.tensor([[72, 105, 33]])
    loop = structures.decode_loop(model, max_len=64)
    wanted = loop.generate(ids, max_new_tokens=9, eos_token_id=())
    with load(folder, precision=precision, min_cosine=None) as handle:
        assert packed(handle) <= {precision, "int8"}
        assert handle.device == torch.device("cpu")
        assert torch.equal(handle.generate(ids, max_new_tokens=9, eos_token_id=()), wanted)
        assert handle.plan.packing.memory_bytes == plan.packing.memory_bytes
        assert "".join(handle.stream("Why?", max_new_tokens=9)) == handle.predict(
            "Why?", max_new_tokens=9
        )


def test_the_handle_that_came_attached_is_its_plan(folder: Path) -> None:
    with load(folder, precision="int8", min_cosine=None) as handle:
        assert structures.attach(handle, handle.forward) is handle.plan
        same = structures.attach(handle, precision="int8", min_cosine=None)
        assert same is handle.plan
        with pytest.raises(ValueError, match=r"attached with precision='int8'.* asked for .*fp8"):
            structures.attach(handle, precision="fp8", min_cosine=None)
        with pytest.raises(ValueError, match=r"attached with precision='int8'.* asked for .*auto"):
            structures.attach(handle.model)


def test_detach_gives_the_checkpoint_back(folder: Path) -> None:
    with load(folder, precision="fp8", min_cosine=None) as handle:
        handle.detach()
        saved = checkpoints.text_model().state_dict()
        for name, tensor in handle.model.state_dict().items():
            assert torch.equal(tensor, saved[name])


def test_released_weights_can_still_be_closed(folder: Path) -> None:
    handle = load(folder, precision="int8", min_cosine=None, keep_host=False)
    with pytest.raises(RuntimeError, match="were released"):
        handle.detach()
    handle.close()
    assert repr(handle).endswith("closed)")


def test_the_second_construction_measures_nothing_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["The sky is blue because of the air. " * 20, "Water boils when it is hot. " * 20]
    options: dict[str, Any] = dict(precision="int8", calibration=texts, min_cosine=0.5)
    with load(folder, **options) as handle:
        first = handle.predict("Why?", max_new_tokens=9)
        assert "statistics: measured now" in handle.plan.packing.notes
        fidelity = handle.plan.packing.fidelity
        assert fidelity.cosine > 0.9

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(settle, "_measure", never)
    with load(folder, **options) as handle:
        assert handle.predict("Why?", max_new_tokens=9) == first
        assert "statistics: from the cache" in handle.plan.packing.notes
        assert handle.plan.packing.fidelity == fidelity


def test_caches_in_fp8(folder: Path) -> None:
    ids = torch.tensor([[72, 105, 33]])
    model = checkpoints.text_model()
    structures.attach(model, kv_cache="fp8")
    wanted = structures.decode_loop(model, max_len=64).generate(
        ids, max_new_tokens=9, eos_token_id=()
    )
    with load(folder, kv_cache="fp8", max_len=64) as handle:
        assert torch.equal(handle.generate(ids, max_new_tokens=9, eos_token_id=()), wanted)
        small = handle._shelf._loops[1].memory_bytes
        assert structures.attach(handle, handle.forward) is handle.plan
    with load(folder, max_len=64) as handle:
        handle.generate(ids, max_new_tokens=9, eos_token_id=())
        assert small < handle._shelf._loops[1].memory_bytes


def test_the_second_construction_starts_from_what_the_floor_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[float] = []
    right = settle.compare

    def counted(*args: Any, **kwargs: Any) -> Any:
        found = right(*args, **kwargs)
        measured.append(found.cosine)
        return found

    monkeypatch.setattr(settle, "compare", counted)
    plans = []
    for floor in (0.995, 0.995, 0.9):
        with load(folder, precision="nvfp4", min_cosine=floor) as handle:
            packing = handle.plan.packing
            plans.append((packing.promotions, packing.fidelity, packed(handle)))
            measured.append(floor)
    first = measured.index(0.995)
    assert first > 1
    assert measured[first - 1] >= 0.995 > measured[0]
    assert measured[first + 1 : first + 3] == [measured[first - 1], 0.995]
    assert plans[0] == plans[1]
    assert len(plans[0][0]) > len(plans[2][0])


@pytest.mark.parametrize("shown", [True, False])
def test_bars_show_what_takes_long(
    folder: Path, shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    load(folder, precision="int8", min_cosine=None, progress=shown).close()
    bars = capsys.readouterr().err
    assert logging.is_progress_bar_enabled() and not are_progress_bars_disabled()
    for what in ("Loading weights", "Proving regions", "Packing weights"):
        assert (f"{what}: 100%" in bars) is shown


def test_patterns(folder: Path) -> None:
    precision = {"*.mlp": "nvfp4", "*.self_attn": "int8"}
    with load(folder, precision=precision, min_cosine=None) as handle:
        found = {unit.name: unit.precision for unit in handle.plan.packing.units}
    assert found["model.layers.1.mlp.down_proj"] == "nvfp4"
    assert found["model.layers.1.self_attn.o_proj"] == "int8"
    assert found["lm_head"] in ("auto", "bf16")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"precision": "int3"}, ValueError, r"precision must be one of .*, got 'int3'"),
        ({"precision": 8}, TypeError, "precision must be a name or a dict of patterns, got int"),
        ({"precision": "fp8", "keep_host": "disk"}, ValueError, "keep_host must be .*'disk'"),
        ({"precision": "fp8", "min_cosine": 2.0}, ValueError, "min_cosine must be None or .*2.0"),
        ({"calibration": "text"}, ValueError, "calibration must be None where nothing is quant"),
    ],
)
def test_bad_settings(folder: Path, options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        load(folder, **options)


def test_texts_need_a_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ValueError, match="calibration must be token ids for a model without token"):
        load(folder, precision="int8", calibration="some text")
