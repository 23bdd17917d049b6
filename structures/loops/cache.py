"""Static state of a loop: keys and values by slot, lengths, tokens and stop conditions, all on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .decoder import DecoderSpec

NO_TOKEN = -1  # an end-of-sequence entry that no argmax returns


class StaticState:
    """Buffers of B rows of at most S positions; a row is stored from slot 0, without its padding.

    Attributes:
        k, v: per layer ``[B, G, S, D]``; slots from ``lengths`` on are undefined.
        lengths: int32 ``[B]``, positions in the cache.
        next_ids: int64 ``[B]``, the token that the next step reads.
        finished: bool ``[B]``; beside ``next_ids`` in ``report``, so that one copy brings both to the host.
        tokens: int64 ``[B, S]``, generated so far; ``counts``: int32 ``[B]``, how many.
        eos: int64 ``[E]``; ``max_new``: int32 ``[B]``.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        batch: int,
        positions: int,
        eos_slots: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.batch, self.positions = batch, positions
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []
        for layer in spec.layers:
            shape = (batch, layer.attention.kv_heads, positions, layer.attention.head_dim)
            self.k.append(torch.zeros(shape, device=device, dtype=dtype))
            self.v.append(torch.zeros(shape, device=device, dtype=dtype))
        self.report = torch.zeros(9 * batch, device=device, dtype=torch.uint8)
        self.next_ids = self.report[: 8 * batch].view(torch.int64)
        self.finished = self.report[8 * batch :].view(torch.bool)
        self.lengths = torch.zeros(batch, device=device, dtype=torch.int32)
        self.counts = torch.zeros(batch, device=device, dtype=torch.int32)
        self.max_new = torch.zeros(batch, device=device, dtype=torch.int32)
        self.tokens = torch.zeros(batch, positions, device=device, dtype=torch.int64)
        self.eos = torch.full((eos_slots,), NO_TOKEN, device=device, dtype=torch.int64)

    def begin(self, *, max_new: int, eos: Sequence[int]) -> None:
        """Empty every row and set the stop conditions; values change in place, addresses stay."""
        self.lengths.zero_()
        self.counts.zero_()
        self.finished.zero_()
        self.next_ids.zero_()
        self.max_new.fill_(max_new)
        self.tokens.zero_()
        padded = [*eos, *[NO_TOKEN] * (len(self.eos) - len(eos))]
        self.eos.copy_(torch.tensor(padded, dtype=torch.int64))

    def generated(self, count: int, pad: int) -> torch.Tensor:
        """The first ``count`` generated tokens of every row, int64 ``[B, count]``, ``pad`` behind its last."""
        column = torch.arange(count, device=self.tokens.device)
        return self.tokens[:, :count].masked_fill(column >= self.counts[:, None], pad)

    @property
    def memory_bytes(self) -> int:
        buffers = [
            *self.k,
            *self.v,
            self.report,
            self.lengths,
            self.counts,
            self.max_new,
            self.tokens,
            self.eos,
        ]
        return sum(b.numel() * b.element_size() for b in buffers)
