"""What quantisation costs a model on a text: cosine with the host's logits, and perplexity."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F


@dataclasses.dataclass
class Quality:
    """Sums over positions, in fp64.

    ``cosine`` is that of all logits as one vector, of FlashRT against the host in its own
    precision; ``worst`` what a single position's cosine falls below for 1 % of them; a perplexity
    is ``exp`` of the mean loss of the next token.
    """

    products: torch.Tensor = dataclasses.field(
        default_factory=lambda: torch.zeros(3, dtype=torch.float64)
    )
    cosines: list[torch.Tensor] = dataclasses.field(default_factory=list)
    losses: dict[str, float] = dataclasses.field(default_factory=dict)
    positions: int = 0

    def add(self, logits: Mapping[str, torch.Tensor], next_ids: torch.Tensor) -> None:
        """Add ``[N, V]`` logits of ``"flashrt"``, ``"host"`` and others, and the ids they foretell.

        Raises:
            ValueError: the shapes do not fit.
        """
        ours, host = logits["flashrt"].float(), logits["host"].float()
        if ours.shape != host.shape or len(next_ids) != len(ours):
            raise ValueError(
                "fidelity: logits and ids must be of the same positions, got "
                f"{tuple(ours.shape)}, {tuple(host.shape)} and {tuple(next_ids.shape)}"
            )
        pairs = ((ours, host), (ours, ours), (host, host))
        sums = torch.stack([(a * b).sum(-1, dtype=torch.float64) for a, b in pairs], 1).cpu()
        self.products += sums.sum(0)
        self.cosines.append(sums[:, 0] / (sums[:, 1] * sums[:, 2]).sqrt())
        for name, found in logits.items():
            loss = float(F.cross_entropy(found.float(), next_ids, reduction="sum"))
            self.losses[name] = self.losses.get(name, 0.0) + loss
        self.positions += len(next_ids)

    @property
    def cosine(self) -> float:
        both, ours, host = self.products.tolist()
        return float(both / math.sqrt(ours * host))

    def perplexity(self, name: str) -> float:
        return math.exp(self.losses[name] / self.positions)

    def summary(self) -> dict[str, Any]:
        """What a record keeps."""
        return dict(
            cosine=self.cosine,
            worst_percent_cosine=float(torch.cat(self.cosines).quantile(0.01)),
            perplexity={name: self.perplexity(name) for name in self.losses},
            predicted_positions=self.positions,
        )

    def __str__(self) -> str:
        ours, host = self.perplexity("flashrt"), self.perplexity("host")
        change = (ours / host - 1.0) * 100.0
        return f"cosine {self.cosine:.5f}, perplexity {ours:.4g} (host {host:.4g}, {change:+.2f} %)"
