"""``/v1/completions``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import SamplingRequest

Ids = Annotated[list[int], Field(min_length=1)]


class CompletionRequest(SamplingRequest):
    """Body of ``/v1/completions``; a prompt is text or token ids, one or several."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Every prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)
