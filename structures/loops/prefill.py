"""Prompts: many positions of one row at a time, through torch's products and attention.

A row is computed alone, so its text does not depend on the rows beside it. Prompts up to
``CAPTURED`` tokens are padded to a power of two and replay a graph; the padding lies behind the
prompt, where causal attention never looks. Longer ones run uncaptured on exact slices.
"""

from __future__ import annotations

import torch

from ..capture import Backend, Graph, GraphCache, Pool
from ..catalogue.layer_math import Stream, layer_wide
from ..kv_format import measured_ids, set_scale, widened
from .sdpa import causal_attention
from .step import Step

SMALLEST = 16
CAPTURED = 256  # more tokens take the device longer than their launches take the host
CHUNK = 2048  # bounds the memory of a long prompt's activations
MAX_GRAPHS = 60
MAX_UNSHARED_BYTES = 1 << 28  # of recordings that share no memory; more prompts run unrecorded


class Prefill:
    """Fills the rows of a step's state."""

    def __init__(self, step: Step, backend: Backend, pool: Pool) -> None:
        self._step, self._families = step, step.families
        self._backend, self._pool = backend, pool
        self._graphs: GraphCache[Graph] = GraphCache(MAX_GRAPHS)
        lengths = step.state.lengths
        self._ids = lengths.new_zeros(CAPTURED, dtype=torch.int64)
        self._last = lengths.new_zeros(1, dtype=torch.int64)
        self._start = torch.zeros_like(lengths[:1])
        self._measures = False

    def measure_scales(self, max_len: int) -> None:
        """Scales of FP8 caches, from a text through the model; it stays behind in the first row."""
        table, lengths = self._step.decoder.table, self._step.state.lengths
        self._measures = True
        try:
            self._layers(0, measured_ids(max_len, table.shape[0], lengths.device), 0)
        finally:
            self._measures = False

    def run(self, row: int, ids: torch.Tensor, start: int = 0) -> None:
        """Keys and values of ``ids [n]`` from position ``start``, logits of the last to the step's.

        They go into ``row``, which holds the positions before.
        """
        count = ids.shape[0]
        size = count if count <= CAPTURED else CHUNK
        for first in range(0, count, size):
            part = ids[first : first + size]
            self.chunk(row, part, start + first, last=first + size >= count)

    def chunk(self, row: int, ids: torch.Tensor, start: int, *, last: bool) -> None:
        """Keys and values of positions ``start`` and on; behind the ``last`` chunk, logits too."""
        count = ids.shape[0]
        padded = max(SMALLEST, 1 << (count - 1).bit_length())
        if start == 0 and count <= CAPTURED and padded <= self._step.state.slots:
            self._captured(row, ids, padded)
            return
        try:
            self._start.fill_(start)
            stream = self._layers(row, ids, start)
        finally:  # captured prompts start at 0, also after one that ran out of memory
            self._start.zero_()
        if last:
            self._logits(row, stream.x[-1:], stream, slice(-1, None))

    def warm_up(self, rows: int) -> None:
        """Record the prompts of ``rows`` rows that replay graphs, as far as there is room."""
        sizes = [SMALLEST << n for n in range((CAPTURED // SMALLEST).bit_length())]
        fitting = [size for size in reversed(sizes) if size <= self._step.state.slots]
        pairs = [(row, size) for size in fitting for row in range(rows)]
        for row, size in pairs[:MAX_GRAPHS]:
            self.chunk(row, self._ids.new_zeros(size), 0, last=True)

    def _captured(self, row: int, ids: torch.Tensor, padded: int) -> None:
        count = ids.shape[0]
        self._pool.join()
        self._ids[:count].copy_(ids)
        self._ids[count:padded].zero_()
        self._last.fill_(count - 1)
        key = (row, padded)
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return

        def work() -> None:
            stream = self._layers(row, self._ids[:padded], 0)
            self._logits(row, stream.x.index_select(0, self._last), stream, self._last)

        work()
        if self._pool.unshared_bytes < MAX_UNSHARED_BYTES:
            self._graphs.put(key, self._backend.record(work, warmups=0, pool=self._pool))

    def _logits(
        self, row: int, x: torch.Tensor, stream: Stream, last: torch.Tensor | slice
    ) -> None:
        branch = stream.branch
        if branch is not None:
            branch = branch[last] if isinstance(last, slice) else branch.index_select(0, last)
        logits = self._step.logits[row : row + 1]
        self._step.head(Stream(x, branch, stream.branch_norm), logits, weights_static=False)

    def _layers(self, row: int, ids: torch.Tensor, start: int) -> Stream:
        decoder = self._step.decoder
        x = decoder.like.new_empty(ids.shape[0], decoder.table.shape[1])
        embed = self._families.linear.embedding
        stream = Stream(embed(ids, decoder.table, scale=decoder.embedding_scale, out=x))
        for index, layer in enumerate(decoder.layers):
            heads = _Heads(self._step, self._start, index, row, start, measures=self._measures)
            stream = layer_wide(self._families, layer, stream, heads)
        return stream


class _Heads:
    """The middle of a layer for a run of positions of one row.

    An FP8 cache is read as it was rounded, by the positions that it was filled with too: what a
    position sees does not depend on where a prompt was cut.
    """

    def __init__(
        self,
        step: Step,
        start_on_device: torch.Tensor,
        index: int,
        row: int,
        start: int,
        *,
        measures: bool,
    ) -> None:
        self._attention = step.families.attention
        self._layer, self._table = step.decoder.layers[index], step.decoder.rotary[index]
        self._k, self._v = (c[index][row : row + 1] for c in (step.state.k, step.state.v))
        self._scales, self._measures = step.state.scales[index], measures
        self._start_on_device, self._start = start_on_device, start

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        spec, start, stop = self._layer.spec.attention, self._start, self._start + q.shape[0]
        q, k, v = (t.unflatten(-1, (-1, spec.head_dim))[None] for t in (q, k, v))
        arguments = self._layer.qk_norms
        if self._table is not None:
            cos, sin = (t[None, start:stop] for t in self._table)
            arguments = arguments | {"cos": cos, "sin": sin, "rotary": spec.rotary}
        if arguments:
            q, k = self._attention.norm_rope(q, k, **arguments)
        if self._measures:
            set_scale(self._scales["k_scale"], k)
            set_scale(self._scales["v_scale"], v)
        self._attention.append(k, v, self._k, self._v, self._start_on_device, **self._scales)
        if self._scales:
            keys, values = (
                widened(cache[:, :, :stop], scale, k.dtype)
                for cache, scale in zip((self._k, self._v), self._scales.values(), strict=True)
            )
        elif start:
            keys, values = self._k[:, :, :stop], self._v[:, :, :stop]
        else:
            keys, values = k.transpose(1, 2), v.transpose(1, 2)
        out = causal_attention(
            q.transpose(1, 2),
            keys,
            values,
            scaling=spec.scaling,
            window=spec.window,
            soft_cap=spec.soft_cap,
        )
        return out.transpose(1, 2).flatten(2)[0]
