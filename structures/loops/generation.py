"""What a caller of the engine asks for, and what it is told of every token."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from .sampling import Sampling

FinishReason = Literal["stop", "length", "cancelled", "error"]
MAX_ANSWERS = 128


class TokenMask(Protocol):
    """Which tokens a grammar allows next; one object for each answer.

    A batch in which any answer has one waits for its tokens on the host before every step.
    """

    def allowed(self) -> torch.Tensor | None:
        """Bit ``i % 32`` of word ``i // 32`` allows id i: int32 ``[ceil(V / 32)]`` on the CPU.

        None allows every id. Ids beyond the bits are forbidden.
        """

    def accept(self, token_id: int) -> bool:
        """Advance by a token that was chosen; True when the text is complete, which ends it."""


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt and how it is to be continued.

    Attributes:
        prompt_ids: at least one id of the vocabulary.
        max_new_tokens: at least 1; None fills the cache.
        stop_token_ids: each ends an answer, itself reported; None takes the model's own,
            ``()`` none.
        sampling: how tokens are chosen.
        n: answers to the prompt, 1 to 128. Answer 0 draws with ``sampling.seed``, the others with
            seeds that follow from it.
        mask: makes the grammar of one answer, on the engine's thread.
        reuse_prefix: keys and values of an earlier request that this one extends may be used
            again; the answer is then as exact as a cold one, not bit for bit the same.

    Raises:
        ValueError, TypeError: a field outside the above.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int | None = None
    stop_token_ids: tuple[int, ...] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    mask: Callable[[], TokenMask] | None = None
    reuse_prefix: bool = True

    def __post_init__(self) -> None:
        prompt = _ids("prompt_ids", self.prompt_ids)
        if not prompt:
            raise ValueError("GenerationRequest: prompt_ids must have at least one id, got none")
        object.__setattr__(self, "prompt_ids", prompt)
        if self.stop_token_ids is not None:
            object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        if self.max_new_tokens is not None:
            object.__setattr__(
                self, "max_new_tokens", _count("max_new_tokens", self.max_new_tokens, 2**31 - 1)
            )
        object.__setattr__(self, "n", _count("n", self.n, MAX_ANSWERS))
        if not isinstance(self.sampling, Sampling):
            raise TypeError(
                f"GenerationRequest: sampling must be a Sampling, got {self.sampling!r}"
            )
        if self.mask is not None and not callable(self.mask):
            raise TypeError(f"GenerationRequest: mask must be callable, got {self.mask!r}")
        if not isinstance(self.reuse_prefix, bool):
            raise TypeError(
                f"GenerationRequest: reuse_prefix must be True or False, got {self.reuse_prefix!r}"
            )


@dataclass(frozen=True)
class TokenLogprob:
    """An id with the natural logarithm of its probability under the model's own softmax."""

    token_id: int
    logprob: float


@dataclass(frozen=True)
class TokenEvent:
    """News of one answer; its last event is the one with a ``finish_reason``.

    Attributes:
        handle: what ``submit`` returned for the request; ``index`` counts its answers from 0.
        token_id: None where an answer ends without a further token.
        logprob, top_logprobs: when asked for; the alternatives from the likeliest down.
        finish_reason: "stop" behind a stop id or a complete grammar, "length" at a limit,
            "cancelled", "error"; None while the answer goes on.
        error: what happened, with "error".
    """

    handle: Hashable
    index: int
    token_id: int | None
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: BaseException | None = None


def _ids(name: str, given: Any) -> tuple[int, ...]:
    if isinstance(given, torch.Tensor):
        given = given.tolist()
    if isinstance(given, (str, bytes)) or not hasattr(given, "__iter__"):
        raise TypeError(f"GenerationRequest: {name} must be a list of ids, got {given!r}")
    try:
        found = tuple(operator.index(value) for value in given)
    except TypeError:
        raise TypeError(
            f"GenerationRequest: {name} must be a list of integers, got {given!r}"
        ) from None
    if any(value < 0 for value in found):
        raise ValueError(f"GenerationRequest: {name} must be ids of at least 0, got {min(found)}")
    return found


def _count(name: str, given: Any, most: int) -> int:
    try:
        number = operator.index(given)
    except TypeError:
        raise TypeError(f"GenerationRequest: {name} must be an integer, got {given!r}") from None
    if not 1 <= number <= most:
        raise ValueError(f"GenerationRequest: {name} must be 1 to {most}, got {number}")
    return number
