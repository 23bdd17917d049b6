"""How close a quantised model is to its full-precision self: cosine of its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..products import as_decoded
from ..prove import tensors_of
from .data import FIDELITY_POSITIONS, Call

PATHS = ("decode", "prefill")


@dataclass(frozen=True)
class Agreement:
    """Outputs of two models on the same positions.

    Attributes:
        cosine: of all outputs as one vector.
        worst: the cosine of a single position that 1 % of them stay below.
        positions: how many.
    """

    cosine: float
    worst: float
    positions: int

    def __str__(self) -> str:
        return f"cosine {self.cosine:.5f}, worst 1 % {self.worst:.5f}"


@dataclass(frozen=True)
class Fidelity:
    """Agreement with the model's own full precision, on both paths.

    Attributes:
        decode: as a decode step multiplies: exact weights, activations in the model's dtype.
        prefill: as many rows are multiplied, FP8 activations where the GPU has them.
        text: what was read.
        output: what was compared.
    """

    decode: Agreement
    prefill: Agreement
    text: str
    output: str

    @property
    def cosine(self) -> float:
        """The worse of both paths."""
        return min(self.decode.cosine, self.prefill.cosine)

    @property
    def enough(self) -> bool:
        """Whether there were positions enough to trust it."""
        return self.decode.positions >= FIDELITY_POSITIONS

    def __str__(self) -> str:
        return (
            f"decode {self.decode}; prefill {self.prefill}; {self.output} on "
            f"{self.decode.positions} positions of {self.text}"
        )


def output_rows(result: Any) -> tuple[torch.Tensor, str]:
    """``[positions, V]`` and its name, see ``output_of``; without its history."""
    found, name = output_of(result)
    return found.detach().reshape(-1, found.shape[-1]), name


def output_of(result: Any) -> tuple[torch.Tensor, str]:
    """What is compared of a call: the logits, else the last hidden state, else the output."""
    for name in ("logits", "last_hidden_state"):
        found = getattr(result, name, None)
        if isinstance(found, torch.Tensor):
            return found, name.replace("_", " ")
    return next(x for x in tensors_of(result) if x.is_floating_point()), "output"


@torch.no_grad()
def reference_rows(
    model: nn.Module, calls: Iterable[Call], device: torch.device
) -> list[torch.Tensor]:
    """Outputs of the model as it is, on the CPU and in its own dtype."""
    return [output_rows(call.run(model, device))[0].cpu() for call in calls]


@torch.no_grad()
def compare(
    model: nn.Module,
    calls: Sequence[Call],
    reference: Sequence[torch.Tensor],
    *,
    text: str,
    device: torch.device,
) -> Fidelity:
    """Run both paths of the attached model and compare them with ``reference``."""
    with as_decoded():
        decode, output = _compare(model, calls, reference, device)
    prefill, _ = _compare(model, calls, reference, device)
    return Fidelity(decode, prefill, text, output)


def _compare(
    model: nn.Module,
    calls: Sequence[Call],
    reference: Sequence[torch.Tensor],
    device: torch.device,
) -> tuple[Agreement, str]:
    sums = torch.zeros(3, dtype=torch.float64, device="cpu")
    cosines: list[torch.Tensor] = []
    name = ""
    for call, wanted in zip(calls, reference, strict=True):
        rows, name = output_rows(call.run(model, device))
        kept = call.kept
        found = _products(rows, wanted.to(rows.device)).cpu()
        if kept is not None and len(kept) == len(found):
            found = found[kept.cpu()]
        sums += found.sum(0)
        cosines.append(_cosine(*found.unbind(1)))
    every = torch.cat(cosines).nan_to_num(nan=-1.0)
    whole = float(_cosine(*sums).nan_to_num(nan=-1.0))
    worst = float(every.quantile(0.01)) if every.numel() else 1.0
    return Agreement(whole, worst, every.numel()), name


def _products(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """``[positions, 3]`` fp64: ours times theirs, and both squared."""
    ours, theirs = ours.float(), theirs.float()
    pairs = ((ours, theirs), (ours, ours), (theirs, theirs))
    return torch.stack([(a * b).sum(-1, dtype=torch.float64) for a, b in pairs], dim=1)


def _cosine(both: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    return both / (ours * theirs).sqrt().clamp_min(1e-300)
