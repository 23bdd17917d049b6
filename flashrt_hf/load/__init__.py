"""Loading: from a name to a handle that answers."""

from __future__ import annotations

from .handle import Handle
from .loading import load_model
from .module_handle import ModuleHandle
from .text_handle import TextHandle
from .vision_handle import VisionLanguageHandle

__all__ = ["Handle", "ModuleHandle", "TextHandle", "VisionLanguageHandle", "load_model"]
