"""Static state of a loop: keys and values by slot, lengths, tokens and stop conditions."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from ..kv_format import FP8, KVCache
from .staging import put

NO_TOKEN = -1  # an end-of-sequence entry that no argmax returns
EOS_SLOTS = 8
BY_ROW = ("next_ids", "accepted", "finished", "lengths", "counts", "max_new", "tokens")


class StaticState:
    """Buffers of B rows of S slots; a row is stored from slot 0, without its padding.

    Attributes:
        k, v: per layer ``[B, G, S, D]``; slots from ``lengths`` on are undefined.
        scales: per layer ``k_scale`` and ``v_scale``, fp32 ``[G]`` each, of FP8 caches; else none.
        lengths: int32 ``[B]``, positions in the cache.
        next_ids: int64 ``[B]``, the token that the next step reads.
        accepted: int32 ``[B]``, tokens that the last verification of drafts appended.
        finished: bool ``[B]``; lies behind these two in ``report``, so that one copy brings all to
            the host.
        tokens: int64 ``[B, S]``, generated so far; ``counts``: int32 ``[B]``, how many.
        eos: int64 ``[EOS_SLOTS]``; ``max_new``: int32 ``[B]``.
    """

    def __init__(
        self,
        kv: Sequence[tuple[int, int]],
        *,
        batch: int,
        slots: int,
        like: torch.Tensor,
        kv_cache: KVCache = None,
    ) -> None:
        """``kv`` is (G, D) of each layer; what is not FP8 has dtype and device of ``like``."""
        self.batch, self.slots = batch, slots
        stored = like.dtype if kv_cache is None else FP8
        shapes = [(batch, groups, slots, size) for groups, size in kv]
        self.k = [like.new_zeros(shape, dtype=stored) for shape in shapes]
        self.v = [like.new_zeros(shape, dtype=stored) for shape in shapes]
        names = () if kv_cache is None else ("k_scale", "v_scale")
        self.scales = [
            {name: like.new_ones(groups, dtype=torch.float32) for name in names} for groups, _ in kv
        ]
        self.report = like.new_zeros(13 * batch, dtype=torch.uint8)
        self.next_ids = self.report[: 8 * batch].view(torch.int64)
        self.accepted = self.report[8 * batch : 12 * batch].view(torch.int32)
        self.finished = self.report[12 * batch :].view(torch.bool)
        self.lengths = like.new_zeros(batch, dtype=torch.int32)
        self.counts = like.new_zeros(batch, dtype=torch.int32)
        self.max_new = like.new_zeros(batch, dtype=torch.int32)
        self.tokens = like.new_zeros((batch, slots), dtype=torch.int64)
        self.eos = like.new_full((EOS_SLOTS,), NO_TOKEN, dtype=torch.int64)

    def first(self, rows: int) -> StaticState:
        """The same memory as a state of its first rows."""
        view = copy.copy(self)
        view.batch = rows
        view.k, view.v = [c[:rows] for c in self.k], [c[:rows] for c in self.v]
        for name in BY_ROW:
            setattr(view, name, getattr(self, name)[:rows])
        return view

    def by_row(self) -> list[torch.Tensor]:
        """Everything beside keys and values that belongs to a row, ``[B, ...]`` each."""
        return [getattr(self, name) for name in BY_ROW]

    def begin(self, *, max_new: int, eos: Sequence[int]) -> None:
        """Empty every row and set the stop conditions; values change in place.

        More than ``EOS_SLOTS`` of ``eos`` are left to the caller to test.
        """
        for tensor in (self.lengths, self.counts, self.tokens, self.report):
            tensor.zero_()
        self.max_new.fill_(max_new)
        tested = eos if len(eos) <= EOS_SLOTS else ()
        padded = [*tested, *[NO_TOKEN] * (EOS_SLOTS - len(tested))]
        put(self.eos, padded)

    def generated(self, count: int, pad: int) -> torch.Tensor:
        """The first ``count`` new tokens of every row, ``[B, count]``, ``pad`` behind its last."""
        column = torch.arange(count, device=self.tokens.device)
        return self.tokens[:, :count].masked_fill(column >= self.counts[:, None], pad)

    @property
    def memory_bytes(self) -> int:
        """Everything held."""
        small = [self.report, self.lengths, self.counts, self.max_new, self.tokens, self.eos]
        small += [scale for scales in self.scales for scale in scales.values()]
        return sum(t.numel() * t.element_size() for t in [*self.k, *self.v, *small])
