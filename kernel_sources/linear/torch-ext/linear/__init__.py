"""Matrix products for few rows: ``epilogue(prologue(x) @ W.T)`` in one launch that reads W once."""

from . import layers
from .ops import embedding, gated_linear, linear, linear_split

__all__ = ["embedding", "gated_linear", "layers", "linear", "linear_split"]
