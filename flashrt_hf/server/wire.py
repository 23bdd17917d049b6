"""What chat and text completions have in common on the wire."""

from __future__ import annotations

import math
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import flash_rt

from .text import Codec

LOWEST = -9999.0  # OpenAI's stand-in for a probability of nothing


@dataclass(frozen=True)
class Head:
    """Fields that open an answer and each of its chunks."""

    kind: str
    chunk_kind: str
    model: str
    prefix: str
    created: int = field(default_factory=lambda: int(time.time()))
    unique: str = field(default_factory=lambda: uuid.uuid4().hex)

    def _fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.unique}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"flashrt-{flash_rt.__version__}",
        }

    def chunk(self, choice: dict[str, Any], *, usage: bool) -> dict[str, Any]:
        """One event of a stream; with usage asked for, each but the last says null."""
        made = self._fields(self.chunk_kind) | {"choices": [choice]}
        return made | {"usage": None} if usage else made

    def usage_chunk(self, usage: dict[str, int]) -> dict[str, Any]:
        """The last event of a stream that shows usage."""
        return self._fields(self.chunk_kind) | {"choices": [], "usage": usage}

    def answer(self, choices: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        """An answer in one piece."""
        return self._fields(self.kind) | {"choices": choices, "usage": usage}


def finite(logprob: float | None) -> float:
    """A log probability as JSON can hold it."""
    return logprob if logprob is not None and math.isfinite(logprob) else LOWEST


def token_entry(codec: Codec, token: int, logprob: float | None) -> dict[str, Any]:
    """A token with its bytes."""
    raw = codec.token_bytes(token)
    text = raw.decode(errors="replace")
    return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}
