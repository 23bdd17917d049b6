"""The state of torch in which proofs run, whatever the caller has set."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

# What follows sets is the whole process's, so the proofs of two threads wait for each other.
proofs_alone = threading.RLock()


@contextmanager
def proof_state(device: torch.device) -> Iterator[None]:
    """No grad, no autocast, fp32 products in fp32, new tensors fp32; restored afterwards.

    With TF32 a host's own fp32 result is off by 1e-3, more than a wrong eps would be.
    """
    with proofs_alone:
        mkldnn: Any = torch.backends.mkldnn
        backends = [torch.backends.cuda.matmul, mkldnn.matmul]
        before = [backend.fp32_precision for backend in backends]
        dtype = torch.get_default_dtype()
        try:
            for backend in backends:
                backend.fp32_precision = "ieee"
            torch.set_default_dtype(torch.float32)
            with (
                torch.no_grad(),
                torch.autocast("cpu", enabled=False),
                torch.autocast(device.type, enabled=False),
            ):
                yield
        finally:
            torch.set_default_dtype(dtype)
            for backend, precision in zip(backends, before, strict=True):
                backend.fp32_precision = precision


def tensors_made_on(device: torch.device) -> AbstractContextManager[object]:
    """Where a host's forward makes tensors without naming a device, if the caller moved that."""
    return nullcontext() if torch.get_default_device() == device else device
