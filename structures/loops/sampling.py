"""How the next token of a sequence is chosen."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

TOP_LOGPROBS = 20  # most alternatives that are reported beside a token
SEEDS = 2**63

_NO_BIAS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True)
class Sampling:
    """Settings of one sequence, applied in this order to its fp32 logits ``z``.

    1. ``logit_bias``: ``z + logit_bias[id]``; ``-inf`` forbids an id.
    2. ``repetition_penalty`` r: of every id in the prompt or the answer, ``z / r`` where z > 0,
       else ``z * r``.
    3. ``presence_penalty``, ``frequency_penalty``: of every id that the answer has c > 0 times,
       ``z - presence_penalty - c * frequency_penalty``.
    4. Stop ids are forbidden while the answer has fewer than ``min_new_tokens``.
    5. ``temperature``: 0 takes the largest; otherwise ``softmax(z / temperature)``, of which
       ``top_k`` keeps the k largest, ``top_p`` the fewest that reach p, ``min_p`` those of at
       least p times the largest, and one is drawn.

    Attributes:
        temperature: at least 0. 0 is greedy and needs no seed.
        top_k: at least 0; 0 is off.
        top_p: above 0, at most 1; 1 is off.
        min_p: 0 to 1; 0 is off.
        repetition_penalty: above 0; 1 is off.
        presence_penalty, frequency_penalty: finite; 0 is off.
        logit_bias: added to the logits of these ids.
        seed: 0 to 2**63 - 1; the draws of a sequence follow from its seed and its own positions,
            whatever else runs beside it. None takes one at random.
        min_new_tokens: at least 0.
        logprobs: report the logarithm of the chosen id's probability under ``softmax(z)`` of the
            untouched logits.
        top_logprobs: 0 to 20 of the largest beside it.

    Raises:
        ValueError: a value outside the above.
        TypeError: a value of another type.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    seed: int | None = None
    min_new_tokens: int = 0
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        infinite = math.inf
        _number(self, "temperature", 0.0, infinite)
        _number(self, "top_p", 0.0, 1.0, open_below=True)
        _number(self, "min_p", 0.0, 1.0)
        _number(self, "repetition_penalty", 0.0, infinite, open_below=True)
        _number(self, "presence_penalty", -infinite, infinite)
        _number(self, "frequency_penalty", -infinite, infinite)
        _integer(self, "top_k", 0, 2**31 - 1)
        _integer(self, "min_new_tokens", 0, 2**31 - 1)
        _integer(self, "top_logprobs", 0, TOP_LOGPROBS)
        if self.seed is not None:
            _integer(self, "seed", 0, SEEDS - 1)
        if not isinstance(self.logprobs, bool):
            raise TypeError(f"Sampling: logprobs must be True or False, got {self.logprobs!r}")
        if self.top_logprobs and not self.logprobs:
            raise ValueError(
                f"Sampling: top_logprobs needs logprobs=True, got top_logprobs={self.top_logprobs}"
            )
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))

    @property
    def penalised(self) -> bool:
        """Whether what was said before changes what comes next."""
        given = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return given != (1.0, 0.0, 0.0)

    def seed_of(self, index: int, drawn: int) -> int:
        """Seed of answer ``index``: ``seed`` (or ``drawn`` where it is None), or one mixed from it.

        Source of the mixing: Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195 (SplitMix64).
        """
        seed = drawn if self.seed is None else self.seed
        if index == 0:
            return seed
        word = (seed + index * 0x9E3779B97F4A7C15) % 2**64
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
        return (word ^ (word >> 31)) % SEEDS


def _number(
    sampling: Sampling, name: str, low: float, high: float, *, open_below: bool = False
) -> None:
    value: Any = getattr(sampling, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"Sampling: {name} must be a number, got {value!r}")
    fits = (low < value if open_below else low <= value) and value <= high
    if not (fits and math.isfinite(value)):
        above = f"above {low:g}" if open_below else f"at least {low:g}"
        rule = "finite" if math.isinf(low) else above
        rule += "" if math.isinf(high) else f" and at most {high:g}"
        raise ValueError(f"Sampling: {name} must be {rule}, got {value}")
    object.__setattr__(sampling, name, float(value))


def _integer(sampling: Sampling, name: str, low: int, high: int) -> None:
    value: Any = getattr(sampling, name)
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"Sampling: {name} must be an integer, got {value!r}") from None
    if not low <= number <= high:
        raise ValueError(f"Sampling: {name} must be {low} to {high}, got {number}")
    object.__setattr__(sampling, name, number)


def _bias(given: Any) -> Mapping[int, float]:
    if given is None:
        return _NO_BIAS
    if not isinstance(given, Mapping):
        raise TypeError(f"Sampling: logit_bias must map ids to numbers, got {given!r}")
    found: dict[int, float] = {}
    for key, value in given.items():
        if isinstance(key, bool) or not isinstance(key, int) or key < 0:
            raise ValueError(f"Sampling: logit_bias must have ids of at least 0, got {key!r}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"Sampling: logit_bias must map ids to numbers, got {value!r}")
        if math.isnan(value) or value == math.inf:
            raise ValueError(f"Sampling: logit_bias must be finite or -inf, got {value}")
        found[key] = float(value)
    return MappingProxyType(found)
