"""The choice of the next token, with the bookkeeping of a decode loop."""

from .ops import argmax, greedy_step, workspace

__all__ = ["argmax", "greedy_step", "workspace"]
