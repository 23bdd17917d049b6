"""Activations and gated activations."""

from . import layers
from ._common.activations import ACTIVATIONS
from ._common.exports import unknown_name
from .fp8 import activate_fp8, gated_fp8, gated_packed_fp8
from .ops import activate, gated, gated_packed

__all__ = [
    "ACTIVATIONS",
    "activate",
    "activate_fp8",
    "gated",
    "gated_fp8",
    "gated_packed",
    "gated_packed_fp8",
    "layers",
]

__getattr__ = unknown_name("activation", __all__)
