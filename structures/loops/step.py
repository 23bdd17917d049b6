"""The captured step: one token for every row, from its id to the next one, on static buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..catalogue.layer_math import (
    BoundLayer,
    BoundLinear,
    BoundNorm,
    Buffers,
    Families,
    Stream,
    bind,
    bind_linear,
    bind_norm,
    layer_fused,
    norm_arguments,
    prologue,
)
from .cache import StaticState
from .decoder import DecoderSpec
from .rotary import Table, rotary_table


# What the device emits for a row that has stopped; the host puts the request's own padding in its place.
STOPPED = 0


@dataclass(frozen=True)
class BoundDecoder:
    """The tensors of a whole decoder: the host's own parameters, and tables made by its rotary."""

    spec: DecoderSpec
    table: torch.Tensor
    embedding_scale: float
    layers: tuple[BoundLayer, ...]
    rotary: tuple[Table | None, ...]
    norm: BoundNorm
    head: BoundLinear

    def addresses(self) -> tuple[int, ...]:
        """Where the parameters are; a graph recorded at other addresses is stale."""
        tensors = [self.table, self.norm.weight, self.head.weight]
        for layer in self.layers:
            tensors += [part.weight for part in (*layer.qkv, layer.o, layer.gate, layer.up, layer.down)]
        return tuple(t.data_ptr() for t in tensors)


def bind_decoder(model: nn.Module, spec: DecoderSpec, positions: int) -> BoundDecoder:
    """Find the tensors of ``spec`` in ``model`` and make its rotary tables for ``positions``.

    Raises:
        NotThisForm: the rotary depends on the length of a call.
    """
    form = spec.form
    base = model.get_submodule(form.base)
    table = base.get_submodule(form.embedding).weight
    tables: dict[str | None, Table] = {}
    rotary: list[Table | None] = []
    for layer, kind in zip(spec.layers, form.layer_types, strict=True):
        if layer.attention.rotary is None or form.rotary is None:
            rotary.append(None)
            continue
        if kind not in tables:
            tables[kind] = rotary_table(base.get_submodule(form.rotary), kind, positions, table)
        rotary.append(tables[kind])
    norm = bind_norm(model, spec.head.norm)
    assert norm is not None
    return BoundDecoder(
        spec=spec,
        table=table,
        embedding_scale=spec.embedding.scale_for(table.dtype),
        layers=tuple(bind(model.get_submodule(form.layer_path(i)), s) for i, s in enumerate(spec.layers)),
        rotary=tuple(rotary),
        norm=norm,
        head=bind_linear(model, spec.head.projection),
    )


class Step:
    """The work of one token: embedding, five kernels a layer, head, and the choice of the next token.

    Everything it writes was allocated before, so a recording owns no memory and a replay allocates nothing.
    """

    def __init__(self, families: Families, decoder: BoundDecoder, state: StaticState) -> None:
        self.families, self.decoder, self.state = families, decoder, state
        rows, like = state.batch, decoder.table
        layers = decoder.layers

        def buffer(columns: int) -> torch.Tensor:
            return like.new_empty(rows, columns)

        size = like.shape[1]
        widths = [sum(part.weight.shape[0] for part in layer.qkv) for layer in layers]
        self._qkv = {w: buffer(w) for w in set(widths)}
        self._hidden = {w: buffer(w) for w in {layer.gate.weight.shape[0] for layer in layers}}
        self._attended = {s: buffer(s) for s in {layer.o.weight.shape[1] for layer in layers}}
        streams, branches = (buffer(size), buffer(size)), (buffer(size), buffer(size))
        self._buffers = [
            Buffers(streams, self._qkv[w], branches, self._hidden[layer.gate.weight.shape[0]])
            for w, layer in zip(widths, layers, strict=True)
        ]
        self.logits = torch.zeros(rows, decoder.head.weight.shape[0], device=like.device, dtype=torch.float32)
        self._moved = buffer(size)
        shapes = {(a.heads, a.head_dim) for a in (layer.spec.attention for layer in layers)}
        workspace = families.attention.workspace
        self._workspaces = {s: workspace(rows, 1, *s, state.positions, like.device) for s in shapes}

    def forward(self) -> None:
        """``logits`` of the token in ``state.next_ids`` at position ``state.lengths``."""
        decoder, state = self.decoder, self.state
        linear = self.families.linear
        first = self._buffers[0].streams[0]
        linear.embedding(state.next_ids, decoder.table, scale=decoder.embedding_scale, out=first)
        stream = Stream(first)
        for index, layer in enumerate(decoder.layers):
            stream = layer_fused(
                self.families,
                layer,
                stream,
                lambda q, k, v, i=index: self._attend(i, q, k, v),
                buffers=self._buffers[index],
                weights_static=True,
            )
        self.head(stream, self.logits)

    def head(self, stream: Stream, logits: torch.Tensor) -> None:
        """Final norm, vocabulary projection, scale and soft cap into ``logits [M, V]``."""
        head = self.decoder.spec.head
        moved = None if stream.branch is None else self._moved[: stream.x.shape[0]]
        self.families.linear.linear(
            stream.x,
            self.decoder.head.weight,
            self.decoder.head.bias,
            **prologue(stream, self.decoder.norm, moved),
            scale=head.scale,
            soft_cap=head.soft_cap,
            weights_static=True,
            out_dtype=torch.float32,
            out=logits,
        )

    def choose(self) -> None:
        """Greedy choice from ``logits``: append it, advance, test the stop conditions."""
        state = self.state
        self.families.sampling.greedy_step(
            self.logits,
            state.tokens,
            state.counts,
            state.lengths,
            state.finished,
            state.next_ids,
            state.eos,
            state.max_new,
            STOPPED,
        )

    def greedy(self) -> None:
        """One whole greedy step."""
        self.forward()
        self.choose()

    def _attend(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        layer, state = self.decoder.layers[index], self.state
        spec = layer.spec.attention
        cos, sin = self.decoder.rotary[index] or (None, None)
        out = self._attended[spec.heads * spec.head_dim]
        self.families.attention.attend(
            q.unflatten(-1, (spec.heads, spec.head_dim))[:, None],
            k.unflatten(-1, (spec.kv_heads, spec.head_dim))[:, None],
            v.unflatten(-1, (spec.kv_heads, spec.head_dim))[:, None],
            state.k[index],
            state.v[index],
            state.lengths,
            cos=cos,
            sin=sin,
            rotary=spec.rotary or "half",
            **norm_arguments(layer),
            scaling=spec.scaling,
            window=spec.window,
            soft_cap=spec.soft_cap,
            history_static=True,
            workspace=self._workspaces[spec.heads, spec.head_dim],
            out=out.view(state.batch, 1, spec.heads, spec.head_dim),
        )
        return out

    @property
    def memory_bytes(self) -> int:
        buffers = [*self._qkv.values(), *self._hidden.values(), *self._attended.values(), *self._workspaces.values()]
        buffers += [self.logits, self._moved, *self._buffers[0].streams, *self._buffers[0].branches]
        return sum(b.numel() * b.element_size() for b in buffers)
