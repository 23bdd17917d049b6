"""From the name on the command line to what the endpoints serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

from ..bench import models
from ..host import load_handle
from ..load import ModuleHandle, VisionLanguageHandle
from .loading import POOLING_FILE, encoder_model, pooling_of, text_model
from .served import Served
from .stand_in import stand_in_tokenizer


def load(
    model: str,
    *,
    name: str,
    max_len: int | None,
    engine: dict[str, Any],
    pooling: str | None,
    device: torch.device,
    dtype: torch.dtype | None,
    **options: Any,
) -> Served:
    """Load and attach.

    Args:
        model: see ``load_handle``; a benchmark model gets a stand-in for a tokenizer.
        name: what requests call it.
        max_len: see ``text_model``.
        engine: options of ``structures.decode_engine``.
        pooling: of an encoder; None follows the checkpoint.
        device, dtype: see ``load_handle``.
        options: further ones of ``load_model``: ``precision``, ``revision`` and others.

    Raises:
        ValueError, FileNotFoundError, MemoryError: as ``load_model`` and ``text_model`` do.
    """
    if model in models.CONFIGS:
        options["tokenizer"] = stand_in_tokenizer(models.config(model).vocab_size)
    handle = load_handle(model, device=device, dtype=dtype, **options)
    if isinstance(handle, ModuleHandle):
        for option, value in {"max_len": max_len, **engine}.items():
            if option != "slots" and value is not None:
                raise ValueError(
                    f"serve: {option} is for models that generate text, got {value!r} for {model}"
                )
        chosen = pooling or _pooling(model, options.get("revision"))
        return encoder_model(handle.model, handle.tokenizer, name=name, pooling=chosen)
    if pooling is not None:
        raise ValueError(f"serve: pooling is for encoders, got {pooling!r} for {model}")
    processor = handle.processor if isinstance(handle, VisionLanguageHandle) else None
    return text_model(
        handle.model,
        handle.tokenizer,
        name=name,
        processor=processor,
        max_len=max_len,
        **engine,
    )


def _pooling(source: str, revision: str | None) -> str:
    """What the checkpoint says, in a folder or on the Hub."""
    if Path(source).is_dir():
        return pooling_of(Path(source) / POOLING_FILE)
    try:
        found = hf_hub_download(source, POOLING_FILE, revision=revision)
    except (EntryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, OSError):
        return "mean"
    return pooling_of(Path(found))
