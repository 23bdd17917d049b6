"""What a caller asks in words, as messages and stop strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

Message = Mapping[str, Any]


def messages(
    where: str, prompt: Any, *, raw: bool, has_template: bool
) -> list[dict[str, Any]] | None:
    """A prompt as messages; None for a text that is continued as it stands.

    Raises:
        TypeError: it is neither a text nor messages.
        ValueError: messages, and there is no chat template to write them with; half a surrogate
            pair, which no tokenizer reads.
    """
    if isinstance(prompt, str):
        _check_unicode(where, prompt)
        return None if raw or not has_template else [{"role": "user", "content": prompt}]
    listed = isinstance(prompt, Sequence) and prompt and all(isinstance(m, Mapping) for m in prompt)
    if not listed:
        raise TypeError(f"{where}: prompt must be a text or a list of messages, got {prompt!r}")
    for message in prompt:
        if "role" not in message:
            raise ValueError(f"{where}: every message must have a role, got {message!r}")
        if isinstance(message.get("content"), str):
            _check_unicode(where, message["content"])
    if raw or not has_template:
        rule = "raw must be left out for messages" if raw else "messages need a chat template"
        raise ValueError(f"{where}: {rule}, got {len(prompt)} messages")
    return [dict(message) for message in prompt]


def _check_unicode(where: str, text: str) -> None:
    lone = next((c for c in text if "\ud800" <= c <= "\udfff"), None)
    if lone is not None:
        raise ValueError(f"{where}: prompt must be valid Unicode, got {lone!r} in it")


def token_ids(texts: Any, tokenizer: Any) -> Any:
    """Calibration text as token ids ``[1, T]`` each; anything else as it is.

    Raises:
        ValueError: texts, and there is no tokenizer.
    """
    listed = isinstance(texts, (list, tuple)) and texts and all(isinstance(t, str) for t in texts)
    if not isinstance(texts, str) and not listed:
        return texts
    if tokenizer is None:
        raise ValueError("load_model: calibration must be token ids for a model without tokenizer")
    texts = [texts] if isinstance(texts, str) else texts
    return [tokenizer(text, return_tensors="pt").input_ids for text in texts]


def check_ids(where: str, input_ids: Any) -> None:
    """Refuse what is no table of token ids.

    Raises:
        TypeError: no tensor.
        ValueError: not of shape ``[B, P]``.
    """
    if not isinstance(input_ids, torch.Tensor):
        raise TypeError(f"{where}: input_ids must be a tensor, got {type(input_ids).__name__}")
    if input_ids.ndim != 2:
        raise ValueError(f"{where}: input_ids must be [B, P], got shape {tuple(input_ids.shape)}")


def stop_strings(where: str, stop: Any) -> tuple[str, ...]:
    """Stop strings of a call.

    Raises:
        TypeError: neither a string nor a sequence.
        ValueError: an empty string, or an entry that is none.
    """
    if not isinstance(stop, (str, Sequence)):
        raise TypeError(f"{where}: stop must be a string or a list of them, got {stop!r}")
    found = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in found:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{where}: stop must be strings that are not empty, got {text!r}")
    return found
