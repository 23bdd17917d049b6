"""What a call computes before and after its matrix product, checked and as rows."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch

Maybe: TypeAlias = "torch.Tensor | None"


class Prologue(NamedTuple):
    """Steps 1 and 2 of csrc/linear.h; a weight of None is no norm."""

    branch: Maybe
    branch_norm_weight: Maybe
    branch_norm_eps: float
    residual_out: Maybe
    norm_weight: Maybe
    norm_eps: float
    kind: int  # of both norms


class Epilogue(NamedTuple):
    """Steps 3 to 5 of csrc/linear.h."""

    residual: Maybe
    activation: int
    gated: bool
    scale: float
    soft_cap: float  # 0: none
