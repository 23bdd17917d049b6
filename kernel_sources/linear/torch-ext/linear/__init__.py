"""Matrix products for few rows: ``epilogue(prologue(x) @ W.T)`` in one launch that reads W once."""

from . import layers
from ._common.exports import unknown_name
from .ops import embedding, gated_linear, linear, linear_split
from .packed import PackedWeight

__all__ = ["PackedWeight", "embedding", "gated_linear", "layers", "linear", "linear_split"]

__getattr__ = unknown_name("linear", __all__)
