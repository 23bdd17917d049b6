"""``/v1/embeddings``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import Strict
from .many import OneOrMany, several


class EmbeddingRequest(Strict):
    """Body of ``/v1/embeddings``."""

    model: str
    input: OneOrMany
    encoding_format: Literal["float", "base64"] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None

    @property
    def inputs(self) -> list[str | list[int]]:
        """Every text or list of tokens."""
        return several(self.input)
