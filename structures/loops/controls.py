"""Sampling settings of every row, on the device: a recorded step reads them in each replay."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from .cache import EOS_SLOTS, NO_TOKEN
from .sampling import Sampling
from .staging import put

BIAS_SLOTS = 512  # ids of a row's logit_bias; OpenAI's clients send up to 300
FLOATS = (
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
INTS = ("top_k", "min_new")
EVERY_TOKEN = -1  # a word of set bits
# How a step chooses: the largest logit, a draw, a draw behind penalties, bias and grammar.
GREEDY, DRAWN, ADJUSTED = "greedy", "drawn", "adjusted"


def way_of(sampling: Sampling, *, masked: bool = False) -> str:
    """The cheapest way of choosing that honours ``sampling``."""
    if masked or sampling.logit_bias or sampling.penalised:
        return ADJUSTED
    return DRAWN if sampling.temperature > 0 or sampling.min_new_tokens else GREEDY


def widest(ways: Sequence[str]) -> str:
    """The one of ``ways`` that can do what all of them do."""
    return max(ways, key=(GREEDY, DRAWN, ADJUSTED).index)


def check_controls(where: str, sampling: Sampling, stops: Sequence[int]) -> None:
    """Raise ValueError for settings that have more entries than a row has room for."""
    if sampling.min_new_tokens and len(stops) > EOS_SLOTS:
        raise ValueError(
            f"{where}: min_new_tokens must come with at most {EOS_SLOTS} stop ids, got {len(stops)}"
        )
    if len(sampling.logit_bias) > BIAS_SLOTS:
        raise ValueError(
            f"{where}: logit_bias must have at most {BIAS_SLOTS} ids, "
            f"got {len(sampling.logit_bias)}"
        )


class Controls:
    """Tensors as ``sampling.sample_step`` takes them; rows start neutral and greedy."""

    def __init__(self, sampling: ModuleType, rows: int, vocabulary: int, like: torch.Tensor):
        self._sampling = sampling
        self.floats = like.new_zeros(len(FLOATS), rows, dtype=torch.float32)
        self.ints = like.new_zeros(len(INTS), rows, dtype=torch.int32)
        self.seed = like.new_zeros(rows, dtype=torch.int64)
        self.eos = like.new_full((rows, EOS_SLOTS), NO_TOKEN, dtype=torch.int64)
        self.occurrences = like.new_zeros(rows, vocabulary, dtype=torch.int32)
        self.bias_ids = like.new_full((rows, BIAS_SLOTS), NO_TOKEN, dtype=torch.int64)
        self.bias_values = like.new_zeros(rows, BIAS_SLOTS, dtype=torch.float32)
        words = (vocabulary + 31) // 32
        self.allowed = like.new_full((rows, words), EVERY_TOKEN, dtype=torch.int32)
        self.floats[FLOATS.index("repetition_penalty")].fill_(1.0)

    def rows_of(self, part: slice) -> Controls:
        """The same memory as controls of consecutive rows."""
        view = copy.copy(self)
        view.floats, view.ints = self.floats[:, part], self.ints[:, part]
        for name in ("seed", "eos", "occurrences", "bias_ids", "bias_values", "allowed"):
            setattr(view, name, getattr(self, name)[part])
        return view

    def by_row(self) -> list[torch.Tensor]:
        """Everything, ``[rows, ...]`` each."""
        small = [self.floats.t(), self.ints.t(), self.seed, self.eos]
        return [*small, self.occurrences, self.bias_ids, self.bias_values, self.allowed]

    def set_row(
        self, row: int, sampling: Sampling, *, seed: int, stops: Sequence[int], prompt: Any
    ) -> None:
        """Settings of a sequence with this prompt, int64 ``[P]``; nothing of it is generated yet.

        ``stops`` are what ``min_new_tokens`` forbids, at most ``EOS_SLOTS`` of them.
        """
        floats = [getattr(sampling, name) for name in FLOATS]
        put(self.floats[:, row], floats)
        put(self.ints[:, row], [sampling.top_k, sampling.min_new_tokens])
        self.seed[row].fill_(seed)
        ends = [*stops, *[NO_TOKEN] * (EOS_SLOTS - len(stops))]
        put(self.eos[row], ends)
        self.allowed[row].fill_(EVERY_TOKEN)
        self.bias_ids[row].fill_(NO_TOKEN)
        if sampling.logit_bias:
            count = len(sampling.logit_bias)
            put(self.bias_ids[row, :count], [*sampling.logit_bias])
            put(self.bias_values[row, :count], [*sampling.logit_bias.values()])
        if sampling.penalised:
            length = prompt.new_full((1,), prompt.shape[0])
            self._sampling.record_prompt(self.occurrences[row : row + 1], prompt[None], length)

    def allow(self, row: int, words: torch.Tensor | None) -> None:
        """What a grammar allows ``row`` next: int32 ``[W]``, or None for every id."""
        target = self.allowed[row]
        if words is None:
            target.fill_(EVERY_TOKEN)
            return
        if words.dtype != torch.int32 or words.dim() != 1 or words.numel() > target.numel():
            raise ValueError(
                f"TokenMask.allowed: must return int32 [{target.numel()}], got {words.dtype} of "
                f"shape {tuple(words.shape)}"
            )
        put(target[: words.numel()], words)
        target[words.numel() :].zero_()

    def arguments(self, way: str) -> dict[str, torch.Tensor]:
        """Keywords of ``sampling.sample_step`` for this way of choosing."""
        named = dict(zip(FLOATS, self.floats, strict=True)) | dict(
            zip(INTS, self.ints, strict=True)
        )
        wanted = {GREEDY: ("temperature",), DRAWN: ("temperature", "top_p", "min_p", *INTS)}
        found = {name: value for name, value in named.items() if name in wanted.get(way, named)}
        found["seed"] = self.seed
        if way == ADJUSTED:
            names = ("occurrences", "bias_ids", "bias_values", "allowed")
            found |= {name: getattr(self, name) for name in names}
        return found

    @property
    def memory_bytes(self) -> int:
        """Everything held."""
        return sum(t.numel() * t.element_size() for t in self.by_row())
