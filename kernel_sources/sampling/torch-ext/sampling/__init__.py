"""The choice of the next token, with the bookkeeping of a decode loop."""

from ._common.exports import unknown_name
from .ops import argmax, greedy_step, workspace

__all__ = ["argmax", "greedy_step", "workspace"]

__getattr__ = unknown_name("sampling", __all__)
