"""The examples run as a user runs them, on a model small enough for a test."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from flash_rt.flashrt_hf.bench import models

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """A folder with a tiny random model and a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("checkpoint")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(["<end>", *alphabet])}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}?"
    fast.save_pretrained(folder)
    models.build("tiny-qwen3", device=torch.device("cpu"), dtype=torch.float32).save_pretrained(
        folder
    )
    return str(folder)


def run(monkeypatch, capsys, name: str, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_get_kernel(monkeypatch, capsys):
    out = run(monkeypatch, capsys, "get_kernel.py")
    assert float(out.rsplit(" ", 1)[1]) < 1e-5


def test_attach_transformers(monkeypatch, capsys, checkpoint):
    out = run(monkeypatch, capsys, "attach_transformers.py", checkpoint)
    assert "Bound" in out
    assert "the host again, bit for bit: True" in out
    error = out.split("relative difference while attached: ")[1].split()[0]
    # On a GPU two ways to round the bf16 of a few layers are compared.
    assert float(error) < (2e-2 if torch.cuda.is_available() else 1e-5)


def test_structure_pipeline_decode(monkeypatch, capsys, checkpoint):
    name = "structure_pipeline/decode.py"
    out = run(monkeypatch, capsys, name, checkpoint, "ab", "a longer prompt")
    assert "- ab" in out
    assert "- a longer prompt" in out
    assert "2 rows, " in out


def test_load_model(monkeypatch, capsys, checkpoint):
    out = run(monkeypatch, capsys, "load_model.py", checkpoint, "Why?")
    first, *_ = out.splitlines()
    assert first == "> Why?"
    bound, regions = re.search(r"(\d+) of (\d+) regions run on FlashRT", out).groups()
    assert int(regions) > int(bound) >= 4
    assert "\nWhy?" in out.split("regions run on FlashRT")[1]
