"""Tiny random models of many architectures, and an input for each.

Parameters are redrawn: weights N(0, 1/fan_in), vectors N(0.7, 0.4^2), so that norm weights are not
1 and biases not 0, and a structure that ignores one of them cannot go unnoticed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

VOCAB = 128
TEXT = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
VISION = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=32,
    patch_size=16,
)


@dataclass(frozen=True)
class Animal:
    """One architecture.

    Attributes:
        build: makes the model; weights are redrawn by ``make``.
        inputs: keyword arguments of one forward call.
        generates: whether it is a causal language model with ``generate``.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    generates: bool = False


ZOO: dict[str, Animal] = {}


def animal(inputs: Callable[[], dict[str, Any]], **facts: bool) -> Callable[..., Any]:
    """Enter a builder into the zoo under its own name."""

    def enter(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        ZOO[build.__name__] = Animal(build.__name__, build, inputs, **facts)
        return build

    return enter


def redraw(model: nn.Module, seed: int = 7) -> nn.Module:
    """Give every floating-point parameter a value that initialisation never gives."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.copy_(0.7 + 0.4 * values)
            else:
                parameter.copy_(values * parameter.shape[-1] ** -0.5)
    return model.eval()


def make(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Module:
    """A fresh redrawn model."""
    torch.manual_seed(0)
    return redraw(ZOO[name].build()).to(dtype).to(device)


def inputs(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, Any]:
    """Arguments of one forward call, floats in ``dtype``."""

    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else value.dtype)

    return {name: place(value) for name, value in ZOO[name].inputs().items()}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def ids(batch: int = 2, tokens: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, 100, (batch, tokens), generator=generator)


def text() -> dict[str, Any]:
    return {"input_ids": ids()}


def pixels() -> dict[str, Any]:
    return {"pixel_values": draw(1, 3, 32, 32)}


def causal(kind: str, **fields: Any) -> Callable[[], nn.Module]:
    """Enter a causal language model: ``<kind>Config`` and ``<kind>ForCausalLM``."""

    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**{**TEXT, **fields})
        return getattr(transformers, f"{kind}ForCausalLM")(config)

    return build


LANGUAGE = {
    "llama": causal("Llama"),
    "mistral": causal("Mistral", sliding_window=5, head_dim=16),
    "qwen2": causal("Qwen2"),
    "qwen3": causal("Qwen3", head_dim=16),
    "qwen3_moe": causal(
        "Qwen3Moe", head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "mixtral": causal("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "gemma": causal("Gemma", head_dim=16),
    "gemma2": causal("Gemma2", head_dim=16, sliding_window=5, query_pre_attn_scalar=16),
    "phi3": causal("Phi3"),
    "gpt_neox": causal("GPTNeoX"),
    "opt": causal("OPT", ffn_dim=96, word_embed_proj_dim=64),
    "starcoder2": causal("Starcoder2", sliding_window=5),
    "olmo2": causal("Olmo2"),
    "granite": causal(
        "Granite",
        residual_multiplier=0.7,
        attention_multiplier=0.3,
        logits_scaling=1.5,
        embedding_multiplier=2.0,
    ),
    "smollm3": causal("SmolLM3", no_rope_layers=[1, 0]),
    "falcon": causal("Falcon", new_decoder_architecture=False, bias=True),
    "mamba2": causal(
        "Mamba2", head_dim=16, num_heads=8, state_size=16, n_groups=2, chunk_size=8, expand=2
    ),
    "deepseek_v3": causal(
        "DeepseekV3",
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        num_key_value_heads=4,
    ),
}
for _name, _build in LANGUAGE.items():
    ZOO[_name] = Animal(_name, _build, text, generates=True)


def gemma3() -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **{**TEXT, "num_hidden_layers": 3},
        head_dim=16,
        sliding_window=5,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    return Gemma3ForCausalLM(config)


ZOO["gemma3"] = Animal("gemma3", gemma3, text, generates=True)


@animal(text, generates=True)
def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_positions=256,
            n_inner=96,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


@animal(text, generates=True)
def qwen3_5() -> nn.Module:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            **TEXT,
            head_dim=16,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        )
    )


@animal(text)
def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**TEXT))


@animal(pixels)
def vit() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(**VISION))


@animal(pixels)
def siglip() -> nn.Module:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    return SiglipVisionModel(SiglipVisionConfig(**VISION))


def _text_and_pixels() -> dict[str, Any]:
    return {**text(), **pixels()}


@animal(_text_and_pixels)
def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    return CLIPModel(
        CLIPConfig(
            text_config={**TEXT, "projection_dim": 32},
            vision_config={**VISION, "projection_dim": 32},
            projection_dim=32,
        )
    )


def _seq2seq() -> dict[str, Any]:
    return {**text(), "decoder_input_ids": ids(2, 4)}


@animal(_seq2seq)
def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=64,
            d_ff=96,
            d_kv=16,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            decoder_start_token_id=0,
        )
    )


def _speech() -> dict[str, Any]:
    return {"input_features": draw(1, 16, 40), "decoder_input_ids": ids(1, 4)}


@animal(_speech)
def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCAB,
            d_model=64,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=96,
            decoder_ffn_dim=96,
            num_mel_bins=16,
            max_source_positions=20,
            max_target_positions=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
    )


def _qwen3_vl_inputs() -> dict[str, Any]:
    tokens = ids(1, 10)
    tokens[0, 3:7] = 120  # four merged patches of one 8 x 8 grid of 4-pixel patches
    return {
        "input_ids": tokens,
        "pixel_values": draw(16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (tokens == 120).int(),
    }


@animal(_qwen3_vl_inputs)
def qwen3_vl() -> nn.Module:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig(
        text_config={
            **TEXT,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        vision_config=dict(
            depth=2,
            hidden_size=32,
            intermediate_size=48,
            num_heads=2,
            out_hidden_size=64,
            patch_size=4,
            temporal_patch_size=2,
            spatial_merge_size=2,
            num_position_embeddings=16,
            deepstack_visual_indexes=[0],
        ),
        image_token_id=120,
        video_token_id=121,
        vision_start_token_id=122,
        vision_end_token_id=123,
    )
    return Qwen3VLForConditionalGeneration(config)


def _paligemma_inputs() -> dict[str, Any]:
    tokens = ids(1, 9)
    tokens[0, :4] = 120
    return {
        "input_ids": tokens,
        "pixel_values": draw(1, 3, 32, 32),
        "attention_mask": torch.ones(1, 9, dtype=torch.long),
        "token_type_ids": torch.zeros(1, 9, dtype=torch.long),
    }


def _paligemma_config() -> Any:
    from transformers import PaliGemmaConfig

    return PaliGemmaConfig(
        text_config={**TEXT, "model_type": "gemma", "head_dim": 16},
        vision_config={**VISION, "model_type": "siglip_vision_model", "projection_dim": 64},
        projection_dim=64,
        image_token_id=120,
    )


@animal(_paligemma_inputs)
def paligemma() -> nn.Module:
    from transformers import PaliGemmaForConditionalGeneration

    return PaliGemmaForConditionalGeneration(_paligemma_config())


def _pi0_inputs() -> dict[str, Any]:
    tokens = ids(1, 9)
    tokens[0, :4] = 120
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones(1, 9, dtype=torch.long),
        "pixel_values": draw(1, 1, 3, 32, 32),
        "pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool),
        "state": draw(1, 8),
        "noise": draw(1, 5, 8),
        "timestep": torch.tensor([0.4]),
    }


@animal(_pi0_inputs)
def pi0() -> nn.Module:
    from transformers import PI0Config, PI0ForConditionalGeneration

    expert = {**TEXT, "hidden_size": 32, "model_type": "gemma", "head_dim": 16}
    return PI0ForConditionalGeneration(
        PI0Config(
            vlm_config=_paligemma_config().to_dict(),
            dit_config={**expert, "use_bidirectional_attention": True},
            chunk_size=5,
            max_state_dim=8,
            max_action_dim=8,
        )
    )


def _wan_inputs() -> dict[str, Any]:
    return {
        "hidden_states": draw(1, 4, 1, 8, 8),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": draw(1, 6, 24),
        "return_dict": False,
    }


@animal(_wan_inputs)
def wan() -> nn.Module:
    diffusers = pytest.importorskip("diffusers", reason="wan needs diffusers")
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        text_dim=24,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )


@functools.cache
def shared(name: str, device: str = "cpu") -> nn.Module:
    """One fp32 model for all tests that put back what they change."""
    return make(name, device=device)
