"""Root mean square and layer norm of rows: plain, zero-centred, modulated, with a residual add."""

from . import layers
from ._common.exports import unknown_name
from .fp8 import add_rms_norm_fp8, layer_norm_fp8, rms_norm_fp8
from .ops import add_rms_norm, layer_norm, rms_norm

__all__ = [
    "add_rms_norm",
    "add_rms_norm_fp8",
    "layer_norm",
    "layer_norm_fp8",
    "layers",
    "rms_norm",
    "rms_norm_fp8",
]

__getattr__ = unknown_name("norm", __all__)
