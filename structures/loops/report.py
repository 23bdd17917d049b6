"""How the host learns of tokens without stopping the device: a pinned copy and an event a step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

SLOTS = 2  # the step whose report is read, and the one that runs meanwhile


class Reports:
    """Copies of a state's report on the host; ``post`` after a step, ``take`` when it is wanted."""

    def __init__(
        self,
        report: torch.Tensor,
        batch: int,
        slots: int = SLOTS,
        beside: Sequence[torch.Tensor] = (),
    ) -> None:
        """``beside``: runs of bytes, of which a report brings one along when ``post`` says so."""
        self._report, self._slots = report, slots
        self._ids_bytes, self._finished_at = 8 * batch, 12 * batch
        self._beside = beside
        self._copies = [_on_host(report) for _ in range(slots)]
        self._besides = [[_on_host(part) for part in beside] for _ in range(slots)]
        self._views = [
            memoryview((ctypes.c_char * t.numel()).from_address(t.data_ptr())) for t in self._copies
        ]
        self._events = [torch.cuda.Event() for _ in range(slots)] if report.is_cuda else []
        self._all_done = b"\x01" * batch
        self.begin()

    def begin(self) -> None:
        """Forget what was posted."""
        self._posted = self._taken = 0
        self._stopped = torch.zeros(len(self._all_done), dtype=torch.bool, device="cpu")

    def post(self, *, beside: int | None = None) -> None:
        """Copy the report as it is after all work queued so far, and the ``beside``-th bytes."""
        slot = self._posted % self._slots
        self._posted += 1
        self._copies[slot].copy_(self._report, non_blocking=True)
        if beside is not None:
            self._besides[slot][beside].copy_(self._beside[beside], non_blocking=True)
        if self._events:
            self._events[slot].record()

    def take(self) -> bool:
        """Wait for the oldest report not taken yet; whether every row has finished."""
        slot = self._taken % self._slots
        self._taken += 1
        if self._events:
            self._events[slot].synchronize()
        return self._views[slot][self._finished_at :].tobytes() == self._all_done

    def skip(self) -> None:
        """Pass over the oldest report not taken yet, which may still be on its way."""
        self._taken += 1

    def ids(self, pad: int) -> torch.Tensor:
        """Tokens of the report taken last, int64 ``[B]``; ``pad`` where a row had finished before.

        Call it for every report or for none.
        """
        copy = self._copies[(self._taken - 1) % self._slots]
        ids = copy[: self._ids_bytes].view(torch.int64).masked_fill(self._stopped, pad)
        self._stopped = copy[self._finished_at :].view(torch.bool).clone()
        return ids

    def finished(self) -> torch.Tensor:
        """Rows that had finished when the report taken last was posted, bool ``[B]``."""
        copy = self._copies[(self._taken - 1) % self._slots]
        return copy[self._finished_at :].view(torch.bool)

    def chosen(self) -> list[int]:
        """Tokens of the report taken last, as they are."""
        copy = self._copies[(self._taken - 1) % self._slots]
        found: list[int] = copy[: self._ids_bytes].view(torch.int64).tolist()
        return found

    def accepted(self) -> int:
        """Tokens that a verification of drafts appended to the first row."""
        copy = self._copies[(self._taken - 1) % self._slots]
        return int(copy[self._ids_bytes : self._ids_bytes + 4].view(torch.int32))

    def brought(self, beside: int) -> torch.Tensor:
        """The ``beside``-th bytes of the report taken last, which brought them along."""
        return self._besides[(self._taken - 1) % self._slots][beside]


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
