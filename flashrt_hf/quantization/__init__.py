"""Quantised weights in checkpoints: ``FlashRTConfig``, and formats that are adopted as they are."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import FlashRTConfig
    from .foreign import adopt
    from .tensor import PackedTensor

__all__ = ["FlashRTConfig", "PackedTensor", "adopt"]

# transformers and torch are read only by those who ask for these names.
_PLACES = {"FlashRTConfig": "config", "PackedTensor": "tensor", "adopt": "foreign"}


def __getattr__(name: str) -> object:
    if name in _PLACES:
        return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
