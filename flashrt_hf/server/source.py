"""From the name on the command line to what the endpoints serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

from ..bench import models
from ..host import REAL_MODEL
from .loading import POOLING_FILE, encoder_model, pooling_of, text_model
from .served import Served
from .stand_in import stand_in_tokenizer


def load(
    model: str,
    *,
    name: str,
    max_len: int | None,
    slots: int,
    pooling: str | None,
    device: torch.device,
    dtype: torch.dtype,
    **options: Any,
) -> Served:
    """Load and attach.

    Args:
        model: what ``load_model`` takes, ``smollm2``, or the name of a benchmark model, which gets
            random weights and a stand-in for a tokenizer.
        name: what requests call it.
        max_len, slots: see ``text_model``.
        pooling: of an encoder; None follows the checkpoint.
        device, dtype: where the model goes, and what its weights are cast to.
        options: further ones of ``load_model``: ``precision``, ``revision`` and others.

    Raises:
        ValueError, FileNotFoundError, MemoryError: as ``load_model`` and ``text_model`` do.
    """
    import flash_rt
    from flash_rt.flashrt_hf.load import ModuleHandle, VisionLanguageHandle

    if model in models.CONFIGS:
        host = models.build(model, device=device, dtype=dtype)
        tokenizer = stand_in_tokenizer(host.config.vocab_size)
        source: Any = host
        options = {"precision": options.get("precision", "auto"), "tokenizer": tokenizer}
    else:
        source = model
        if model == REAL_MODEL:
            from ..real_model import folder

            source = folder()
        options |= {"device": device, "dtype": dtype, "max_len": max_len}
    handle = flash_rt.load_model(source, **options)
    if isinstance(handle, ModuleHandle):
        chosen = pooling or _pooling(source, options.get("revision"))
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
        slots=slots,
    )


def _pooling(source: str | Path, revision: str | None) -> str:
    """What the checkpoint says, in a folder or on the Hub."""
    if Path(source).is_dir():
        return pooling_of(Path(source) / POOLING_FILE)
    try:
        found = hf_hub_download(str(source), POOLING_FILE, revision=revision)
    except (EntryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, OSError):
        return "mean"
    return pooling_of(Path(found))
