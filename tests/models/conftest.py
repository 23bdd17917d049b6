"""The zoo and its helpers live beside the structures tests; two threads would only fight."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "structures")]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def llama() -> Iterator[tuple[Any, Any]]:
    """An attached model and its plan."""
    from decoders import model

    from flash_rt import structures

    plan = structures.attach(model("llama"))
    yield model("llama"), plan
    plan.detach()


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a chat model of bytes."""
    import checkpoints

    return checkpoints.save(tmp_path_factory.mktemp("chat"), checkpoints.text_model())


@pytest.fixture(scope="module")
def handle(chat_folder: Path) -> Iterator[Any]:
    """The chat model, loaded."""
    import flash_rt

    with flash_rt.load_model(chat_folder, device="cpu", progress=False) as loaded:
        yield loaded
