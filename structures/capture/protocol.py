"""What a graph is, whoever records it.

A *step* is a function without arguments that reads and writes tensors at fixed addresses. Recording
a step keeps its device work and nothing else: every Python number it used is baked in, every tensor
it touched is an address, and no Python runs in a replay. Whatever must change between replays
therefore lives in a tensor.

``CudaBackend`` records with ``torch.cuda.CUDAGraph``. ``TapeBackend`` gives the same rules on the
CPU, and shows a broken rule as an error or as poison instead of as a plausible number.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

Step = Callable[[], object]


class CaptureError(RuntimeError):
    """A step cannot be recorded; the text says which operation and why."""


class StaleAddressError(RuntimeError):
    """A replay would read memory whose owner has freed it since recording."""


class Pool(Protocol):
    """The memory that the graphs of one model share, so that they cost the largest, not the sum.

    What a graph produces stays valid until the next record or replay in the same pool. Clone what
    must live longer.

    Attributes:
        recorded: graphs recorded into the pool so far, released ones too.
    """

    recorded: int

    @property
    def unshared_bytes(self) -> int:
        """Memory that the living graphs keep each for itself; 0 where they share all of it."""

    def join(self) -> None:
        """Order the current stream after the last replay in this pool, whichever stream ran it.

        Call it before writing a static input when callers may switch streams. Costs well under a
        microsecond when the stream is the same as last time.
        """

    def memory(self) -> AbstractContextManager[object]:
        """Allocate static inputs inside, so that nobody gets their memory too early.

        A GPU allocation belongs to the stream it was made on, and freed memory may be handed out
        there at once, while a replay on another stream still reads it.
        """


class Graph(Protocol):
    """A recorded step."""

    def replay(self) -> None:
        """Run the recorded work on the current stream. Allocates nothing and never waits."""

    def release(self) -> None:
        """Give the recorded work and its memory back. A later ``replay`` raises RuntimeError."""


class Backend(Protocol):
    """Records steps for one device."""

    @property
    def device(self) -> torch.device:
        """The device whose work is recorded."""

    def new_pool(self) -> Pool:
        """Memory for the graphs of one model."""

    def record(self, step: Step, *, warmups: int = 1, pool: Pool | None = None) -> Graph:
        """Run ``step`` ``warmups`` times for real, then record it without effect.

        The recorded run changes no tensor that existed before, so a step that owns state is at
        the same place before and after ``record(step, warmups=0)``. Warm-ups do run: restore the
        state after them, or pass 0 when the step has already run. Runs without grad; inference
        mode is left as the caller has it.

        Args:
            step: reads and writes tensors at fixed addresses; its result is dropped. Tensors it
                creates belong to the pool; keep the ones to read after a replay in a closure.
            warmups: at least 0. Whatever a first run sets up (workspaces, lazy buffers) must have
                been set up before the recording.
            pool: of ``new_pool``; a new one when None.

        Raises:
            CaptureError: the step waits for the device, uploads host data, or failed; the state
                of the device is as before.
            ValueError: ``warmups`` below 0.
        """


def check_warmups(warmups: int) -> None:
    """Raise ValueError when ``warmups`` is below 0."""
    if warmups < 0:
        raise ValueError(f"record: warmups must be at least 0, got {warmups}")
