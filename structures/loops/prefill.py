"""Prompts: many positions of one row at a time through norm kernels, torch's matmuls and torch's attention.

A row is computed alone, so its text does not depend on the rows beside it. Prompts up to ``CAPTURED`` tokens are
padded to a power of two and replay a graph; the padding lies behind the prompt, where causal attention never looks.
"""

from __future__ import annotations

from collections import OrderedDict

import torch

from ..capture import Backend, Graph, Pool
from ..catalogue.layer_math import Families, Stream, layer_wide, norm_arguments
from .sdpa import causal_attention
from .step import Step

SMALLEST = 16
CAPTURED = 256  # longer chunks take the device longer than their launches take the host
CHUNK = 2048  # bounds the memory of a long prompt's activations
MAX_GRAPHS = 60


class Prefill:
    """Fills the rows of a step's state."""

    def __init__(self, families: Families, step: Step, backend: Backend, pool: Pool) -> None:
        self._families, self._step = families, step
        self._backend, self._pool = backend, pool
        state = step.state
        self._graphs: OrderedDict[tuple[int, int], Graph] = OrderedDict()
        self._seen: set[tuple[int, int]] = set()
        device = state.lengths.device
        self._ids = torch.zeros(CAPTURED, device=device, dtype=torch.int64)
        self._last = torch.zeros(1, device=device, dtype=torch.int64)
        self._start = torch.zeros(1, device=device, dtype=torch.int32)

    def run(self, row: int, ids: torch.Tensor) -> None:
        """Store the keys and values of ``ids [n]`` in ``row``; logits of its last token go to the step's row."""
        count = ids.shape[0]
        padded = max(SMALLEST, 1 << (count - 1).bit_length())
        if count <= CAPTURED and padded <= self._step.state.positions:
            self._captured(row, ids, padded)
            return
        for start in range(0, count, CHUNK):
            chunk = ids[start : start + CHUNK]
            self._start.fill_(start)
            stream = self._layers(row, chunk, start)
        self._logits(row, stream, slice(-1, None))
        self._start.zero_()

    def _captured(self, row: int, ids: torch.Tensor, padded: int) -> None:
        count = ids.shape[0]
        self._ids[:count].copy_(ids)
        self._ids[count:padded].zero_()
        self._last.fill_(count - 1)
        key = (row, padded)
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            graph.replay()
            return
        self._padded(row, padded)
        graph = self._backend.record(lambda: self._padded(row, padded), warmups=0, pool=self._pool)
        self._graphs[key] = graph
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)[1].release()

    def _padded(self, row: int, padded: int) -> None:
        stream = self._layers(row, self._ids[:padded], 0)
        self._logits(row, stream, self._last)

    def _logits(self, row: int, stream: Stream, last: torch.Tensor | slice) -> None:
        def pick(rows: torch.Tensor) -> torch.Tensor:
            return rows[last] if isinstance(last, slice) else rows.index_select(0, last)

        branch = None if stream.branch is None else pick(stream.branch)
        self._step.head(Stream(pick(stream.x), branch, stream.branch_norm), self._step.logits[row : row + 1])

    def _layers(self, row: int, ids: torch.Tensor, start: int) -> Stream:
        decoder = self._step.decoder
        stream = Stream(self._families.linear.embedding(ids, decoder.table, scale=decoder.embedding_scale))
        for index, layer in enumerate(decoder.layers):
            stream = layer_wide(
                self._families,
                layer,
                stream,
                lambda q, k, v, i=index: self._attend(i, row, start, q, k, v),
            )
        return stream

    def _attend(
        self, index: int, row: int, start: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        step = self._step
        layer, state = step.decoder.layers[index], step.state
        spec = layer.spec.attention
        count = q.shape[0]
        stop = start + count
        q = q.unflatten(-1, (spec.heads, spec.head_dim))[None]
        k = k.unflatten(-1, (spec.kv_heads, spec.head_dim))[None]
        v = v.unflatten(-1, (spec.kv_heads, spec.head_dim))[None]
        norms, table = norm_arguments(layer), step.decoder.rotary[index]
        if table is not None:
            cos, sin = (t[None, start:stop] for t in table)
            q, k = self._families.attention.norm_rope(q, k, cos=cos, sin=sin, rotary=spec.rotary, **norms)
        elif norms:
            q, k = self._families.attention.norm_rope(q, k, **norms)
        k_cache, v_cache = state.k[index][row : row + 1], state.v[index][row : row + 1]
        self._families.attention.append(k, v, k_cache, v_cache, self._start)
        keys, values = k.transpose(1, 2), v.transpose(1, 2)
        if start:
            keys, values = k_cache[:, :, :stop], v_cache[:, :, :stop]
        out = causal_attention(
            q.transpose(1, 2), keys, values, scaling=spec.scaling, window=spec.window, soft_cap=spec.soft_cap
        )
        return out.transpose(1, 2).reshape(count, spec.heads * spec.head_dim)
