"""Decode attention over a static cache, and its parts: q/k norm with rotary, and the append."""

from . import layers
from ._common.exports import unknown_name
from .ops import HEAD_DIMS, MAX_ROWS, append, attend, norm_rope, workspace

__all__ = ["HEAD_DIMS", "MAX_ROWS", "append", "attend", "layers", "norm_rope", "workspace"]

__getattr__ = unknown_name("attention", __all__)
