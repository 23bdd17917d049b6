"""Dense decoders for the loop: the zoo's, and forms of them that the zoo leaves out."""

from __future__ import annotations

import functools
from typing import Any

import torch
import zoo

HALF_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DECODERS: dict[str, Any] = {
    name: zoo.ZOO[name].build
    for name in (
        *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3"),
        *("smollm3", "olmo2", "granite"),
    )
}
VARIANTS: dict[str, Any] = {
    "llama biased": zoo.causal("Llama", attention_bias=True, mlp_bias=True),
    "llama tied": zoo.causal("Llama", tie_word_embeddings=True),
    "llama padding at the end of its vocabulary": zoo.causal("Llama", pad_token_id=127),
    "llama one head": zoo.causal("Llama", num_attention_heads=4, num_key_value_heads=1),
    "llama three layers, odd sizes": zoo.causal(
        "Llama", num_hidden_layers=3, intermediate_size=90, vocab_size=101
    ),
    "llama scaled rotary": zoo.causal("Llama", rope_parameters=LLAMA3),
    "qwen2 windowed": zoo.causal(
        "Qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "phi3 partial rotary": zoo.causal("Phi3", rope_parameters=HALF_ROTARY, sliding_window=6),
    "gemma2 small caps": zoo.causal(
        "Gemma2",
        head_dim=16,
        sliding_window=5,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "granite biased": zoo.causal("Granite", attention_bias=True, mlp_bias=True, logits_scaling=3.0),
}


@functools.cache
def model(name: str) -> Any:
    """A redrawn model that tests share and leave as they found it."""
    torch.manual_seed(0)
    return zoo.redraw({**DECODERS, **VARIANTS}[name]()).eval()


def prompt(batch: int, width: int, padding: tuple[int, ...] = ()) -> tuple[torch.Tensor, Any]:
    """Ids ``[batch, width]``, and a mask with so many zeros on the left of each row."""
    generator = torch.Generator().manual_seed(100 * batch + width)
    ids = torch.randint(3, 97, (batch, width), generator=generator)
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        mask[row, :count] = 0
        ids[row, :count] = 0
    return ids, mask


def host(name: str, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> torch.Tensor:
    """What the host generates, greedily unless said otherwise."""
    options = {"do_sample": False, "pad_token_id": 0, **options}
    tokens: torch.Tensor = model(name).generate(ids, attention_mask=mask, **options)
    return tokens
