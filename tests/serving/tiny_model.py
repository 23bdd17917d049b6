"""A tiny random decoder with a byte-level tokenizer that knows chats, tools and ends."""

from __future__ import annotations

import functools
from typing import Any

import torch

from flash_rt.flashrt_hf.bench import models as shapes

VOCABULARY = 512
SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """{%- if tools %}{{ '<|im_start|>system\n# Tools\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{%- endfor %}
{{- 'Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n' }}{%- endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}
{%- if message.tool_calls %}{%- for call in message.tool_calls %}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}{%- endif %}
{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{%- endif %}"""


@functools.cache
def tokenizer() -> Any:
    """Every byte is a token, and so is every other id, most of them unreachable from text."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("t", "h"), ("th", "e"), ("a", "n"), ("an", "d"), ("i", "n"), ("e", "r"), ("o", "n")]
    words = [a + b for a, b in pairs]
    fillers = [f"w{i}" for i in range(VOCABULARY - len(alphabet) - len(words) - len(SPECIAL))]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *words, *fillers])}
    made = Tokenizer(BPE(vocabulary, pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    return fast


def decoder(*, seed: int = 0) -> Any:
    """A Qwen3 of two layers in fp32 on the CPU; it never ends by itself soon."""
    place = torch.device("cpu")
    model = shapes.build("tiny-qwen3", device=place, dtype=torch.float32, seed=seed)
    model.generation_config.eos_token_id = tokenizer().eos_token_id
    return model
