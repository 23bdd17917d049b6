"""The options of ``predict`` that say how tokens are chosen, and how the host is told them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Options that draw: with any of them and no temperature, that is 1.
DRAWING = ("top_k", "top_p", "min_p")
NAMES = (
    "temperature",
    *DRAWING,
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_new_tokens",
    "seed",
)
# What transformers' generate has under the same name.
HOST_NAMES = ("top_k", "top_p", "min_p", "repetition_penalty", "min_new_tokens")


def read(where: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given, None taken as not given.

    Raises:
        TypeError: names that are no options, all of them.
    """
    unknown = [name for name in options if name not in NAMES]
    if unknown:
        raise TypeError(
            f"{where}: options must be of {', '.join(NAMES)}, got {', '.join(map(repr, unknown))}"
        )
    given = {name: value for name, value in options.items() if value is not None}
    if "temperature" not in given and any(name in given for name in DRAWING):
        given["temperature"] = 1.0
    return given


def for_host(where: str, options: Mapping[str, Any], *, why: str) -> dict[str, Any]:
    """Options as transformers' ``generate`` takes them; ``seed`` is left out.

    Raises:
        ValueError: one that it does not have, by name, with why the host runs the request.
    """
    found: dict[str, Any] = {"do_sample": False}
    temperature = options.get("temperature", 0.0)
    if temperature:
        found |= dict(do_sample=True, temperature=float(temperature), top_k=0)
    for name, value in options.items():
        if name in ("temperature", "seed"):
            continue
        if name not in HOST_NAMES:
            raise ValueError(
                f"{where}: {name} needs the decode loop, got {value!r}; the host generates "
                f"because {why}"
            )
        if temperature or name not in DRAWING:
            found[name] = value
    return found
