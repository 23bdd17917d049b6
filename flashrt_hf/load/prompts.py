"""What a caller asks in words, as messages and stop strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]


def messages(
    where: str, prompt: Any, *, raw: bool, has_template: bool
) -> list[dict[str, Any]] | None:
    """A prompt as messages; None for a text that is continued as it stands.

    Raises:
        TypeError: it is neither a text nor messages.
        ValueError: messages, and there is no chat template to write them with.
    """
    if isinstance(prompt, str):
        return None if raw or not has_template else [{"role": "user", "content": prompt}]
    listed = isinstance(prompt, Sequence) and prompt and all(isinstance(m, Mapping) for m in prompt)
    if not listed:
        raise TypeError(f"{where}: prompt must be a text or a list of messages, got {prompt!r}")
    for message in prompt:
        if "role" not in message:
            raise ValueError(f"{where}: every message must have a role, got {message!r}")
    if raw or not has_template:
        rule = "raw must be left out for messages" if raw else "messages need a chat template"
        raise ValueError(f"{where}: {rule}, got {len(prompt)} messages")
    return [dict(message) for message in prompt]


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


def stop_strings(where: str, stop: Any) -> tuple[str, ...]:
    found = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in found:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{where}: stop must be strings that are not empty, got {text!r}")
    return found
