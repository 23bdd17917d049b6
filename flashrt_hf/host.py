"""Load the host model that a command names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

REAL_MODEL = "smollm2"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MODEL_HELP = (
    "smollm2 (the small real model), the name of a benchmark model (true shape, random weights), "
    "a folder, or a Hub id such as Qwen/Qwen3-8B"
)


def default_device() -> torch.device:
    """The first GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    """BF16 on a GPU; fp32 on a CPU, where BF16 arithmetic is emulated."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def load_host(name: str, *, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Load a causal language model in evaluation mode, without a progress bar.

    Args:
        name: see ``MODEL_HELP``.
        device: where it goes.
        dtype: what its parameters are cast to.

    Raises:
        FileNotFoundError: there is no such model.
    """
    from transformers.utils import logging

    from .bench import models

    logging.disable_progress_bar()
    if name == REAL_MODEL:
        from .real_model import load

        return load(device=device, dtype=dtype)
    if name in models.CONFIGS:
        return models.build(name, device=device, dtype=dtype)
    from transformers import AutoModelForCausalLM

    with _named(name):
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    model.requires_grad_(False)
    return model.to(device).eval()


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Raises:
        ValueError: the name is a benchmark model's, whose weights are random.
        FileNotFoundError: there is no such model.
    """
    from .bench import models

    if name == REAL_MODEL:
        from .real_model import tokenizer

        return tokenizer()
    if name in models.CONFIGS:
        raise ValueError(
            f"generate: model must have real weights, got the benchmark model {name!r}"
        )
    from transformers import AutoTokenizer

    with _named(name):
        return AutoTokenizer.from_pretrained(name)


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Turn what transformers raises for an unknown model into one line with the next step."""
    try:
        yield
    except OSError as error:
        raise FileNotFoundError(
            f"model must be {MODEL_HELP}; got {name!r}: {str(error).splitlines()[0]}"
        ) from error
