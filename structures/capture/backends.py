"""Which backend records for a device."""

from __future__ import annotations

from functools import cache

import torch

from .cuda import CudaBackend
from .protocol import Backend
from .tape import TapeBackend


def backend_for(device: torch.device | str) -> Backend:
    """The backend of ``device``: CUDA graphs on a GPU, the tape on the CPU.

    Raises:
        ValueError: the device is neither.
    """
    device = torch.device(device)
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    return _backend(device)


@cache
def _backend(device: torch.device) -> Backend:
    if device.type == "cuda":
        return CudaBackend(device)
    if device.type == "cpu":
        return TapeBackend()
    raise ValueError(f"backend_for: device must be cuda or cpu, got {device}")
