"""The code of docs/generation.md runs."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
import zoo
from test_text_stream import byte_level

from flash_rt import structures

DOCUMENT = Path(__file__).parents[2] / "docs" / "generation.md"


def test_the_documents_code_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 4
    torch.manual_seed(0)
    made = zoo.causal("Llama", vocab_size=256, max_position_embeddings=2048)()
    names: dict[str, Any] = {
        "model": zoo.redraw(made).eval(),
        "tokenizer": byte_level(),
        "torch": torch,
    }
    for block in blocks:
        exec(compile(block, str(DOCUMENT), "exec"), names)
    assert names["found"].sequences.shape == (1, names["ids"].shape[1] + 4)
    assert names["turn"].shape[1] == names["first"].shape[1] + names["more"].shape[1] + 8
    cold = copy.copy(names["loop"]).generate(names["turn"][:, :-8], max_new_tokens=8)
    assert torch.equal(cold, names["turn"])
    assert all(isinstance(text, str) for text in names["answers"])
    assert isinstance(names["engine"], structures.Engine) and names["engine"].idle
