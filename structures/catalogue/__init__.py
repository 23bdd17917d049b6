"""All structures, widest first: the first whose proof passes wins a region."""

from __future__ import annotations

from .base import Structure
from .rms_norm import RmsNorm

CATALOGUE: tuple[Structure, ...] = (RmsNorm(),)

__all__ = ["CATALOGUE", "Structure"]
