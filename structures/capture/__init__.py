"""Recording steps and replaying them: graphs, the forward that uses them, ``capture``."""

from __future__ import annotations

from .backends import backend_for
from .forward import CapturedForward, CaptureStats
from .function import capture
from .graph_cache import GraphCache
from .protocol import Backend, CaptureError, Graph, Pool, StaleAddressError, Step
from .watch import Watch

__all__ = [
    "Backend",
    "CaptureError",
    "CaptureStats",
    "CapturedForward",
    "Graph",
    "GraphCache",
    "Pool",
    "StaleAddressError",
    "Step",
    "Watch",
    "backend_for",
    "capture",
]
