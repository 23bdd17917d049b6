"""load_model of a GGUF file: dequantised to exactly what its blocks stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch

import flash_rt
from flash_rt.flashrt_hf.load import memory

gguf = pytest.importorskip("gguf", reason="GGUF files need the package gguf")

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """What GGUF calls a parameter of a Qwen3."""
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, index, rest = name.split(".", 3)
    return f"blk.{index}.{NAMES[rest.removesuffix('.weight')]}.weight"


def write(path: Path, model: Any) -> dict[str, torch.Tensor]:
    """Write ``model`` in Q8_0, vectors in fp32; what its parameters are then."""
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    vocabulary = checkpoints.tokenizer().get_vocab()
    writer.add_token_list([*sorted(vocabulary, key=vocabulary.__getitem__), "hy"])
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * 257)
    writer.add_token_merges(["h y"])
    writer.add_eos_token_id(0)
    writer.add_chat_template(checkpoints.CHAT)
    values = {}
    for name, tensor in model.state_dict().items():
        kind = gguf.GGMLQuantizationType.Q8_0 if tensor.dim() == 2 else None
        data = tensor.numpy()
        if kind is not None:
            data = gguf.quants.quantize(data, kind)
            values[name] = torch.from_numpy(gguf.quants.dequantize(data, kind))
        else:
            values[name] = tensor
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Any, dict[str, torch.Tensor]]:
    model = checkpoints.text_model("Qwen3", head_dim=128, vocab_size=checkpoints.BYTES + 1)
    path = tmp_path / "little.gguf"
    return path, model, write(path, model)


@pytest.mark.parametrize("by", ["file", "folder"])
def test_a_gguf_file_is_dequantised(by: str, made: Any) -> None:
    path, model, values = made
    name = path if by == "file" else path.parent
    with flash_rt.load_model(name, device="cpu", progress=False) as handle:
        state = handle.model.state_dict()
        for key, value in values.items():
            assert torch.equal(state[key], value), key
        model.load_state_dict(values)
        ids = handle.tokenizer("[user]Why?[assistant]", return_tensors="pt").input_ids
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False
        )
        wanted = handle.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert handle.predict("Why?", max_new_tokens=9) == wanted
        assert handle.limit == 256


def test_its_memory_is_that_of_the_dequantised_weights(made: Any) -> None:
    path, model, _ = made
    elements = sum(p.numel() for p in model.parameters())
    assert memory.gguf_elements(path) == elements


def test_a_dtype_that_was_asked_for(made: Any) -> None:
    with flash_rt.load_model(made[0], device="cpu", dtype="bf16", progress=False) as handle:
        assert {p.dtype for p in handle.model.parameters()} == {torch.bfloat16}


def test_sizes_that_transformers_does_not_read(tmp_path: Path) -> None:
    """Of a Qwen3 it takes heads of 128, whatever the file says."""
    fields = {"head_dim": 32, "vocab_size": checkpoints.BYTES + 1}
    write(tmp_path / "little.gguf", checkpoints.text_model("Qwen3", **fields))
    with pytest.raises(ValueError, match=r"weights of .*little\.gguf must have the shapes "):
        flash_rt.load_model(tmp_path / "little.gguf", device="cpu", progress=False)
