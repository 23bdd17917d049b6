"""Small values from the host to the device in between its work: neither waits for the other.

A copy from ordinary memory makes the host wait until the device has done all that was queued; one
from pinned memory is queued like a kernel. torch keeps the pinned memory until the copy is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Values = Sequence[float] | torch.Tensor


def put(target: torch.Tensor, values: Values) -> None:
    """Queue a copy of ``values``, numbers or a tensor, into ``target``, which has their shape.

    The caller may write to ``values`` at once.
    """
    target.copy_(_pinned(values, target.dtype, target.device), non_blocking=True)


def on_device(values: Values, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of ``values`` on ``device``, there before what is queued from now on."""
    return _pinned(values, dtype, device).to(device, non_blocking=True)


def _pinned(values: Values, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    pinned = device.type == "cuda"
    if not isinstance(values, torch.Tensor):
        pinned &= len(values) > 0
        return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=pinned)
    if not pinned or values.device.type != "cpu":
        return values
    return torch.empty_like(values, dtype=dtype, pin_memory=True).copy_(values)
