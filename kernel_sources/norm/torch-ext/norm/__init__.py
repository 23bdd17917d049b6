"""Root mean square and layer norm of rows: plain, zero-centred, modulated, with a residual add."""

from . import layers
from .ops import add_rms_norm, layer_norm, rms_norm

__all__ = ["add_rms_norm", "layer_norm", "layers", "rms_norm"]
