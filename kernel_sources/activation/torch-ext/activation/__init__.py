"""Activations and gated activations."""

from . import layers
from ._common.activations import ACTIVATIONS
from ._common.exports import unknown_name
from .ops import activate, gated, gated_packed

__all__ = ["ACTIVATIONS", "activate", "gated", "gated_packed", "layers"]

__getattr__ = unknown_name("activation", __all__)
