"""load_model of a Hub id: downloaded once, answered by the cache, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from huggingface_hub import constants
from small_hub import COMMIT, SmallHub, small_hub

import flash_rt
from flash_rt.flashrt_hf.load import memory

NAME = "someone/little-llama"


@pytest.fixture
def published(tmp_path: Path) -> Path:
    folder = checkpoints.save(tmp_path / "published", checkpoints.text_model())
    (folder / "modeling_own.py").write_text("raise SystemExit\n")
    (folder / "README.md").write_text("# Little\n")
    torch.save({}, folder / "pytorch_model.bin")
    return folder


@pytest.fixture
def hub(published: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    with small_hub(NAME, published) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.address)
        resolve = running.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", resolve)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield running


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def load(cache: Path, name: str = NAME, **options: Any) -> Any:
    return flash_rt.load_model(
        name, **{"device": "cpu", "cache_dir": cache, "progress": False, **options}
    )


def test_a_download_fetches_what_is_read_and_once(hub: SmallHub, cache: Path) -> None:
    ids = torch.tensor([[72, 105]])
    with load(cache) as handle:
        tokens = handle.generate(ids, max_new_tokens=5, eos_token_id=())
        assert handle.name == NAME
        assert handle.predict("Why?", max_new_tokens=3) is not None
    wanted = checkpoints.text_model().generate(
        ids, max_new_tokens=5, do_sample=False, eos_token_id=None
    )
    assert torch.equal(tokens, wanted)
    fetched = sorted(hub.asked)
    assert len(fetched) == len(set(fetched))
    assert "model.safetensors" in fetched
    assert not {"pytorch_model.bin", "modeling_own.py", "README.md"} & set(fetched)
    load(cache).close()
    assert sorted(hub.asked) == fetched


def test_the_cache_answers_while_offline(
    hub: SmallHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(cache).close()
    hub.shutdown()
    hub.server_close()
    load(cache, local_files_only=True).close()
    load(cache, revision=COMMIT, local_files_only=True).close()
    load(cache).close()  # the Hub does not answer
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    load(cache).close()


def test_offline_without_a_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = rf"there is no folder '{NAME}', and '{NAME}' is not whole in the cache, which "
    with pytest.raises(FileNotFoundError, match=rule + "local_files_only=True allows alone"):
        load(cache, local_files_only=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=rule + "HF_HUB_OFFLINE=1 allows alone"):
        load(cache)


def test_a_hub_that_does_not_answer(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(
        FileNotFoundError, match=r"and the Hub does not answer \(.*[Rr]efused"
    ) as caught:
        load(cache)
    assert caught.value.__suppress_context__  # the trace ends where the name was looked up


def test_models_and_revisions_that_are_not_there(hub: SmallHub, cache: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder 'someone/else' and no such model on"):
        load(cache, "someone/else")
    with pytest.raises(FileNotFoundError, match=f"revision must be one of '{NAME}', got 'v9'"):
        load(cache, revision="v9")
    with pytest.raises(ValueError, match=r"a Hub id must be valid, got 'some one/--else'"):
        load(cache, "some one/--else")


def test_pickled_weights_are_refused_before_they_are_fetched(
    hub: SmallHub, cache: Path, published: Path
) -> None:
    (published / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"must be safetensors, got only pytorch_model\.bin"):
        load(cache)
    assert "pytorch_model.bin" not in hub.asked


def test_a_model_that_will_not_fit_is_refused_before_it_is_fetched(
    hub: SmallHub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    with pytest.raises(MemoryError, match="must fit cpu, which has 0.00 GiB free"):
        load(cache)
    assert "model.safetensors" not in hub.asked


def test_code_is_fetched_only_when_asked(hub: SmallHub, cache: Path) -> None:
    load(cache, trust_remote_code=True).close()  # and runs only where the configuration names it
    assert "modeling_own.py" in hub.asked
