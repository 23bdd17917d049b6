"""Numerical fidelity of logits against fp32: the greedy fidelity rule.

FlashRT passes where its root-mean-square logit error is at most 1.25 times, and its largest at most
twice, the error of the host's own BF16; on real text the top-1 agreement with fp32 must lie within
1.5 points of the host's.
"""

from __future__ import annotations

import dataclasses
import math

import torch

RMS_FACTOR = 1.25
MAX_FACTOR = 2.0
TOP1_POINTS = 1.5


@dataclasses.dataclass
class LogitError:
    """Error of logits against a reference, accumulated over chunks of positions in fp64."""

    square_sum: float = 0.0
    largest: float = 0.0
    elements: int = 0
    positions: int = 0
    agreeing: int = 0

    def add(self, logits: torch.Tensor, reference: torch.Tensor) -> None:
        """Add ``[N, V]`` logits of any dtype against ``[N, V]`` reference logits.

        Raises:
            ValueError: the shapes differ, or a logit is not finite.
        """
        if logits.shape != reference.shape or logits.dim() != 2:
            raise ValueError(
                "fidelity: logits must be [N, V] like the reference, "
                f"got {tuple(logits.shape)} and {tuple(reference.shape)}"
            )
        wide = torch.promote_types(reference.dtype, torch.float32)
        difference = logits.to(reference.device, wide) - reference.to(wide)
        if not bool(difference.isfinite().all()):
            raise ValueError("fidelity: logits must be finite, got inf or nan")
        self.square_sum += float(difference.square().sum(dtype=torch.float64))
        self.largest = max(self.largest, float(difference.abs().max()))
        self.elements += difference.numel()
        self.positions += difference.shape[0]
        same = logits.to(reference.device).argmax(-1) == reference.argmax(-1)
        self.agreeing += int(same.sum())

    @property
    def rms(self) -> float:
        return math.sqrt(self.square_sum / max(self.elements, 1))

    @property
    def top1(self) -> float:
        """Share of positions whose most likely token is the reference's."""
        return self.agreeing / max(self.positions, 1)

    def summary(self) -> dict[str, float]:
        """What a record keeps."""
        return dict(rms=self.rms, max=self.largest, top1=self.top1, positions=self.positions)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether the rule holds, and each broken clause with its numbers."""

    passed: bool
    broken: tuple[str, ...]


def judge(ours: LogitError, host: LogitError, *, with_top1: bool) -> Verdict:
    """Apply the greedy fidelity rule; ``with_top1`` only where the text is real."""
    broken = []
    if ours.rms > RMS_FACTOR * host.rms:
        broken.append(
            f"rms error {ours.rms:.3e} must be at most {RMS_FACTOR} x the host's {host.rms:.3e}"
        )
    if ours.largest > MAX_FACTOR * host.largest:
        broken.append(
            f"max error {ours.largest:.3e} must be at most {MAX_FACTOR} x the host's "
            f"{host.largest:.3e}"
        )
    if with_top1 and ours.top1 < host.top1 - TOP1_POINTS / 100:
        broken.append(
            f"top-1 {ours.top1:.4f} must be within {TOP1_POINTS} points of the host's "
            f"{host.top1:.4f}"
        )
    return Verdict(not broken, tuple(broken))
