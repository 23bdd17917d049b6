"""What a model will need on its device, and what the device has."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .files import WHERE

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GIB = 2**30
# Bytes of an element as safetensors names its dtype.
ELEMENT_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4} | {
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
}
FLOATING = ("F64", "F32", "F16", "BF16")
# Bytes of an element of a weight matrix by precision, scales included: nvfp4 has an E4M3 scale for
# each 16 weights of 4 bits.
PRECISION_BYTES = {"fp8": 1.0, "int8": 1.0, "nvfp4": 0.5625}
PREFILL_ROWS = 256  # of a chunk that replays as a graph
# CUDA context, kernels and the pools of captured graphs: above every `peak_beyond_mb`, what loops
# use beyond weights and cache, of benchmarks/records.
OVERHEAD_BYTES = {"cuda": 640 * 2**20, "cpu": 64 * 2**20}


@dataclass(frozen=True)
class Estimate:
    """Bytes on the device: what stays, and what comes and goes."""

    weight_bytes: int
    cache_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        """Of everything at once."""
        return self.weight_bytes + self.cache_bytes + self.workspace_bytes

    def __str__(self) -> str:
        return (
            f"{_gib(self.total_bytes)} ({_gib(self.weight_bytes)} weights, "
            f"{_gib(self.cache_bytes)} cache, {_gib(self.workspace_bytes)} workspace)"
        )


def weight_bytes(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    *,
    dtype: torch.dtype | None,
    precision: Any = "auto",
) -> int:
    """Bytes of a checkpoint's tensors once they are loaded.

    Args:
        tensors: by name, dtype as safetensors names it and shape.
        dtype: what floats are cast to; None leaves them.
        precision: a name of ``PRECISION_BYTES`` packs matrices, but for embeddings; a mapping or
            another name packs none here, which estimates too much rather than too little.
    """
    packed = PRECISION_BYTES.get(precision) if isinstance(precision, str) else None
    total = 0.0
    for name, (kind, shape) in tensors.items():
        element: float = ELEMENT_BYTES.get(kind, 1)
        if kind in FLOATING:
            element = dtype.itemsize if dtype is not None else element
            if packed is not None and len(shape) == 2 and "embed" not in name:
                element = packed
        total += prod(shape) * element
    return int(total)


def gguf_elements(path: Path) -> int:
    """Elements of all tensors of a GGUF file, which are dequantised."""
    from gguf import GGUFReader

    return sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)


def cache_bytes(config: PretrainedConfig, *, max_len: int, batch: int, element: float) -> int:
    """Keys and values of ``batch`` rows of ``max_len`` positions; 0 without attention heads."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", 0)
    layers = getattr(text, "num_hidden_layers", 0)
    width = getattr(text, "head_dim", None)
    if width is None:
        queries = getattr(text, "num_attention_heads", 0)
        width = getattr(text, "hidden_size", 0) // queries if queries else 0
    sizes = [n for n in (heads, layers, width) if isinstance(n, int)]
    return int(2 * prod(sizes) * max_len * batch * element) if len(sizes) == 3 else 0


def workspace_bytes(config: PretrainedConfig, device: torch.device, *, batch: int) -> int:
    """Logits in fp32, the widest activations of a prefill chunk, and what the runtime takes."""
    text = config.get_text_config()
    vocabulary = getattr(text, "vocab_size", 0) or 0
    width = max(getattr(text, n, 0) or 0 for n in ("intermediate_size", "hidden_size"))
    logits = 2 * 4 * vocabulary * batch
    return logits + 4 * 4 * width * PREFILL_ROWS + OVERHEAD_BYTES.get(device.type, 0)


def free_bytes(device: torch.device) -> int:
    """Memory that the device can give now: of a GPU with what torch keeps unused, of a CPU what
    the system and the control group leave."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + unused)
    found = [_available(), _group_left()]
    return min((n for n in found if n is not None), default=2**63)


def check(estimate: Estimate, device: torch.device, name: str) -> None:
    """Refuse before loading what will not fit.

    Raises:
        MemoryError: more than is free; the text names both and what to change.
    """
    free = free_bytes(device)
    if estimate.total_bytes > free:
        raise MemoryError(
            f"{WHERE}: {name} must fit {device}, which has {_gib(free)} free, and needs "
            f"{estimate}; a smaller max_len, a lower precision such as precision='fp8' or another "
            "device needs less"
        )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _available() -> int | None:
    """What Linux estimates new programs can take without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        pages = "SC_AVPHYS_PAGES"
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") if pages in os.sysconf_names else None
    found = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    return int(found["MemAvailable"][0]) * 1024 if "MemAvailable" in found else None


def _group_left() -> int | None:
    """What the limit of this process's control group (a container's) leaves."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text(encoding="ascii").strip()
        used = int((root / "memory.current").read_text(encoding="ascii"))
        reclaimable = _inactive_files(root / "memory.stat")
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - used + reclaimable


def _inactive_files(path: Path) -> int:
    for line in path.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return int(value)
    return 0
