"""What load_model refuses, in words, before anything is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file

import flash_rt
from flash_rt import structures
from flash_rt.flashrt_hf.load import loading, memory


def load(name: Any, **options: Any) -> Any:
    return flash_rt.load_model(name, **{"device": "cpu", "progress": False, **options})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.save(tmp_path / "model", checkpoints.text_model())


@pytest.fixture(autouse=True)
def _loads_nothing(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Everything here must fail before weights are read, unless its test is about them."""
    if "reads_weights" in request.fixturenames:
        return

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(loading, "load_weights", never)


@pytest.fixture
def reads_weights() -> None:
    """See ``_loads_nothing``."""


def rewrite(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("name", ["/no/such", "./no", "../no/such", "~/no", "a/b/c", Path("no")])
def test_a_missing_folder(name: Any) -> None:
    rule = "load_model: model must be a folder or GGUF file that exists"
    with pytest.raises(FileNotFoundError, match=re.escape(f"{rule}, got '{name}'")):
        load(name)


def test_a_file_that_is_not_gguf(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"a file must be GGUF, got .*model\.safetensors'"):
        load(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Qwen3-8B", "; did you mean Qwen/Qwen3-8B?"),
        ("llama-3.2-1b", "; did you mean meta-llama/llama-3.2-1b?"),
        ("bert-base-uncased", "; did you mean google-bert/bert-base-uncased?"),
        ("nonesuch", ""),
        ("nonesuch.gguf", ""),
        ("", ""),
        (
            "smollm2",
            ", which is a name of the command line alone; its folder is "
            "flash_rt.flashrt_hf.real_model.folder()",
        ),
    ],
)
def test_a_bare_name_says_what_was_looked_for_and_suggests(
    name: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as caught:
        load(name, cache_dir=tmp_path)
    assert str(caught.value) == (
        "load_model: model must be a folder or GGUF file that exists, or a Hub id "
        f"organisation/name, got '{name}'{hint}"
    )


def test_a_bare_name_suggests_what_the_cache_has(tmp_path: Path) -> None:
    (tmp_path / "models--someone--Nonesuch-2").mkdir()
    with pytest.raises(ValueError, match="did you mean someone/Nonesuch-2"):
        load("nonesuch-2", cache_dir=tmp_path)


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json must be in .*model, found none"):
        load(folder)
    (folder / "model_index.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="which is a diffusers pipeline"):
        load(folder)
    (folder / "model_index.json").rename(folder / "adapter_config.json")
    with pytest.raises(FileNotFoundError, match="which is an adapter"):
        load(folder)


@pytest.mark.parametrize(("text", "rule"), [("{", "must be JSON"), ("[]", "must be an object")])
def test_a_config_that_is_none(folder: Path, text: str, rule: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"config\.json {rule}"):
        load(folder)


def test_pickled_weights(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"must be safetensors, got only pytorch_model\.bin in "):
        load(folder)


def test_other_weights_and_none(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "tf_model.h5")
    with pytest.raises(ValueError, match=r"its shards or GGUF, got tf_model\.h5"):
        load(folder)
    (folder / "tf_model.h5").unlink()
    with pytest.raises(FileNotFoundError, match="weights must be in .*, found none"):
        load(folder)


@pytest.mark.parametrize("damage", ["empty", "short", "text", "pointer"])
def test_damaged_weights(folder: Path, damage: str) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    path.write_bytes(
        {"empty": b"", "short": whole[:-1], "text": b"x" * 99, "pointer": pointer}[damage]
    )
    rule = "fetch the file with git lfs pull" if damage == "pointer" else "is corrupt or cut short"
    with pytest.raises(ValueError, match=rf"model\.safetensors is .*{rule}|{rule}"):
        load(folder)


def test_missing_shards(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, checkpoints.text_model(), max_shard_size="50KB")
    first = sorted(tmp_path.glob("model-*.safetensors"))[0]
    first.unlink()
    with pytest.raises(FileNotFoundError, match=f"missing {first.name}"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="must have a weight_map"):
        load(tmp_path)


def test_an_architecture_that_is_not_known(folder: Path) -> None:
    rewrite(folder, architectures=["NonesuchForCausalLM"])
    with pytest.raises(ValueError, match=r"a model of transformers .*, got 'NonesuchForCausalLM'"):
        load(folder)
    rewrite(folder, model_type="nonesuch")
    with pytest.raises(ValueError, match="got model_type 'nonesuch'"):
        load(folder)
    rewrite(folder, _class_name="WanTransformer3DModel")
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="it is diffusers' WanTransformer3DModel"):
        load(folder)


def test_a_config_with_a_value_of_another_type(folder: Path) -> None:
    rewrite(folder, num_hidden_layers="two")
    with pytest.raises(ValueError, match=r"config\.json of .* must be one that transformers "):
        load(folder)


@pytest.mark.usefixtures("reads_weights")
def test_weights_of_another_architecture(folder: Path) -> None:
    rewrite(folder, architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=16)
    with pytest.raises(ValueError, match=r"every tensor of Qwen3ForCausalLM, missing 4: .*k_norm"):
        load(folder)


@pytest.mark.usefixtures("reads_weights")
def test_weights_of_another_shape(folder: Path) -> None:
    rewrite(folder, intermediate_size=90)
    with pytest.raises(ValueError, match=r"weights of .* must have the shapes of its config\.json"):
        load(folder)


@pytest.mark.usefixtures("reads_weights")
def test_a_tensor_that_is_missing(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing 1: model\.norm\.weight"):
        load(folder)


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
open({mark!r}, "w").close()
class OwnConfig(LlamaConfig):
    model_type = "own_kind"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def remote(folder: Path) -> Path:
    """Makes a checkpoint need its own code; the file that running it leaves."""
    mark = folder / "code_ran"
    (folder / "modeling_own.py").write_text(CODE.format(mark=str(mark)))
    names = {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnModel",
    }
    rewrite(folder, model_type="own_kind", architectures=["OwnModel"], auto_map=names)
    return mark


def test_code_of_the_checkpoint_does_not_run_unasked(folder: Path) -> None:
    mark = remote(folder)
    with pytest.raises(ValueError, match="trust_remote_code must be True to allow that, got False"):
        load(folder)
    assert not mark.exists()


@pytest.mark.usefixtures("reads_weights")
def test_code_of_the_checkpoint_runs_when_asked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    mark = remote(folder)
    with load(folder, trust_remote_code=True) as handle:
        assert mark.exists()
        assert type(handle.model).__name__ == "OwnModel"
        ids = torch.tensor([[72, 105]])
        wanted = checkpoints.text_model().generate(
            ids, max_new_tokens=5, do_sample=False, eos_token_id=None
        )
        assert torch.equal(handle.generate(ids, max_new_tokens=5, eos_token_id=()), wanted)


def test_memory_that_will_not_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(p.numel() * 4 for p in checkpoints.text_model().parameters())
    cache = 2 * 2 * 2 * 16 * 256 * 4  # keys and values, layers, heads, width, positions, fp32
    monkeypatch.setitem(memory.OVERHEAD_BYTES, "cpu", 0)
    workspace = 2 * 4 * checkpoints.BYTES + 4 * 4 * 96 * memory.PREFILL_ROWS
    needed = size + cache + workspace
    checked: list[int] = []

    def loaded(*args: Any, **kwargs: Any) -> Any:
        checked.append(1)
        return checkpoints.text_model()

    monkeypatch.setattr(loading, "load_weights", loaded)
    monkeypatch.setattr(memory, "free_bytes", lambda device: needed)
    load(folder).close()
    assert checked
    monkeypatch.setattr(memory, "free_bytes", lambda device: needed - 1)
    with pytest.raises(MemoryError, match=r"model must fit cpu, which has 0\.00 GiB free, and "):
        load(folder)
    load(folder, max_len=128).close()


def test_free_memory_of_this_machine_is_a_number() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < memory.free_bytes(torch.device("cpu")) <= total


def test_a_packed_weight_counts_what_it_takes() -> None:
    tensors = {
        "mlp.weight": ("BF16", (64, 32)),
        "embed_tokens.weight": ("BF16", (8, 4)),
        "norm.weight": ("BF16", (64,)),
        "ids": ("I64", (2,)),
    }
    assert memory.weight_bytes(tensors, dtype=None) == 64 * 32 * 2 + 64 + 128 + 16
    assert memory.weight_bytes(tensors, dtype=torch.float32) == 64 * 32 * 4 + 128 + 256 + 16
    assert memory.weight_bytes(tensors, dtype=None, precision="nvfp4") == 1152 + 64 + 128 + 16


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"precision": "int3"}, r"precision must be one of .*, got 'int3'"),
        ({"device": "tpu"}, "device must be cpu, cuda or cuda:N, got 'tpu'"),
        ({"device": "meta"}, "device must be cpu, cuda or cuda:N, got 'meta'"),
        ({"device": "cuda:99"}, r"device must be one of the \d+ GPUs .*, got 'cuda:99'"),
        ({"dtype": "int3"}, "dtype must be one of bf16, fp16, fp32, got 'int3'"),
        ({"dtype": torch.int8}, r"dtype must be one of .*, got torch\.int8"),
        ({"precision": "fp8", "attach": False}, "attach must be True with precision='fp8'"),
        ({"kv_cache": "int4"}, "kv_cache must be \"fp8\" or None, got 'int4'"),
        ({"kv_cache": "fp8", "attach": False}, "attach must be True with kv_cache='fp8'"),
        ({"draft": "medusa"}, "draft must be \"lookup\" or a model, got 'medusa'"),
        (
            {"draft": "lookup", "attach": False},
            "attach must be True with draft='lookup', got False",
        ),
        (
            {"draft": torch.nn.Linear(4, 4), "attach": False},
            "attach must be True with draft=a Linear, got False",
        ),
        ({"max_len": 1}, "max_len must be at least 2, got 1"),
        ({"max_len": 257}, "max_len must be at most the 256 positions of .*, got 257"),
        ({"revision": "main"}, "revision must be left out for files, got 'main'"),
    ],
)
def test_bad_arguments(folder: Path, options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=f"load_model: {text}|plan: {text}"):
        load(folder, **options)


def test_an_option_that_is_none_is_named(folder: Path) -> None:
    with pytest.raises(TypeError, match="'quantise'"):
        load(folder, quantise=True)


def test_a_gguf_file_that_is_not_there(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"a file of .*, which has none, got 'q4\.gguf'"):
        load(folder, gguf_file="q4.gguf")
    (folder / "model.safetensors").unlink()
    for name in ("a.gguf", "b.gguf"):
        (folder / name).write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"must name one of the files of .*, a\.gguf, b\.gguf"):
        load(folder)
    with pytest.raises(ValueError, match="must be a GGUF model that transformers reads"):
        load(folder / "a.gguf")
    with pytest.raises(ValueError, match=r"must be left out beside a file, got 'b\.gguf'"):
        load(folder / "a.gguf", gguf_file="b.gguf")


def test_a_module_in_training_mode() -> None:
    model = checkpoints.text_model().train()
    before = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first"):
        load(model, dtype="fp16")
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == before
    assert set(before.values()) != {torch.float16}


@pytest.mark.parametrize(
    "options",
    [{"revision": "main"}, {"gguf_file": "a.gguf"}, {"trust_remote_code": True}, {"token": "x"}],
)
def test_options_of_files_beside_a_module(options: Any) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} must be left out for a module, got "):
        load(torch.nn.Linear(4, 4).eval(), **options)


def test_drafts_are_for_text() -> None:
    with pytest.raises(ValueError, match="draft is for models that generate text, got 'lookup'"):
        load(torch.nn.Linear(4, 4).eval(), draft="lookup")


@pytest.mark.parametrize("attached", [False, True])
def test_drafts_are_for_the_loop(attached: bool) -> None:
    model: Any = zoo.make("gpt2")
    plan = structures.attach(model) if attached else None
    rule = "draft must be left out where the decode loop cannot run the model, got 'lookup'; GPT2LM"
    with pytest.raises(ValueError, match=f"load_model: {rule}.*: one token embedding is wanted"):
        load(model, draft="lookup")
    assert vars(model).get("_flashrt_plan") is plan


def test_a_cache_is_for_text() -> None:
    with pytest.raises(ValueError, match="kv_cache is for models that generate text, got 'fp8'"):
        load(torch.nn.Linear(4, 4).eval(), kv_cache="fp8")


def test_max_len_is_for_text() -> None:
    with pytest.raises(ValueError, match="max_len is for models that generate text, got 64"):
        load(torch.nn.Linear(4, 4).eval(), max_len=64)
