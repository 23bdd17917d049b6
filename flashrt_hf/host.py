"""Load the model that a command names."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REAL_MODEL = "smollm2"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MODEL_HELP = (
    "smollm2 (the small real model), the name of a benchmark model (true shape, random weights), "
    "a folder, a GGUF file, or a Hub id such as Qwen/Qwen3-8B"
)


def default_device() -> torch.device:
    """The first GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    """BF16 on a GPU; fp32 on a CPU, where BF16 arithmetic is emulated."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def load_host(
    name: str, *, device: torch.device, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The model alone, unattached, in evaluation mode, without a progress bar.

    Args, Raises: see ``load_handle``.
    """
    model: PreTrainedModel = load_handle(
        name, device=device, dtype=dtype, attach=False, progress=False
    ).model
    return model


def load_handle(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    home: torch.device | None = None,
    **options: Any,
) -> Any:
    """``load_model`` of what a command names.

    Args:
        name: see ``MODEL_HELP``.
        device: where it is to run.
        dtype: what its parameters are cast to; None takes the checkpoint's own, except for a CPU,
            which gets ``default_dtype``.
        home: where it is loaded, when that is not ``device``.
        options: further ones of ``load_model``; ``progress`` is on where standard error is a
            terminal.

    Raises:
        FileNotFoundError, ValueError, MemoryError: see ``load_model``.
    """
    from .bench import models
    from .load import load_model

    options = {"progress": sys.stderr.isatty(), **options}
    if name in models.CONFIGS:
        dtype = dtype or default_dtype(device)
        return load_model(models.build(name, device=home or device, dtype=dtype), **options)
    if device.type == "cpu":
        dtype = dtype or default_dtype(device)
    return load_model(_place(name), device=home or device, dtype=dtype, **options)


def _place(name: str) -> str:
    """Folder of the small real model, which is made on the first call; other names as they are."""
    if name != REAL_MODEL:
        return name
    from .real_model import folder

    return str(folder())
