"""``/v1/embeddings``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import Strict
from .completions import Ids


class EmbeddingRequest(Strict):
    """Body of ``/v1/embeddings``."""

    model: str
    input: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=2048)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1, max_length=2048)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None

    @property
    def inputs(self) -> list[str | list[int]]:
        """Every text or list of tokens."""
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):
            return [self.input]
        return list(self.input)
