"""Log-probabilities of chosen tokens and of the likeliest ones beside them."""

from __future__ import annotations

import torch

from .sampling import TOP_LOGPROBS
from .step import Step

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Logprobs:
    """Results for every row of a step in one run of bytes, so that one copy brings them all."""

    def __init__(self, step: Step) -> None:
        rows, columns = step.logits.shape
        self._step, self._rows = step, rows
        self._top = min(TOP_LOGPROBS, columns)
        size = (4 + 12 * self._top) * rows
        self.bytes = step.logits.new_zeros(size, dtype=torch.uint8)
        self._out = self.split(self.bytes)

    def split(self, data: torch.Tensor) -> Parts:
        """Of these bytes or a copy: chosen fp32 ``[B]``, ids int64 and values fp32 ``[B, 20]``."""
        rows, top = self._rows, self._top
        ids, rest = data[: 8 * rows * top], data[8 * rows * top :]
        values, chosen = rest[: 4 * rows * top], rest[4 * rows * top :]
        return (
            chosen.view(torch.float32),
            ids.view(torch.int64).view(rows, top),
            values.view(torch.float32).view(rows, top),
        )

    def run(self, rows: slice) -> None:
        """Behind the choice of ``rows``, whose logits are still the step's."""
        step = self._step
        out = tuple(part[rows] for part in self._out)
        step.sampling.logprobs(
            step.logits[rows],
            step.state.next_ids[rows],
            top_n=self._top,
            workspace=step.draw_scratch(),
            out=out,
        )
