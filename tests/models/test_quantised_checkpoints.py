"""FlashRTConfig: quantise on load, save, reload, attach; for transformers and for diffusers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from checkpoints import text_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import flash_rt
from flash_rt import FlashRTConfig, structures
from flash_rt.flashrt_hf.quantization import PackedTensor
from flash_rt.structures import kernels
from flash_rt.structures.decision import Bound

PRECISIONS = ("fp8", "int8", "nvfp4")
FLOORS = {"fp8": 0.995, "int8": 0.9995, "nvfp4": 0.95}
IDS = torch.arange(1, 14)[None] * 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in full precision, its vocabulary projection of its own."""
    path = tmp_path_factory.mktemp("full")
    text_model("Llama", dtype=torch.bfloat16, tie_word_embeddings=False).save_pretrained(path)
    return path


def load(path: Path, config: Any = None) -> Any:
    given = {} if config is None else dict(quantization_config=config)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **given).eval()


def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(IDS).logits
    return found


def packed(model: Any) -> dict[str, str]:
    """Precision of every packed parameter, by its name."""
    pairs = model.named_parameters()
    return {name: p.precision for name, p in pairs if isinstance(p, PackedTensor)}


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(
        torch.cosine_similarity(one.detach().flatten().double(), other.flatten().double(), dim=0)
    )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_quantised_on_load(folder: Path, precision: str) -> None:
    full, model = load(folder), load(folder, FlashRTConfig(precision))
    linears = {n for n, m in full.named_modules() if isinstance(m, torch.nn.Linear)}
    expected = {f"{name}.weight": precision for name in linears}
    expected["lm_head.weight"] = "int8" if precision == "nvfp4" else precision
    assert packed(model) == expected
    assert cosine(logits(model), logits(full).detach()) > FLOORS[precision]
    weight = full.model.layers[0].mlp.up_proj.weight
    quantise = getattr(kernels.family("quant"), f"quantize_{precision}")
    if precision != "nvfp4":
        data, scale = quantise(weight.detach())
        mine = model.model.layers[0].mlp.up_proj.weight.packed
        assert torch.equal(mine.data.view(torch.uint8), data.view(torch.uint8))
        assert torch.equal(mine.scale, scale)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_saved_and_reloaded_gives_the_same_outputs(
    folder: Path, tmp_path: Path, precision: str
) -> None:
    model = load(folder, FlashRTConfig(precision))
    model.save_pretrained(tmp_path / "one")
    again = load(tmp_path / "one")
    assert packed(again) == packed(model)
    assert torch.equal(logits(again), logits(model))
    again.save_pretrained(tmp_path / "two")  # and once more, from what was read
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value.view(torch.uint8), second[name].view(torch.uint8)), name
    if precision != "nvfp4":  # whose tiles are larger than these layers
        full = (folder / "model.safetensors").stat().st_size
        assert (tmp_path / "one" / "model.safetensors").stat().st_size < 0.8 * full
    stored = json.loads((tmp_path / "one" / "config.json").read_text())["quantization_config"]
    assert stored["quant_method"] == "flashrt"
    assert stored["precision"] == precision


def test_patterns_and_layers_left_alone(folder: Path) -> None:
    config = FlashRTConfig(
        {"*.mlp": "nvfp4", "*.self_attn": "fp8", "*.o_proj": "bf16"},
        modules_to_not_convert=["down_proj"],
    )
    found = packed(load(folder, config))
    kinds = {name.split(".", 3)[-1].removesuffix(".weight"): kind for name, kind in found.items()}
    assert kinds == {
        "self_attn.q_proj": "fp8",
        "self_attn.k_proj": "fp8",
        "self_attn.v_proj": "fp8",
        "mlp.gate_proj": "nvfp4",
        "mlp.up_proj": "nvfp4",
    }


def test_a_pattern_that_matches_nothing_is_an_error(folder: Path) -> None:
    config = FlashRTConfig({"*": "fp8", "model.layers.9.*": "int8"})
    with pytest.raises(
        ValueError, match=r"pattern 'model\.layers\.9\.\*', which matches no module"
    ):
        load(folder, config)


def test_memory_is_reserved_for_what_is_stored(folder: Path) -> None:
    model = load(folder, FlashRTConfig({"*.mlp": "int8"}))
    sizes = {
        name: model.hf_quantizer.param_element_size(model, name, parameter)
        for name, parameter in model.named_parameters()
    }
    up = model.model.layers[0].mlp.up_proj.weight
    assert sizes["model.layers.0.mlp.up_proj.weight"] == 1 + 4 / up.shape[1]
    assert sizes["model.layers.0.self_attn.q_proj.weight"] == 2
    assert sizes["model.norm.weight"] == 2


def test_a_tied_vocabulary_stays_with_its_embedding(tmp_path: Path) -> None:
    text_model("Qwen3", dtype=torch.bfloat16, tie_word_embeddings=True).save_pretrained(tmp_path)
    model = load(tmp_path, FlashRTConfig("int8"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any("lm_head" in name or "embed" in name for name in packed(model))
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again")), logits(model))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_attached_as_it_came(folder: Path, precision: str) -> None:
    model = load(folder, FlashRTConfig(precision))
    before = logits(model)
    plan = structures.attach(model, model.forward)
    rows = {row.path: row for row in structures.explain(plan).rows}
    assert isinstance(rows["model.layers.0"], Bound)
    assert rows["model.layers.0"].precision == precision
    with torch.no_grad():
        after = logits(model)
        assert cosine(after, before) > 0.9999
        for _ in range(2):  # the second call replays
            assert torch.equal(logits(model), after)
    tokens = structures.decode_loop(model, max_len=64).generate(IDS, max_new_tokens=8)
    assert tokens.shape == (1, IDS.shape[1] + 8)
    plan.detach()
    assert torch.equal(logits(model), before)
    assert set(packed(model).values()) >= {precision}


def test_the_loop_reads_the_packed_weights(folder: Path) -> None:
    """Greedy tokens of the loop are those of the host's own forward, where they are clear."""
    model = load(folder, FlashRTConfig("fp8"))
    sequence = IDS
    for _ in range(6):
        sequence = torch.cat((sequence, model(sequence).logits[:, -1:].argmax(-1)), dim=1)
    structures.attach(model, model.forward)
    tokens = structures.decode_loop(model, max_len=64).generate(IDS, max_new_tokens=6)
    assert torch.equal(tokens, sequence)


def test_handle_of_a_quantised_folder(folder: Path, tmp_path: Path) -> None:
    from checkpoints import save

    save(tmp_path, load(folder, FlashRTConfig("int8")))
    handle = flash_rt.load_model(tmp_path, device="cpu", dtype="fp32", progress=False)
    assert set(packed(handle.model).values()) == {"int8"}
    assert handle.plan is not None
    assert len(handle.predict("ab", max_new_tokens=3)) >= 0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_diffusers(tmp_path: Path, precision: str) -> None:
    diffusers = pytest.importorskip("diffusers", reason="needs diffusers")
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(num_attention_heads=2, attention_head_dim=16, ffn_dim=72)
    sizes |= dict(in_channels=4, out_channels=4, text_dim=32, freq_dim=32, num_layers=1)
    kind = diffusers.WanTransformer3DModel
    full = zoo.redraw(kind(**sizes, rope_max_seq_len=32))
    full.save_pretrained(tmp_path / "full")
    given = dict(torch_dtype=torch.bfloat16)
    inputs = dict(
        hidden_states=torch.randn(1, 4, 2, 8, 8, dtype=torch.bfloat16),
        encoder_hidden_states=torch.randn(1, 6, 32, dtype=torch.bfloat16),
        timestep=torch.tensor([3]),
        return_dict=False,
    )
    full = kind.from_pretrained(tmp_path / "full", **given)
    model = kind.from_pretrained(
        tmp_path / "full", quantization_config=FlashRTConfig(precision), **given
    )
    assert set(packed(model).values()) == {precision}
    model.save_pretrained(tmp_path / "packed")
    again = kind.from_pretrained(tmp_path / "packed", **given)
    assert packed(again) == packed(model)
    with torch.no_grad():
        outputs = [one(**inputs)[0] for one in (full, model, again)]
    assert cosine(outputs[1], outputs[0]) > FLOORS[precision]
    assert torch.equal(outputs[2], outputs[1])


def test_without_flash_rt_nothing_is_taken_for_a_weight(folder: Path, tmp_path: Path) -> None:
    """transformers alone names the method, and misses every weight instead of misreading one."""
    load(folder, FlashRTConfig("fp8")).save_pretrained(tmp_path)
    script = (
        "import sys; from transformers import AutoModelForCausalLM as A\n"
        "_, report = A.from_pretrained(sys.argv[1], output_loading_info=True)\n"
        "print(sorted(report['missing_keys'])[:2], len(report['unexpected_keys']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "Unknown quantization type, got flashrt" in done.stderr + done.stdout
    assert done.stdout.splitlines()[-1].startswith(
        "['lm_head.weight', 'model.layers.0.mlp.down_proj.weight'] "
    )


@pytest.mark.parametrize(
    "arguments,message",
    [
        (dict(precision="fp4"), "precision must be one of fp8, int8, nvfp4, or a dict of"),
        (dict(precision={"*": "bf16"}), "precision must be one of fp8, int8, nvfp4, or a dict of"),
        (dict(precision={}), "precision must be one of fp8, int8, nvfp4, or a dict of"),
        (dict(layout=2), "layout must be 1, got 2; a newer flashrt-hf reads it"),
        (dict(quant_method="fp8"), "quant_method must be 'flashrt', got 'fp8'"),
    ],
)
def test_configuration_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"FlashRTConfig: {message}"):
        FlashRTConfig(**arguments)
    with pytest.raises(TypeError, match="unexpected keyword argument 'bits'"):
        FlashRTConfig(bits=8)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="modules_to_not_convert must be a list .*, got 'lm_head'"):
        FlashRTConfig(modules_to_not_convert="lm_head")


def test_a_stored_weight_that_does_not_fit(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    load(folder, FlashRTConfig("fp8")).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight_scale"
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match="must be stored as|conversion"):
        load(tmp_path)


def test_a_format_that_came_with_the_checkpoint_is_kept(folder: Path) -> None:
    config = FlashRTConfig({"model.layers.0": "int8"})
    model = load(folder, config)
    plan = structures.attach(model, precision="fp8", min_cosine=None)
    rows = {row.path: row for row in structures.explain(plan).rows}
    assert rows["model.layers.0"].precision == "int8"
    assert rows["model.layers.1"].precision == "fp8"
    assert "its checkpoint stores it as int8, which is kept" in str(structures.explain(plan))
    assert set(packed(model).values()) == {"int8"}
    plan.detach()
    assert set(packed(model).values()) == {"int8"}
