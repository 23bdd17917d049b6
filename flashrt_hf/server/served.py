"""The model behind the endpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .engine import Engine
from .sampling import Defaults
from .template import ChatTemplate
from .text import Codec
from .tools import ToolFormat, format_of


class Embedder(Protocol):
    """Vectors of texts; called on the worker's thread."""

    def encode(self, texts: Sequence[str | list[int]]) -> list[list[int]]:
        """Token ids of every text; raises ``ApiError`` for one that is too long."""

    def embed(self, ids: Sequence[list[int]]) -> list[list[float]]:
        """A vector for each."""


class Vision(Protocol):
    """Turns a prompt and its images into what a vision-language model takes."""

    def inputs(self, prompt: str, images: Sequence[Any]) -> tuple[list[int], Mapping[str, Any]]:
        """Token ids, and the model's inputs beside them; raises ``ApiError``."""


@dataclass
class Served:
    """One loaded model.

    Attributes:
        name: what requests call it.
        codec, engine: of a model that writes text.
        vision: of a model that also looks at images.
        embedder: of an encoder; ``counters`` are then its totals for ``/metrics``.
        device: where the model is; None where it does not matter.
        plan: the rows of ``structures.explain`` and its notes, as JSON has them.
    """

    name: str
    plan: Callable[[], dict[str, Any]]
    max_len: int
    codec: Codec | None = None
    engine: Engine | None = None
    template: ChatTemplate | None = None
    defaults: Defaults = field(default_factory=Defaults)
    vision: Vision | None = None
    embedder: Embedder | None = None
    counters: Callable[[], Mapping[str, float]] | None = None
    device: torch.device | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def tools(self) -> ToolFormat | None:
        """How the model calls functions."""
        return None if self.template is None else format_of(self.template.text)

    @property
    def abilities(self) -> list[str]:
        """Names of the endpoints that it answers."""
        found = []
        if self.engine is not None:
            found.append("completions")
            if self.template is not None and self.template.text is not None:
                found.append("chat")
        if self.vision is not None:
            found.append("images")
        if self.tools is not None:
            found.append("tools")
        if self.embedder is not None:
            found.append("embeddings")
        return found
