"""``/v1/embeddings``: vectors of texts by an encoder."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any

import torch

from .errors import ApiError, bad
from .schema.embeddings import EmbeddingRequest
from .served import Embedder

POOLINGS = ("mean", "cls", "last")
LENGTH_STEP = 32  # texts are padded to multiples, so that few shapes are captured
MAX_TOKENS = 300_000  # of a request


class Encoder:
    """An encoder of transformers with its tokenizer and pooling.

    ``embed`` runs one text at a time, so that a vector does not depend on what came beside it, and
    scales every vector to length 1.
    """

    def __init__(self, model: Any, tokenizer: Any, *, pooling: str) -> None:
        """``pooling`` is ``mean`` over tokens, ``cls`` (the first token) or ``last``.

        Raises:
            ValueError: another pooling, or a model that is no encoder of texts.
        """
        if tokenizer is None:
            raise ValueError("serve: the model must be one of texts, and has no tokenizer")
        if pooling not in POOLINGS:
            raise ValueError(f"serve: pooling must be one of {POOLINGS}, got {pooling!r}")
        self._model, self._tokenizer, self._pooling = model, tokenizer, pooling
        config = getattr(model, "config", None)
        limits = [
            getattr(config, "max_position_embeddings", None),
            tokenizer.model_max_length if tokenizer.model_max_length < 10**6 else None,
        ]
        self.max_len = min([limit for limit in limits if limit] or [8192])
        self._vocabulary = int(getattr(config, "vocab_size", 2**31))
        if not hasattr(self._run([0]), "last_hidden_state"):
            kind = type(model).__name__
            raise ValueError(f"serve: an encoder must return last_hidden_state, {kind} does not")

    def encode(self, texts: Sequence[str | list[int]]) -> list[list[int]]:
        """Ids of every text.

        Raises:
            ApiError: 400, a text is empty or too long, or an id is outside the vocabulary.
        """
        found = []
        for text in texts:
            ids = self._tokenizer(text)["input_ids"] if isinstance(text, str) else text
            if not ids:
                raise bad("Texts of 'input' must have at least one token, got none", "input")
            if len(ids) > self.max_len:
                raise ApiError(
                    400,
                    f"This model's maximum context length is {self.max_len} tokens, got {len(ids)}",
                    param="input",
                    code="context_length_exceeded",
                )
            if not 0 <= min(ids) <= max(ids) < self._vocabulary:
                raise bad(f"Token ids must be 0 to {self._vocabulary - 1}", "input")
            found.append(list(ids))
        if sum(map(len, found)) > MAX_TOKENS:
            raise bad(f"'input' must have at most {MAX_TOKENS} tokens", "input")
        return found

    def embed(self, ids: Sequence[list[int]]) -> list[list[float]]:
        """A vector of length 1 for each."""
        return [self._one(each) for each in ids]

    def _one(self, ids: list[int]) -> list[float]:
        states = self._run(ids).last_hidden_state[0, : len(ids)].float()
        if self._pooling == "mean":
            vector = states.mean(0)
        else:
            vector = states[0 if self._pooling == "cls" else -1]
        found: list[float] = torch.nn.functional.normalize(vector, dim=0).tolist()
        return found

    def _run(self, ids: list[int]) -> Any:
        device = next(self._model.parameters()).device
        length = min(-(-len(ids) // LENGTH_STEP) * LENGTH_STEP, max(self.max_len, len(ids)))
        pad = self._tokenizer.pad_token_id or 0
        padded = torch.full((1, length), pad, dtype=torch.int64)
        padded[0, : len(ids)] = torch.tensor(ids)
        mask = (torch.arange(length) < len(ids)).long()[None]
        with torch.no_grad():
            return self._model(input_ids=padded.to(device), attention_mask=mask.to(device))


def answer(
    body: EmbeddingRequest, model: str, vectors: Sequence[list[float]], tokens: int
) -> dict[str, Any]:
    """The body of the answer; ``base64`` is little-endian fp32."""

    def shown(vector: list[float]) -> Any:
        if body.encoding_format != "base64":
            return vector
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()

    data = [
        {"object": "embedding", "index": i, "embedding": shown(vector)}
        for i, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "model": model, "data": data, "usage": usage}


def check(embedder: Embedder | None) -> Embedder:
    """The model's encoder.

    Raises:
        ApiError: 400, the model is none.
    """
    if embedder is None:
        raise bad("The model makes no embeddings", "model", "unsupported_endpoint")
    return embedder
