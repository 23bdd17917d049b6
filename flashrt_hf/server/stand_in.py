"""A tokenizer for models with random weights: every byte is a token, and so is every other id."""

from __future__ import annotations

from typing import Any

END = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def stand_in_tokenizer(vocabulary: int) -> Any:
    """A byte-level tokenizer with a chat template whose ids all have text.

    Raises:
        ValueError: fewer ids than bytes and an end.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocabulary <= len(alphabet):
        raise ValueError(
            f"stand_in_tokenizer: vocabulary must be above {len(alphabet)}, got {vocabulary}"
        )
    fillers = (f"w{index}" for index in range(vocabulary - len(alphabet) - 1))
    ids = {token: index for index, token in enumerate([*alphabet, *fillers])}
    made = Tokenizer(BPE(ids, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)
    tokenizer.chat_template = TEMPLATE
    return tokenizer
