"""What host code asks about capturing, answered the same way by warm-up, recording and tape."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_recording_threads: set[int] = set()
_one_at_a_time = threading.Lock()


def is_recording() -> bool:
    """Whether this thread is inside ``Backend.record``."""
    return bool(_recording_threads) and threading.get_ident() in _recording_threads


@contextmanager
def recording_thread() -> Iterator[None]:
    """Make ``torch.cuda.is_current_stream_capturing`` true for this thread only.

    transformers asks it and then skips the checks that wait for the device, which selects other
    masks and kernels. Warm-up, recording and the tape must take the path that is recorded.
    Recordings of several threads wait for each other.
    """
    me = threading.get_ident()
    with _one_at_a_time:
        original = torch.cuda.is_current_stream_capturing

        def is_current_stream_capturing() -> bool:
            return threading.get_ident() == me or bool(original())

        _recording_threads.add(me)
        torch.cuda.is_current_stream_capturing = is_current_stream_capturing
        try:
            yield
        finally:
            torch.cuda.is_current_stream_capturing = original
            _recording_threads.discard(me)


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection inside: a finalizer that frees device memory would break a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
