"""Checkpoints of other libraries, adopted bit for bit, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save, text_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config

import flash_rt
from flash_rt import structures
from flash_rt.flashrt_hf.quantization import PackedTensor, adopt
from flash_rt.structures import kernels

FP8 = torch.float8_e4m3fn
IDS = torch.arange(1, 14)[None] * 7
FLOAT8 = dict(num_bits=8, type="float", symmetric=True)
SCHEMES: dict[str, dict[str, Any]] = {
    "fp8 by channel": dict(FLOAT8, strategy="channel"),
    "fp8 by tensor": dict(FLOAT8, strategy="tensor"),
    "fp8 by block": dict(FLOAT8, strategy="block", block_structure=[128, 128]),
    "int8 by channel": dict(num_bits=8, type="int", symmetric=True, strategy="channel"),
    "nvfp4": dict(num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16),
}


def small() -> Any:
    """A model whose sizes are no multiples of the blocks of 128."""
    sizes = dict(hidden_size=192, intermediate_size=320, num_hidden_layers=1)
    model = text_model("Llama", dtype=torch.bfloat16, tie_word_embeddings=False, **sizes)
    return model.eval()


def adopted(path: Path) -> Any:
    config = adopt(AutoConfig.from_pretrained(path), path)
    return AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.bfloat16).eval()


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}


def assert_values(model: nn.Module, expected: dict[str, torch.Tensor], precision: str) -> None:
    """Every linear layer but the head is packed, and is what the format's library makes of it."""
    found = linears(model)
    assert found.keys() == expected.keys()
    for name, module in found.items():
        weight = module.weight
        if name == "lm_head":
            assert not isinstance(weight, PackedTensor)
            assert torch.equal(weight, expected[name])
            continue
        assert isinstance(weight, PackedTensor), name
        assert weight.precision == precision
        values, wanted = weight.dequantize(), expected[name].to(torch.bfloat16)
        assert torch.equal(values.view(torch.int16), wanted.view(torch.int16)), name


def assert_useful(model: Any, tmp_path: Path) -> None:
    """It saves, reloads the same, and runs attached."""
    before = model(IDS).logits
    model.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16).eval()
    assert torch.equal(again(IDS).logits, before)
    plan = structures.attach(again, again.forward)
    with torch.no_grad():
        after = again(IDS).logits
    cosine = torch.cosine_similarity(after.flatten().double(), before.flatten().double(), dim=0)
    assert cosine > 0.9995
    assert {row.path: row for row in structures.explain(plan).rows}[
        "model.layers.0"
    ].structure == "decoder_layer"


def compress(model: Any, scheme: dict[str, Any], path: Path) -> dict[str, torch.Tensor]:
    """Quantise with compressed-tensors and save; returns the weights as that library reads them."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    group = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**scheme))
    config = QuantizationConfig(config_groups={"group": group}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            _set_scales(module, scheme)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(path)
    compressor.update_config(path)
    compressor.decompress_model(model)
    return {name: module.weight.detach() for name, module in linears(model).items()}


def _set_scales(module: Any, scheme: dict[str, Any]) -> None:
    weight, kind = module.weight.detach().float(), module.weight_scale.dtype
    largest = 448.0 if scheme["type"] == "float" else 127.5
    if scheme["strategy"] == "tensor_group":
        whole = 448 * 6 / weight.abs().max()
        module.weight_global_scale.data = whole.reshape(1)
        blocks = weight.unflatten(1, (-1, 16)).abs().amax(-1)
        scale = (blocks / 6 * whole).to(FP8).float()
    elif scheme["strategy"] == "channel":
        scale = weight.abs().amax(1, keepdim=True) / largest
    elif scheme["strategy"] == "tensor":
        scale = weight.abs().max().reshape(1) / largest
    else:
        scale = block_maxima(weight) / largest
    assert scale.shape == module.weight_scale.shape
    module.weight_scale.data = scale.to(kind)


def block_maxima(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    padded = nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128)).abs()
    return padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).amax((1, 3))


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors(tmp_path: Path, name: str) -> None:
    expected = compress(small(), SCHEMES[name], tmp_path / "theirs")
    model = adopted(tmp_path / "theirs")
    assert_values(model, expected, name.split()[0])
    assert_useful(model, tmp_path)


def rewrite(path: Path, change: Any, quantization: dict[str, Any]) -> None:
    """Change a saved model's tensors, and write its ``quantization_config``."""
    file = path / "model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for name, value in load_file(file).items():
        base = name.removesuffix(".weight")
        quantised = value.dim() == 2 and "layers" in name
        tensors |= (
            {f"{base}.{k}": v for k, v in change(value).items()} if quantised else {name: value}
        )
    save_file({k: v.contiguous() for k, v in tensors.items()}, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = quantization
    (path / "config.json").write_text(json.dumps(config))


def test_fine_grained_fp8(tmp_path: Path) -> None:
    """What transformers itself makes of such a checkpoint is the truth."""

    def change(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, columns = weight.shape
        scale = block_maxima(weight.float()) / 448
        wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        return {"weight": (weight.float() / wide).to(FP8), "weight_scale_inv": scale}

    sizes = dict(hidden_size=256, intermediate_size=384, num_hidden_layers=1)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=1, head_dim=128)
    model = text_model("Llama", dtype=torch.bfloat16, tie_word_embeddings=False, **sizes)
    model.save_pretrained(tmp_path)
    quantization = dict(
        quant_method="fp8",
        weight_block_size=[128, 128],
        activation_scheme="dynamic",
        modules_to_not_convert=["lm_head"],
    )
    rewrite(tmp_path, change, quantization)
    # Where transformers sees a GPU it keeps the codes, unless it is told not to.
    dequantized = FineGrainedFP8Config(dequantize=True, modules_to_not_convert=["lm_head"])
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=dequantized
    )
    expected = {name: module.weight.detach() for name, module in linears(theirs).items()}
    model = adopted(tmp_path)
    assert_values(model, expected, "fp8")
    assert_useful(model, tmp_path)


def modelopt_fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.float().abs().max() / 448
    data = (weight.float() / scale).to(FP8)
    return {"weight": data, "weight_scale": scale, "input_scale": torch.tensor(0.03)}


def modelopt_nvfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    quant = kernels.family("quant")
    whole = weight.float().abs().max() / (6 * 448)
    found = quant.quantize_nvfp4(weight, global_scale=whole.reshape(1))
    return {
        "weight": found.codes,
        "weight_scale": found.block_scales,
        "weight_scale_2": whole,
        "input_scale": torch.tensor(0.001),
    }


@pytest.mark.parametrize("name", ["FP8", "NVFP4"])
@pytest.mark.parametrize("place", ["config.json", "hf_quant_config.json"])
def test_modelopt(tmp_path: Path, name: str, place: str) -> None:
    """Its arithmetic: ``x * scale``, and for NVFP4 ``x * (block scale * scale)`` in fp32."""
    source = small()
    source.save_pretrained(tmp_path)
    make = {"FP8": modelopt_fp8, "NVFP4": modelopt_nvfp4}[name]
    rewrite(tmp_path, make, dict(quant_method="modelopt", quant_algo=name))
    if place != "config.json":
        config = json.loads((tmp_path / "config.json").read_text())
        described = dict(quantization=config.pop("quantization_config"), producer={})
        del described["quantization"]["quant_method"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / place).write_text(json.dumps(described))
    expected = {}
    for path, module in linears(source).items():
        stored = make(module.weight.detach())
        if path == "lm_head":
            expected[path] = module.weight.detach()
        elif name == "FP8":
            expected[path] = stored["weight"].float() * stored["weight_scale"]
        else:
            codes = kernels.family("quant").unpack_nibbles(stored["weight"])
            grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
            numbers = torch.cat((grid, -grid))[codes.long()]
            scales = stored["weight_scale"].float() * stored["weight_scale_2"]
            expected[path] = numbers * scales.repeat_interleave(16, 1)
    model = adopted(tmp_path)
    assert_values(model, expected, name.lower())
    if name == "FP8":
        assert float(model.model.layers[0].mlp.up_proj.weight.input_scale) == pytest.approx(0.03)
    assert_useful(model, tmp_path)


def test_values_agree_whatever_the_scale() -> None:
    """Both ways to multiply two scales round; in 16 bits that must not show."""
    from flash_rt.flashrt_hf.quantization.scales import nvfp4

    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        whole = torch.rand(1, generator=generator) * 900 + 100
        codes = torch.randint(0, 256, (16, 128), generator=generator, dtype=torch.uint8)
        blocks = torch.randint(1, 0x7F, (16, 16), generator=generator, dtype=torch.uint8).view(FP8)
        made = nvfp4(
            *(codes, blocks, (16, 256), torch.bfloat16),
            scale=1 / whole,
            theirs=lambda numbers, scales, whole=whole: numbers * (scales / whole),
        )
        numbers = kernels.family("quant").dequantize_nvfp4(
            codes, torch.ones(16, 16).to(FP8), torch.ones(1), dtype=torch.float32
        )
        wanted = numbers * (blocks.float() / whole).repeat_interleave(16, 1)
        assert torch.equal(made.dequantize(), wanted.to(torch.bfloat16))


def test_a_scale_moves_to_its_neighbour_where_values_would_differ() -> None:
    from flash_rt.flashrt_hf.quantization.scales import nvfp4

    codes = torch.randint(0, 256, (16, 8), dtype=torch.uint8)
    blocks = torch.full((16, 1), 2.0).to(FP8)
    scale = torch.tensor([0.37])
    neighbour = scale.nextafter(torch.ones(1))
    arguments = (codes, blocks, (16, 16), torch.float32)
    made = nvfp4(*arguments, scale=scale, theirs=lambda x, s: x * s * neighbour)
    assert (made.packed.scale == neighbour).all()
    with pytest.warns(UserWarning, match="of 7 products of an NVFP4 weight differ"):
        nvfp4(*arguments, scale=scale, theirs=lambda x, s: x * s * 0.5)


def test_load_model_adopts(tmp_path: Path) -> None:
    save(tmp_path, small())
    rewrite(tmp_path, modelopt_fp8, dict(quant_method="modelopt", quant_algo="FP8"))
    handle = flash_rt.load_model(tmp_path, device="cpu", dtype="bf16", progress=False)
    assert isinstance(handle.model.model.layers[0].mlp.up_proj.weight, PackedTensor)
    host = adopted(tmp_path)
    structures.attach(host, host.forward)
    expected = structures.decode_loop(host, max_len=64).generate(IDS, max_new_tokens=4)
    assert expected.shape == (1, IDS.shape[1] + 4)
    assert torch.equal(handle.generate(IDS, max_new_tokens=4), expected)


@pytest.mark.parametrize(
    "quantization,message",
    [
        (
            dict(quant_method="gptq", bits=4),
            "quantization_config must be of compressed-tensors, modelopt, fp8, got 'gptq'",
        ),
        (
            dict(quant_method="modelopt", quant_algo="W4A8_AWQ"),
            "a ModelOpt checkpoint's quant_algo must be one of FP8, .*, got W4A8_AWQ",
        ),
        (
            dict(quant_method="fp8", weight_block_size=[64, 64]),
            r"weight_block_size must be \[128, 128\] or null, got \[64, 64\]",
        ),
        (
            dict(
                quant_method="compressed-tensors",
                format="pack-quantized",
                config_groups={
                    "g": dict(
                        weights=dict(num_bits=4, type="int", strategy="group", group_size=128)
                    )
                },
            ),
            "weights must be 8-bit float .*, got 4-bit int by group of 128",
        ),
        (
            dict(quant_method="compressed-tensors", format="marlin-24", config_groups={}),
            "format must be one of .*, got marlin-24",
        ),
        (
            dict(
                quant_method="compressed-tensors",
                format="int-quantized",
                config_groups={
                    "g": dict(
                        weights=dict(num_bits=8, type="int", strategy="channel", symmetric=False)
                    )
                },
            ),
            "got 8-bit int by channel, asymmetric",
        ),
    ],
)
def test_refused_by_name(tmp_path: Path, quantization: dict[str, Any], message: str) -> None:
    config = small().config
    config.quantization_config = quantization
    with pytest.raises(ValueError, match=message):
        adopt(config)
    config.save_pretrained(tmp_path)
    assert adopt(small().config).to_dict().get("quantization_config") is None
