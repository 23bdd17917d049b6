"""Statistics on disk: one JSON file for each model, data and settings, or none at all.

The key covers every byte of every parameter, so a file is never read for other weights. What cannot
be read, or says something else than asked for, is as good as not there.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flash_rt import cache_folder

SCHEMA = 2
_BLOCK_WORDS = 1 << 21  # 16 MB of a parameter at a time
_SEED = 22


def weights_digest(model: nn.Module) -> str:
    """A hash of name, dtype, shape and bytes of every parameter and buffer.

    Each block of 8-byte words is multiplied with odd random factors and summed modulo 2**64, on the
    device that holds it, so that a changed word always changes its sum; the sums go into SHA-256.
    """
    found = hashlib.sha256()
    factors: dict[torch.device, torch.Tensor] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.numel():
            device = tensor.device
            if device not in factors:
                factors[device] = _factors().to(device)
            sums = torch.stack([*_sums(tensor.detach(), factors[device])])
            found.update(sums.cpu().numpy().tobytes())
    return found.hexdigest()


def _factors() -> torch.Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    limits = torch.iinfo(torch.int64)
    words = torch.randint(
        limits.min, limits.max, (_BLOCK_WORDS,), generator=generator, device="cpu"
    )
    return words | 1


def _sums(tensor: torch.Tensor, factors: torch.Tensor) -> Iterator[torch.Tensor]:
    """Sum of each block; bytes behind the last whole word are a word of their own."""
    bytes_ = tensor.contiguous().view(-1).view(torch.uint8)
    if bytes_.storage_offset() % 8:
        bytes_ = bytes_.clone()
    whole = bytes_.numel() // 8 * 8
    words = bytes_[:whole].view(torch.int64) if whole else bytes_.new_zeros(0, dtype=torch.int64)
    for block in words.split(_BLOCK_WORDS):
        yield (block * factors[: block.numel()]).sum()
    rest = bytes_[whole:]
    if rest.numel():
        yield (rest.long() * factors[: rest.numel()]).sum()


def key_of(**parts: Any) -> str:
    """SHA-256 of everything that the statistics depend on."""
    text = json.dumps({"schema": SCHEMA, **parts}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read(key: str) -> dict[str, Any] | None:
    """What was written under ``key``; None where there is nothing usable."""
    try:
        found = json.loads(_path(key).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or found.get("key") != key:
        return None
    return found


def write(key: str, values: dict[str, Any]) -> str | None:
    """Write atomically; why it could not be, if so: a cache is never worth a failure."""
    path = _path(key)
    text = json.dumps({"schema": SCHEMA, "key": key, **values})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        return f"statistics could not be cached in {path.parent}: {error}"
    return None


def _path(key: str) -> Path:
    return cache_folder.get() / "calibration" / f"{key}.json"
