"""Encoders, vision, speech, vision-language, robot and diffusion models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from zoo_base import TEXT, VISION, VOCAB, animal, draw, ids, pixels, text


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
