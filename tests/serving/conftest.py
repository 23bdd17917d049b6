"""One server in a thread for most tests; others start their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent)]


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def running() -> Iterator[Any]:
    """The server that tests share and leave open."""
    from serving_support import run_server, tiny

    with run_server(tiny()) as found:
        yield found


@pytest.fixture(scope="session")
def codec() -> Any:
    """Text and ids of the tiny model."""
    import tiny_model

    from flash_rt.flashrt_hf.server.text import Codec

    tokenizer = tiny_model.tokenizer()
    return Codec(tokenizer, stop_ids=[tokenizer.eos_token_id], vocabulary=512)


@pytest.fixture(scope="session")
def client(running: Any) -> Any:
    """An OpenAI client of the shared server."""
    return running.client()


@pytest.fixture(scope="session")
def alone() -> Any:
    """``alone(text, tokens)``: what the bare loop writes greedily behind a prompt."""
    import tiny_model
    from serving_support import MAX_LEN

    from flash_rt import structures

    loop = structures.decode_loop(tiny_model.decoder(), max_len=MAX_LEN)
    tokenizer = tiny_model.tokenizer()

    def write(text: str, tokens: int, *, chat: bool = True) -> list[int]:
        if chat:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        out = loop.generate(ids, max_new_tokens=tokens)
        found: list[int] = out[0, ids.shape[1] :].tolist()
        return found

    return write


@pytest.fixture(scope="session")
def text_of() -> Any:
    """``text_of(ids)``: text as a client sees it."""
    import tiny_model

    tokenizer = tiny_model.tokenizer()
    ends = {tokenizer.convert_tokens_to_ids(text) for text in tiny_model.SPECIAL}
    known = len(tokenizer)

    def decode(ids: list[int]) -> str:
        return tokenizer.decode([i for i in ids if i not in ends and i < known])

    return decode


@pytest.fixture(scope="session")
def source_path() -> str:
    """``PYTHONPATH`` under which a process finds this checkout's packages."""
    source = Path(__file__).parents[2] / "src"
    return os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH", "")]))
