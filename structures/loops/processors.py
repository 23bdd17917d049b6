"""transformers' own logits processors as settings that a captured step honours."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from .cache import EOS_SLOTS
from .sampling import Sampling

# Each with its place in the order in which a step applies them.
PLACES = {
    "RepetitionPenaltyLogitsProcessor": 0,
    "MinLengthLogitsProcessor": 1,
    "MinNewTokensLengthLogitsProcessor": 1,
    "TemperatureLogitsWarper": 2,
    "TopKLogitsWarper": 3,
    "TopPLogitsWarper": 4,
    "MinPLogitsWarper": 5,
}
HOME = "transformers.generation.logits_process"


def read_processors(
    processors: Iterable[Any],
    *,
    do_sample: bool,
    width: int,
    lengths: tuple[int, ...],
    eos: tuple[int, ...],
) -> Sampling | None:
    """Settings that do what ``processors`` do, in their order.

    Args:
        width: positions of the prompt with its padding.
        lengths: of each row without it.
        eos: ids that end a row.

    Returns:
        None when one of them is of another kind, or does what no setting can.
    """
    found: dict[str, Any] = {"temperature": 1.0 if do_sample else 0.0}
    last, seen = -1, set()
    for processor in processors:
        kind = type(processor)
        place = PLACES.get(kind.__name__, -1) if kind.__module__ == HOME else -1
        setting = _setting(processor, width, lengths, eos) if place >= last else None
        if setting is None or kind.__name__ in seen or (place >= 2 and not do_sample):
            return None
        seen.add(kind.__name__)
        last = place
        name, value = setting
        found[name] = max(value, found[name]) if name == "min_new_tokens" in found else value
    return Sampling(**found)


def ignores_padding(processors: Iterable[Any]) -> bool:
    """Whether a repetition penalty among them passes over the padding of a prompt."""
    return any(vars(p).get("prompt_ignore_length") is not None for p in processors)


def _setting(
    processor: Any, width: int, lengths: tuple[int, ...], eos: tuple[int, ...]
) -> tuple[str, Any] | None:
    values = vars(processor)
    name = type(processor).__name__
    if name == "RepetitionPenaltyLogitsProcessor":
        ignored = values.get("prompt_ignore_length")
        if isinstance(ignored, torch.Tensor):  # transformers 5.24 gives the padding of each row
            ignored = None if ignored.tolist() == [width - n for n in lengths] else ignored
        whole = ignored is None and values.get("logits_indices") is None
        return ("repetition_penalty", values["penalty"]) if whole else None
    if name in ("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor"):
        ends = {int(e) for e in values["eos_token_id"].flatten()}
        if ends != set(eos) or len(ends) > EOS_SLOTS:
            return None
        if name == "MinLengthLogitsProcessor":
            return "min_new_tokens", max(values["min_length"] - width, 0)
        skipped = values["prompt_length_to_skip"]
        return ("min_new_tokens", values["min_new_tokens"]) if skipped == width else None
    if name == "TemperatureLogitsWarper":
        return "temperature", values["temperature"]
    if values.get("filter_value") != -math.inf or values.get("min_tokens_to_keep") != 1:
        return None
    key = {"TopKLogitsWarper": "top_k", "TopPLogitsWarper": "top_p"}.get(name, "min_p")
    if key == "top_p" and values["top_p"] <= 0:
        return None
    return key, values[key]
