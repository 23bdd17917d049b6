"""Options of the loop's ``generate`` beside prompt and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from .sampling import Sampling
from .text import TextStream

# With do_sample=False these would do nothing, which is never what a caller means.
OF_DRAWS = ("temperature", "top_k", "top_p", "min_p", "seed")
NAMES = frozenset(field.name for field in fields(Sampling))


def read_options(where: str, options: dict[str, Any]) -> Sampling:
    """``Sampling`` of keyword options in the manner of transformers; None stands for a default.

    Raises:
        TypeError: an option that is none, by name.
        ValueError: a setting out of its range, or of draws without ``do_sample=True``.
    """
    given = {name: value for name, value in options.items() if value is not None}
    do_sample = given.pop("do_sample", False)
    if not isinstance(do_sample, bool):
        raise TypeError(f"{where}: do_sample must be True or False, got {do_sample!r}")
    for name, value in given.items():
        if name not in NAMES:
            raise TypeError(
                f"{where}: {name} is not an option, got {value!r}; the loop decodes greedily or "
                "draws, other ways run through model.generate"
            )
        if name in OF_DRAWS and not do_sample:
            raise ValueError(f"{where}: {name} needs do_sample=True, got {name}={value!r}")
    if do_sample:
        given.setdefault("temperature", 1.0)
        if given["temperature"] == 0:
            raise ValueError(f"{where}: temperature must be above 0 with do_sample=True, got 0")
    try:
        return Sampling(**given)
    except (ValueError, TypeError) as error:
        text = str(error).removeprefix("Sampling: ")
        raise type(error)(f"{where}: {text}") from None


class StopStrings:
    """Tells which rows have just completed a stop string; call it with every step's tokens."""

    def __init__(self, stop: Sequence[str], tokenizer: Any, batch: int) -> None:
        self._streams = [
            TextStream(tokenizer, stop=stop, skip_special_tokens=False) for _ in range(batch)
        ]

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids [B]`` of a step: bool ``[B]``, on the host."""
        for stream, token_id in zip(self._streams, ids.tolist(), strict=True):
            stream.put(token_id)
        ended = [stream.stopped is not None for stream in self._streams]
        return torch.tensor(ended, device="cpu")


def read_stops(where: str, stop: Any, tokenizer: Any, batch: int) -> StopStrings | None:
    """Check ``stop_strings`` and ``tokenizer``; None when there are none."""
    if stop is None or len(stop) == 0:
        return None
    texts = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{where}: stop_strings must be texts that are not empty, got {stop!r}")
    if not callable(getattr(tokenizer, "decode", None)):
        raise ValueError(f"{where}: stop_strings need the tokenizer, got tokenizer={tokenizer!r}")
    return StopStrings(texts, tokenizer, batch)
