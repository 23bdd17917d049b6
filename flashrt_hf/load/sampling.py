"""The options that say how tokens are chosen, for the decode loop and for a host's ``generate``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

# Options of draws: with any of them and no temperature, that is 1.
DRAWING = ("top_k", "top_p", "min_p")
NAMES = (
    "do_sample",
    "temperature",
    *DRAWING,
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_new_tokens",
)
# What a checkpoint's generation_config would set otherwise, on the host and not on the loop.
NEUTRAL: dict[str, Any] = {
    **{"top_k": 0, "top_p": 1.0, "min_p": None, "typical_p": 1.0, "epsilon_cutoff": 0.0},
    **{"eta_cutoff": 0.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0},
}
GREEDY: dict[str, Any] = {
    **{"temperature": None, "top_k": None, "top_p": None, "min_p": None, "typical_p": None},
    **{"epsilon_cutoff": None, "eta_cutoff": None, "repetition_penalty": 1.0},
    "no_repeat_ngram_size": 0,
}
# What transformers' generate has under the same name.
HOST_NAMES = ("do_sample", "temperature", *DRAWING, "repetition_penalty", "min_new_tokens")


def read(where: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given as ``DecodeLoop.generate`` takes them; None is not given.

    Draws when ``do_sample`` is True, when ``temperature`` is above 0, and when an option of draws
    is given without a temperature. What does not draw takes the likeliest token, which every
    option of draws allows, so that these are left out then.

    Raises:
        TypeError: names that are no options, all of them.
        ValueError: ``do_sample`` and ``temperature`` contradict each other.
    """
    unknown = [name for name in options if name not in NAMES]
    if unknown:
        raise TypeError(
            f"{where}: options must be of {', '.join(NAMES)}, got {', '.join(map(repr, unknown))}"
        )
    given = {name: value for name, value in options.items() if value is not None}
    asked, temperature = given.pop("do_sample", None), given.get("temperature")
    draws = bool(temperature) or (temperature is None and any(n in given for n in DRAWING))
    if asked is not None and temperature is not None and asked != bool(temperature):
        raise ValueError(
            f"{where}: do_sample must be {bool(temperature)} with temperature={temperature}, got "
            f"{asked!r}"
        )
    if draws if asked is None else asked:
        return {"temperature": 1.0, **given, "do_sample": True}
    kept = {n: v for n, v in given.items() if n not in (*DRAWING, "temperature", "seed")}
    return {**kept, "do_sample": False}


def for_host(where: str, options: Mapping[str, Any], *, why: str) -> dict[str, Any]:
    """What ``read`` returned as transformers' ``generate`` takes it; ``seed`` is left out.

    Raises:
        ValueError: one that it does not have, by name, with why the host runs the request.
    """
    found = {name: value for name, value in options.items() if name != "seed"}
    for name, value in found.items():
        if name not in HOST_NAMES:
            raise ValueError(
                f"{where}: {name} needs the decode loop, got {value!r}; the host generates "
                f"because {why}"
            )
    return {**(NEUTRAL if found["do_sample"] else GREEDY), **found}


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Draws of torch by ``seed``, then as if there had been none; None changes nothing."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
