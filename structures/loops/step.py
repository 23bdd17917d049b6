"""The captured step: one token for every row, from its id to the next one, on static buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import nn

from ..catalogue.layer_math import (
    BoundLayer,
    BoundNorm,
    Buffers,
    Families,
    Stream,
    layer_fused,
    prologue,
)
from ..weights import BoundLinear, Weight, table_of
from .cache import StaticState
from .controls import ADJUSTED, DRAWN, GREEDY, Controls
from .decoder import DecoderSpec
from .rotary import Table, extended, rotary_table

# What the device emits for a row that has stopped; the host puts the request's padding there.
STOPPED = 0


@dataclass(frozen=True)
class BoundDecoder:
    """What a whole decoder reads: the host's parameters or packed copies, and rotary tables.

    ``like`` has the dtype and the device of activations.
    """

    spec: DecoderSpec
    like: torch.Tensor
    table: Weight
    embedding_scale: float
    layers: tuple[BoundLayer, ...]
    rotary: tuple[Table | None, ...]
    norm: BoundNorm
    head: BoundLinear

    @classmethod
    def of(cls, model: nn.Module, spec: DecoderSpec, *, max_len: int, slots: int) -> BoundDecoder:
        """Find the tensors of ``spec`` in ``model``; rotary tables cover ``max_len`` positions.

        Raises:
            NotThisForm: the rotary depends on the length of a call.
        """
        form = spec.form
        base = model.get_submodule(form.base)
        norm = BoundNorm.of(model, spec.head.norm)
        assert norm is not None
        like = norm.weight
        tables: dict[str | None, Table] = {}
        rotary: list[Table | None] = []
        for layer, kind in zip(spec.layers, form.layer_types, strict=True):
            if layer.attention.rotary is None or form.rotary is None:
                rotary.append(None)
                continue
            if kind not in tables:
                module = base.get_submodule(form.rotary)
                tables[kind] = extended(rotary_table(module, kind, max_len, like), slots)
            rotary.append(tables[kind])
        return cls(
            spec=spec,
            like=like,
            table=table_of(spec.embedding.table(base)),
            embedding_scale=spec.embedding.scale_for(like.dtype),
            layers=tuple(
                BoundLayer.of(model.get_submodule(form.layer_path(index)), layer)
                for index, layer in enumerate(spec.layers)
            ),
            rotary=tuple(rotary),
            norm=norm,
            head=spec.head.projection.bound(model),
        )


class Arena:
    """Static buffers of up to ``rows`` rows, shared by steps that never run at the same time."""

    def __init__(self, like: torch.Tensor, rows: int) -> None:
        self.rows = rows
        self._like = like
        self._made: dict[tuple[object, ...], torch.Tensor] = {}

    def buffer(self, name: str, columns: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """``[rows, columns]``, the same for the same name and size."""
        key = (name, columns)
        if key not in self._made:
            self._made[key] = self._like.new_zeros(self.rows, columns, dtype=dtype)
        return self._made[key]

    def scratch(self, key: tuple[object, ...], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What ``make`` returned for this key the first time."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @property
    def memory_bytes(self) -> int:
        """Everything made."""
        return sum(t.numel() * t.element_size() for t in self._made.values())


class Step:
    """One token: embedding, five kernels a layer, head, and the choice of the next token.

    Everything it writes was allocated before, so a recording owns no memory and a replay allocates
    nothing. Steps over the first rows of a state share an arena.

    With ``ids [B * T]`` it is the forward of T tokens of every row, from position ``lengths`` on.
    ``history_static`` is False for a step that follows another one in the same recording.
    """

    def __init__(
        self,
        families: Families,
        sampling: ModuleType,
        decoder: BoundDecoder,
        state: StaticState,
        arena: Arena,
        ids: torch.Tensor | None = None,
        *,
        history_static: bool = True,
    ) -> None:
        self.history_static = history_static
        self.ids = state.next_ids if ids is None else ids
        self.families, self.sampling, self.decoder, self.state = families, sampling, decoder, state
        self.arena = arena
        layers, like, buffer = decoder.layers, decoder.like, self._buffer
        size = decoder.table.shape[1]
        hidden = [layer.gate.weight.shape[0] for layer in layers]
        attended = [layer.o.weight.shape[1] for layer in layers]
        streams = (buffer("stream 0", size), buffer("stream 1", size))
        branches = (buffer("branch 0", size), buffer("branch 1", size))
        qkv = {n: buffer("qkv", n) for n in map(_qkv_width, layers)}
        gated = {n: buffer("hidden", n) for n in hidden}
        outs = {n: buffer("attended", n) for n in attended}
        self._moved = buffer("moved", size)
        self.logits = buffer("logits", decoder.head.weight.shape[0], torch.float32)
        self._embedded = streams[0]
        self._buffers = [
            Buffers(streams, qkv[_qkv_width(layer)], branches, gated[n])
            for layer, n in zip(layers, hidden, strict=True)
        ]
        columns = self.logits.shape[1]
        self._scratch = arena.scratch(
            ("choice", columns), lambda: sampling.workspace(arena.rows, columns, like.device)
        )
        self.controls: Controls | None = None
        self._heads = [
            _attend(families.attention, self, index, outs[n]) for index, n in enumerate(attended)
        ]

    def _buffer(self, name: str, columns: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.arena.buffer(name, columns, dtype)[: self.ids.shape[0]]

    def forward(self) -> None:
        """``logits [B * T, V]`` of ``ids``, the first of each row at position ``state.lengths``."""
        decoder = self.decoder
        self.families.linear.embedding(
            self.ids,
            decoder.table,
            scale=decoder.embedding_scale,
            weights_static=True,
            out=self._embedded,
        )
        stream = Stream(self._embedded)
        for layer, heads, buffers in zip(decoder.layers, self._heads, self._buffers, strict=True):
            stream = layer_fused(
                self.families, layer, stream, heads, buffers=buffers, weights_static=True
            )
        self.head(stream, self.logits, weights_static=True)

    def head(self, stream: Stream, logits: torch.Tensor, *, weights_static: bool) -> None:
        """Final norm, vocabulary projection, scale and soft cap into ``logits [M, V]``."""
        spec, head = self.decoder.spec.head, self.decoder.head
        moved = None if stream.branch is None else self._moved[: stream.x.shape[0]]
        self.families.linear.linear(
            stream.x,
            head.weight,
            head.bias,
            **prologue(stream, self.decoder.norm, moved),
            scale=spec.scale,
            soft_cap=spec.soft_cap,
            weights_static=weights_static,
            out_dtype=torch.float32,
            out=logits,
        )

    def choose(self, rows: slice = slice(None)) -> None:
        """Greedy choice from ``logits``: append it, advance, test the stop conditions."""
        state = self.state
        self.sampling.greedy_step(
            self.logits[rows],
            state.tokens[rows],
            state.counts[rows],
            state.lengths[rows],
            state.finished[rows],
            state.next_ids[rows],
            state.eos,
            state.max_new[rows],
            pad_id=STOPPED,
            workspace=self._scratch,
        )

    def draw(self, way: str, rows: slice = slice(None)) -> None:
        """A choice by the rows' controls; everything else as ``choose``."""
        if way == GREEDY:
            self.choose(rows)
            return
        assert self.controls is not None
        state, controls = self.state, self.controls.rows_of(rows)
        self.sampling.sample_step(
            self.logits[rows],
            state.tokens[rows],
            state.counts[rows],
            state.lengths[rows],
            state.finished[rows],
            state.next_ids[rows],
            controls.eos,
            state.max_new[rows],
            **controls.arguments(way),
            pad_id=STOPPED,
            workspace=self.draw_scratch(),
        )

    def draw_scratch(self) -> torch.Tensor:
        """Workspace of draws and log-probabilities of the arena's rows."""
        rows, columns, device = self.arena.rows, self.logits.shape[1], self.logits.device
        make = self.sampling.sample_workspace
        return self.arena.scratch(("draw", columns), lambda: make(rows, columns, device))

    def greedy(self) -> None:
        """One whole greedy step."""
        self.forward()
        self.choose()

    def drawn(self) -> None:
        """One whole step with draws."""
        self.forward()
        self.draw(DRAWN)

    def adjusted(self) -> None:
        """One whole step with penalties, bias and grammars."""
        self.forward()
        self.draw(ADJUSTED)


def _qkv_width(layer: BoundLayer) -> int:
    return sum(part.weight.shape[0] for part in layer.qkv)


def _attend(
    attention: ModuleType, step: Step, index: int, out: torch.Tensor
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """The middle of a layer on the static cache, with everything but q, k and v filled in."""
    layer, table, state = step.decoder.layers[index], step.decoder.rotary[index], step.state
    spec, arena = layer.spec.attention, step.arena
    shape, by_token = (layer.heads, spec.head_dim), (state.batch, step.ids.shape[0] // state.batch)
    arguments = {
        **layer.qk_norms,
        **state.scales[index],
        "scaling": spec.scaling,
        "window": spec.window,
        "soft_cap": spec.soft_cap,
        "history_static": step.history_static,
        "workspace": arena.scratch(
            ("attention", *shape),
            lambda: attention.workspace(arena.rows, 1, *shape, state.slots, out.device),
        ),
        "out": out.view(*by_token, -1, spec.head_dim),
    }
    if table is not None:
        arguments |= {"cos": table[0], "sin": table[1], "rotary": spec.rotary}
    cache = (state.k[index], state.v[index], state.lengths)

    def heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        shaped = (t.unflatten(-1, (-1, spec.head_dim)).unflatten(0, by_token) for t in (q, k, v))
        attention.attend(*shaped, *cache, **arguments)
        return out

    return heads
