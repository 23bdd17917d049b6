"""Recording steps and replaying them: the graph protocol and its two backends."""

from __future__ import annotations

from .backends import backend_for
from .protocol import Backend, CaptureError, Graph, Pool, StaleAddressError, Step

__all__ = [
    "Backend",
    "CaptureError",
    "Graph",
    "Pool",
    "StaleAddressError",
    "Step",
    "backend_for",
]
