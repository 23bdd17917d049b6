"""Loops call a captured step and own its state."""

from __future__ import annotations

from .answer import Handle
from .decode import DecodeLoop, decode_loop
from .engine import Engine, decode_engine
from .generation import GenerationRequest, TokenEvent, TokenLogprob, TokenMask
from .sampling import Sampling
from .text import TextStream

__all__ = [
    "DecodeLoop",
    "Engine",
    "GenerationRequest",
    "Handle",
    "Sampling",
    "TextStream",
    "TokenEvent",
    "TokenLogprob",
    "TokenMask",
    "decode_engine",
    "decode_loop",
]
