"""What the tests of calibration, fidelity and their cache share."""

from __future__ import annotations

import torch
import zoo

from flash_rt import structures


def tokens(rows: int, count: int, seed: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, zoo.VOCAB, (rows, count), generator=generator)


def precisions(plan: structures.Plan) -> dict[str, str]:
    assert plan.packing is not None
    return {unit.name: unit.precision for unit in plan.packing.units}


def text(plan: structures.Plan) -> str:
    return str(structures.explain(plan))
