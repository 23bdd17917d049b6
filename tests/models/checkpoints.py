"""Tiny models saved as checkpoints, with a tokenizer of bytes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import zoo

CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{{ mood or '' }}{% endif %}"
)
BYTES = 257  # the end of text, then one token for every byte


@functools.cache
def tokenizer() -> Any:
    """One token a byte, id 0 the end of text; with a chat template."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(["<end>", *alphabet])}
    made = Tokenizer(BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    fast.chat_template = CHAT
    return fast


def text_model(kind: str = "Llama", *, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    """A causal model over the tokenizer's bytes whose answers end of themselves only at a limit."""
    torch.manual_seed(0)
    fields = {"vocab_size": BYTES, "eos_token_id": 0, "bos_token_id": None, **fields}
    model = zoo.redraw(zoo.causal(kind, **fields)()).to(dtype)
    model.generation_config.bos_token_id = None
    return model


def save(folder: Path, model: Any, *, chat: bool = True, **options: Any) -> Path:
    """Write ``model`` and the tokenizer as safetensors into ``folder``."""
    model.save_pretrained(folder, **options)
    tokenizer().save_pretrained(folder)
    if not chat:
        (folder / "chat_template.jinja").unlink()
    return folder


def host_answer(prompt: str, new: int, **options: Any) -> torch.Tensor:
    """New token ids that the unattached model gives to a text."""
    encoded = tokenizer()(prompt, return_tensors="pt")
    out: torch.Tensor = text_model().generate(
        encoded["input_ids"],
        attention_mask=encoded["attention_mask"],
        max_new_tokens=new,
        **{"do_sample": False, **options},
    )
    return out[0, encoded["input_ids"].shape[1] :]


def host_text(prompt: str, new: int, **options: Any) -> str:
    text: str = tokenizer().decode(host_answer(prompt, new, **options), skip_special_tokens=True)
    return text
