"""Folders with tiny checkpoints: a vision-language model and an encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_model
import torch

from flash_rt.flashrt_hf.bench.models import redraw

IMAGE = "<image>"
IMAGE_CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}


def _tokenizer(**special: Any) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = tiny_model.tokenizer().backend_tokenizer.to_str()
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(backend), **special)


def llava(folder: Path) -> Path:
    """A CLIP tower, a Llama and their processor."""
    from transformers import (
        CLIPImageProcessor,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    tokenizer = _tokenizer(eos_token="<|im_end|>", pad_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    text = {
        **LAYERS,
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "intermediate_size": 64,
        "num_key_value_heads": 2,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        **LAYERS,
        "model_type": "clip_vision_model",
        "intermediate_size": 64,
        "image_size": 32,
        "patch_size": 16,
        "projection_dim": 32,
    }
    config = LlavaConfig(
        text_config=text,
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=4,
    )
    model = LlavaForConditionalGeneration(config).eval()
    redraw(model, seed=1)
    size = {"height": 32, "width": 32}
    processor = LlavaProcessor(
        CLIPImageProcessor(size=size, crop_size=size),
        tokenizer,
        patch_size=16,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=IMAGE_CHAT,
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def bert(folder: Path) -> Path:
    """An encoder."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=512, intermediate_size=64, max_position_embeddings=64, pad_token_id=0, **LAYERS
    )
    model = BertModel(config).eval()
    redraw(model, seed=2)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight.mul_(3)
    model.save_pretrained(folder)
    _tokenizer(pad_token="<|end|>").save_pretrained(folder)
    return folder
