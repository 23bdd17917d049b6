"""Activations and gated activations."""

from . import layers
from ._common.activations import ACTIVATIONS
from .ops import activate, gated, gated_packed

__all__ = ["ACTIVATIONS", "activate", "gated", "gated_packed", "layers"]
