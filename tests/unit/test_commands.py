"""flash-rt explain and generate, the demo, and what they say to bad input."""

from __future__ import annotations

import json

import pytest
import torch

from flash_rt.flashrt_hf import demo, host, real_model
from flash_rt.flashrt_hf.bench import models
from flash_rt.flashrt_hf.commands import explain, generate

CPU = torch.device("cpu")


def test_explain_prints_every_owner_once(capsys):
    explain.command("tiny-qwen3", device="cpu", as_json=True)
    rows = json.loads(capsys.readouterr().out)["rows"]
    covered = [path for row in rows for path in row["covers"]]
    model = models.build("tiny-qwen3", device=CPU, dtype=torch.float32)
    owners = [n for n, m in model.named_modules() if m._parameters or m._buffers]
    assert sorted(covered) == sorted(owners)
    assert {row["decision"] for row in rows} <= {"Bound", "Kept", "Refused"}


def test_explain_with_a_precision(capsys):
    explain.command("tiny-qwen3", device="cpu", precision="int8", as_json=True)
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["precision"] for row in rows if row["decision"] == "Bound"} >= {"int8"}


def test_explain_as_text_is_the_table(capsys):
    explain.command("tiny-qwen3", device="cpu")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["region", "decision", "structure"]


def test_explain_fits_a_terminal():
    from flash_rt import structures

    handle = host.load_handle("tiny-qwen3", device=CPU, dtype=None, attach=False)
    table = structures.explain(structures.plan(handle))
    text = explain.fitted(table, 60)
    assert max(map(len, text.splitlines())) <= 60
    words = text.split()
    for cell in (cell for row in table.cells() for cell in row):
        assert all(word in " ".join(words) for word in cell.split())


def test_random_weights_answer_nothing(capsys):
    import typer

    with pytest.raises(typer.Exit):
        generate.command("tiny-qwen3", "Hello", device="cpu")
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("flash-rt: stream: Qwen3ForCausalLM must have a tokenizer")


def test_a_command_prints_one_line_for_an_unknown_model(monkeypatch, capsys):
    import typer

    for call in (
        lambda: explain.command("/nowhere/at/all", device="cpu"),
        lambda: generate.command("/nowhere/at/all", "Hello", device="cpu"),
    ):
        with pytest.raises(typer.Exit):
            call()
        last = capsys.readouterr().err.splitlines()[-1]
        rule = "model must be a folder or GGUF file that exists"
        assert last == f"flash-rt: load_model: {rule}, got '/nowhere/at/all'"


def test_a_model_that_generates_nothing(tmp_path, capsys):
    import typer
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1
    )
    ViTModel(config).save_pretrained(tmp_path)
    with pytest.raises(typer.Exit):
        generate.command(str(tmp_path), "Hello", device="cpu")
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "flash-rt: generate: model must generate text, got ViTModel"


def test_unknown_dtype_is_refused():
    import typer

    with pytest.raises(typer.BadParameter, match=r"dtype must be one of bf16, .* got 'int3'"):
        explain.command("tiny-qwen3", device="cpu", dtype="int3")


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:x"])
def test_unknown_device_is_refused(device):
    import typer

    with pytest.raises(typer.BadParameter, match=f"must be cpu, cuda or cuda:N, got '{device}'"):
        explain.command("tiny-qwen3", device=device)


@pytest.fixture
def small_real_model(monkeypatch, tmp_path):
    """A tiny random model with a byte tokenizer in the place of the real one."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(["<end>", *alphabet])}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}?"

    def convert(source, target):
        fast.save_pretrained(target)
        made = models.build("tiny-llama", device=CPU, dtype=torch.float32)
        made.save_pretrained(target)

    monkeypatch.setattr(real_model, "_convert", convert)
    monkeypatch.setattr(real_model, "gguf_folder", lambda: tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_generate_prints_what_the_host_would_say(small_real_model, capsys):
    generate.command("smollm2", "Hello", max_new_tokens=8, device="cpu")
    printed = capsys.readouterr().out
    ids = real_model.chat_ids("Hello", device="cpu")
    model = real_model.load(device="cpu", dtype=torch.float32)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8)
    said = real_model.tokenizer().decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert printed == said + "\n"


def test_generate_draws_and_stops_as_asked(small_real_model, capsys):
    def said(**options):
        generate.command("smollm2", "Hello", max_new_tokens=24, device="cpu", **options)
        return capsys.readouterr().out

    greedy = said()
    assert said(temperature=2.0, seed=1) == said(temperature=2.0, seed=1) != greedy
    assert said(top_k=1) == greedy
    stop = greedy[4:6]
    assert said(stop=[stop]) == greedy[: greedy.index(stop)] + "\n"


def test_a_cache_too_short_for_the_request_is_one_line(small_real_model, capsys):
    import typer

    with pytest.raises(typer.Exit):
        generate.command("smollm2", "Hello", max_new_tokens=8, max_len=4, device="cpu")
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "flash-rt: stream: prompt and max_new_tokens must fit max_len = 4, got 6 + 8"


def test_a_missing_build_is_one_message(small_real_model, monkeypatch, capsys):
    import typer

    from flash_rt import kernel_loader
    from flash_rt.structures import kernels

    def missing(name, *, version):
        raise RuntimeError(f"flashrt/{name}: no build of it runs here")

    monkeypatch.setattr(kernel_loader, "load", missing)
    kernels.family.cache_clear()
    with pytest.raises(typer.Exit):
        generate.command("smollm2", "Hello", max_new_tokens=4, device="cpu")
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("flash-rt: attach: kernel family flashrt/")


def test_demo_answers_with_the_hosts_tokens(small_real_model, capsys):
    demo.run("Why?", new_tokens=6, device=CPU)
    out = capsys.readouterr().out
    assert "> Why?" in out
    assert "Bound" in out
    assert out.rstrip().endswith("6 of 6 tokens are the host's")


def test_demo_shows_one_of_the_layers_that_are_alike():
    from flash_rt import structures

    model = models.build("tiny-qwen3", device=CPU, dtype=torch.float32)
    first, *lines = demo.folded(structures.explain(structures.plan(model)))
    assert first.split()[0] == "region"
    assert [line.split()[0] for line in lines] == [
        "model.embed_tokens",
        "model.layers.0",
        "and",
        "model.norm",
        "model.rotary_emb",
        "lm_head",
    ]
    assert lines[2].startswith("  and 1 like it")
