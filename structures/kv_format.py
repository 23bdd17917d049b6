"""How a loop's cache stores keys and values: in the model's dtype, or in FP8 with scales.

FP8 is E4M3: three bits behind the leading one, so that an element is off by at most 1/16 of itself.
Scales belong to a layer and a key head and are measured once, on a fixed text when the cache is
made: nothing that a request brings changes them, so the same prompt gives the same answer whatever
came before. They are powers of two, so that reading back rounds nothing, and leave eight times the
largest element seen before anything saturates; elements down to 2**-10 of it keep all their bits.
"""

from __future__ import annotations

from typing import Literal

import torch

KVCache = Literal["fp8"] | None
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(torch.float8_e4m3fn).max
HEADROOM = 8.0
MEASURED_TOKENS = 64
STRIDE = 7919  # a prime: the ids spread over any vocabulary


def checked(where: str, kv_cache: object) -> KVCache:
    """``kv_cache`` of a public function.

    Raises:
        ValueError: it is none that a loop has.
    """
    if kv_cache is None:
        return None
    if kv_cache == "fp8":
        return "fp8"
    raise ValueError(f'{where}: kv_cache must be "fp8" or None, got {kv_cache!r}')


def measured_ids(max_len: int, vocabulary: int, device: torch.device) -> torch.Tensor:
    """The text on which scales are measured."""
    count = min(MEASURED_TOKENS, max_len)
    return (torch.arange(count, device=device) * STRIDE + 1) % vocabulary


def set_scale(scale: torch.Tensor, x: torch.Tensor) -> None:
    """``scale [G]`` for keys or values like ``x [1, T, G, D]``, in place."""
    wanted = x.float().abs().amax((0, 1, 3)).clamp(2.0**-60, 2.0**60) * (HEADROOM / LARGEST)
    scale.copy_(torch.exp2(torch.ceil(torch.log2(wanted))))


def widened(cache: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What an FP8 cache ``[B, G, S, D]`` stands for."""
    return cache.to(dtype) * scale.to(dtype)[:, None, None]
