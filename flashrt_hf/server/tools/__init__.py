"""Calls of functions in the form that a model's chat template teaches it, one file a form."""

from __future__ import annotations

from .bare_json import BareJson
from .base import Call, How, ToolFormat, ToolParser
from .bracketed import Bracketed
from .function_tags import FunctionTags
from .tagged_json import TaggedJson

# The first whose signs are all in the template is the one.
FORMATS: tuple[ToolFormat, ...] = (FunctionTags(), TaggedJson(), Bracketed(), BareJson())

__all__ = ["FORMATS", "Call", "How", "ToolFormat", "ToolParser", "format_of"]


def format_of(template: str | None) -> ToolFormat | None:
    """How a model with this chat template calls functions; None when it knows of none."""
    if not template or "tools" not in template:
        return None
    return next((f for f in FORMATS if all(sign in template for sign in f.signs)), None)
