"""Root mean square and layer norm of rows: plain, zero-centred, modulated, with a residual add."""

from . import layers
from ._common.exports import unknown_name
from .ops import add_rms_norm, layer_norm, rms_norm

__all__ = ["add_rms_norm", "layer_norm", "layers", "rms_norm"]

__getattr__ = unknown_name("norm", __all__)
