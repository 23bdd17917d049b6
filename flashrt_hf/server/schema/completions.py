"""``/v1/completions``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import SamplingRequest
from .many import OneOrMany, several


class CompletionRequest(SamplingRequest):
    """Body of ``/v1/completions``; a prompt is text or token ids, one or several."""

    prompt: OneOrMany
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Every prompt."""
        return several(self.prompt)
