"""What surrounds a call: settings that choose kernels, observers that a replay would escape."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from typing import Any

import torch

from .streams import is_recording


def observed(device_type: str) -> bool:
    """Whether something records or transforms the operations of this thread."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or is_recording()
        or (device_type == "cuda" and torch.cuda.is_current_stream_capturing())
    )


def settings(device_type: str) -> Hashable:
    """Settings outside the call that choose other kernels."""
    autocast = torch.is_autocast_enabled(device_type)
    return (
        torch.get_autocast_dtype(device_type) if autocast else None,
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


def uncached_autocast() -> Any:
    """Autocast keeps casted weights until its block ends, which would be freed under a graph."""
    for kind in ("cuda", "cpu"):
        if torch.is_autocast_enabled(kind):
            return torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False)
    return nullcontext()
