"""Causal language models."""

from __future__ import annotations

from torch import nn
from zoo_base import TEXT, VOCAB, ZOO, Animal, animal, causal, text

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
