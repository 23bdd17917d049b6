"""What the tests of ``model.generate`` share."""

from __future__ import annotations

from typing import Any

import torch

from flash_rt import structures


def notes(plan: Any) -> str:
    """The lines of ``explain`` below its table."""
    return "\n".join(structures.explain(plan).notes)


class Streamer:
    """Keeps what a request puts, shape and ids, and its end."""

    def __init__(self) -> None:
        self.puts: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.puts.append((tuple(value.shape), value.tolist()))

    def end(self) -> None:
        self.puts.append("end")
