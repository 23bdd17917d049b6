"""FlashRT structures: fused kernels and captured graphs inside unmodified models.

``plan`` decides without touching anything, ``attach`` binds, ``explain`` says what runs where and
why, ``Plan.detach()`` gives the host back bit for bit. ``decode_loop`` generates,
``decode_engine`` for many requests at once.
"""

from __future__ import annotations

if __name__ != "flash_rt.structures":
    raise ImportError(
        f"structures must be imported as flash_rt.structures, not as {__name__}: a second copy "
        "would not see what the first has attached"
    )

# Functions and the modules that define them share names; importing all of them here, and nothing
# lazily, makes sure that the function is what the package shows.
from .attach import attach
from .capture import capture
from .explain import explain
from .loops import (
    DecodeLoop,
    Engine,
    GenerationRequest,
    Handle,
    Sampling,
    TextStream,
    TokenEvent,
    TokenLogprob,
    TokenMask,
    decode_engine,
    decode_loop,
)
from .mapping import layer_mapping
from .plan import Plan, plan

__all__ = [
    "DecodeLoop",
    "Engine",
    "GenerationRequest",
    "Handle",
    "Plan",
    "Sampling",
    "TextStream",
    "TokenEvent",
    "TokenLogprob",
    "TokenMask",
    "attach",
    "capture",
    "decode_engine",
    "decode_loop",
    "explain",
    "layer_mapping",
    "plan",
]
