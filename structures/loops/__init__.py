"""Loops call a captured step and own its state."""

from __future__ import annotations

from .decode import DecodeLoop, decode_loop

__all__ = ["DecodeLoop", "decode_loop"]
