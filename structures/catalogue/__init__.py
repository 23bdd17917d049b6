"""All structures, widest first: the first whose proof passes wins a region."""

from __future__ import annotations

from .base import Structure
from .gated_mlp import GatedMlp
from .layer_norm import LayerNorm
from .linear import Linear
from .mlp import Mlp
from .rms_norm import RmsNorm

CATALOGUE: tuple[Structure, ...] = (GatedMlp(), Mlp(), Linear(), RmsNorm(), LayerNorm())

__all__ = ["CATALOGUE", "Structure"]
