"""Benchmark models: true configurations, random weights drawn on the device.

A shape decides a decode time, not the values of the weights, so a benchmark needs no checkpoint.
Every weight matrix is drawn from ``N(0, 1 / in_features)``, which keeps activations of order one
through any depth, norm weights from ``1 + 0.1 N(0, 1)`` and biases from ``0.1 N(0, 1)``.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

QWEN3 = dict(
    model_type="qwen3",
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    rms_norm_eps=1e-6,
    max_position_embeddings=1310720,
    rope_parameters=dict(rope_type="default", rope_theta=1e6),
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=5e5,
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": dict(
        model_type="llama",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        rope_parameters=LLAMA3_ROPE,
        tie_word_embeddings=True,
    ),
    "qwen3-0.6b": QWEN3
    | dict(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "qwen3-8b": QWEN3
    | dict(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=False,
    ),
    # Small enough for a CPU: what the tests run, and a rehearsal of a benchmark before it meets a
    # GPU.
    "tiny-llama": dict(
        model_type="llama",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=131072,
        rope_parameters=LLAMA3_ROPE,
        tie_word_embeddings=True,
    ),
    "tiny-qwen3": QWEN3
    | dict(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=False,
    ),
}


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that one decode step of one sequence has to read."""

    weight_bytes: int
    cache_bytes_per_position: int

    def step_bytes(self, live_tokens: float) -> float:
        """``weights + live_tokens * cache row``; activations are not counted."""
        return self.weight_bytes + live_tokens * self.cache_bytes_per_position


def config(name: str) -> PretrainedConfig:
    """Return the true configuration called ``name``; without end-of-text, so that lengths are
    exact.

    Raises:
        ValueError: the name is not in ``CONFIGS``.
    """
    from transformers import AutoConfig

    if name not in CONFIGS:
        raise ValueError(f"bench: model must be one of {', '.join(CONFIGS)}, got {name!r}")
    return AutoConfig.for_model(
        **CONFIGS[name], bos_token_id=None, eos_token_id=None, pad_token_id=None
    )


def build(name: str, *, device: torch.device, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """Build the model called ``name`` straight on ``device`` and draw its weights there."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with torch.device(device), no_init_weights():
        model = AutoModelForCausalLM.from_config(config(name), dtype=dtype)
    model.tie_weights()
    redraw(model, seed=seed)
    model.eval()
    model.requires_grad_(False)
    return model


@torch.no_grad()
def redraw(model: torch.nn.Module, *, seed: int) -> None:
    """Draw every parameter anew, in place; tied parameters once."""
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        elif name.endswith("bias"):
            parameter.normal_(0.0, 0.1, generator=generator)
        else:
            parameter.normal_(1.0, 0.1, generator=generator)


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return a second model object over the same parameters, with buffers of its own.

    Peers run on the twin, so that nothing attached to ``model`` can reach them and no weight exists
    twice.
    """
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, memo)


def alias(model: PreTrainedModel) -> PreTrainedModel:
    """A second model with parameters of its own over the same memory; tied ones stay tied."""
    memo: dict[int, Any] = {
        id(parameter): torch.nn.Parameter(parameter.detach(), requires_grad=False)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, memo)


def traffic(model: PreTrainedModel) -> Traffic:
    """Count what a decode step reads: all weights but an input embedding that is not the head."""
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    weights = parameter_bytes(model)
    if not tied:
        weights -= stored_bytes(embedding)
    text = model.config.get_text_config()
    row = (
        2
        * text.num_hidden_layers
        * text.num_key_value_heads
        * text.head_dim
        * embedding.element_size()
    )
    return Traffic(weight_bytes=weights, cache_bytes_per_position=row)


def parameter_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters as they are stored, tied ones once."""
    return sum(map(stored_bytes, model.parameters()))


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, or of what one of a quantised kind is made of."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.numel() * tensor.element_size()
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return sum(stored_bytes(getattr(tensor, name)) for name in names)


def prompt_ids(
    vocab_size: int, tokens: int, *, rows: int = 1, device: torch.device, seed: int = 1
) -> torch.Tensor:
    """Draw ``[rows, tokens]`` int64 token ids on the CPU: every device sees the same prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (rows, tokens), generator=generator).to(device)
