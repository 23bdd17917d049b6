"""Greedy decoding of a whole request: prompt, captured steps, stop conditions."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from ..capture import Graph, backend_for
from ..catalogue.layer_math import Families
from .cache import StaticState
from .decoder import DecoderSpec
from .prefill import Prefill
from .report import Reports
from .request import Request, read_request
from .step import BoundDecoder, Step, bind_decoder

SLOT_GROUP = 256  # caches are whole groups of the attention kernel's splits
EOS_SLOTS = 8
MAX_BATCH = 8


class Streamer(Protocol):
    """What transformers calls a streamer."""

    def put(self, value: torch.Tensor) -> None: ...

    def end(self) -> None: ...


class Session:
    """One request's state with the graphs recorded on it."""

    def __init__(self, families: Families, decoder: BoundDecoder, *, batch: int, positions: int) -> None:
        table = decoder.table
        self.decoder, self.batch = decoder, batch
        self.state = StaticState(
            decoder.spec,
            batch=batch,
            positions=positions,
            eos_slots=EOS_SLOTS,
            device=table.device,
            dtype=table.dtype,
        )
        self.backend = backend_for(table.device)
        self.pool = self.backend.new_pool()
        self.step = Step(families, decoder, self.state)
        self.prefill = Prefill(families, self.step, self.backend, self.pool)
        self.reports = Reports(self.state.report, batch)
        self._graphs: dict[str, Graph] = {}

    def graph(self, name: str) -> Graph:
        """The recording of ``step.greedy`` or ``step.forward``; made before a request begins."""
        if name not in self._graphs:
            self.state.begin(max_new=1, eos=())
            self._graphs[name] = self.backend.record(getattr(self.step, name), warmups=1, pool=self.pool)
        return self._graphs[name]

    def fill(self, request: Request) -> None:
        """Prompts into the cache, logits of each row's last token into the step's logits."""
        self.state.begin(max_new=request.max_new, eos=request.eos)
        lengths = [0] * self.batch
        for row, ids in enumerate(request.rows()):
            self.prefill.run(row, ids)
            lengths[row] = ids.shape[0] - 1  # choosing the first token advances by one
        self.state.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        self.state.finished[request.batch :] = True

    @property
    def memory_bytes(self) -> int:
        return self.state.memory_bytes + self.step.memory_bytes


class DecodeLoop:
    """Generates from one model; made by ``decode_loop``.

    Calls from several threads wait for each other. A call from inside another one's streamer gets a state of its own,
    so that neither disturbs the other.
    """

    def __init__(
        self, model: nn.Module, spec: DecoderSpec, families: Families, *, max_len: int, batch_size: int
    ) -> None:
        self._model, self._spec, self._families = model, spec, families
        self.max_len, self.batch_size = max_len, batch_size
        self._lock = threading.RLock()
        self._busy = False
        self._session: Session | None = None

    @torch.no_grad()
    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        streamer: Streamer | None = None,
        **unsupported: Any,
    ) -> torch.Tensor:
        """Continue every prompt greedily.

        Args:
            input_ids: int64 ``[B, P]``, B at most ``batch_size``; shorter prompts are padded on the left.
            attention_mask: ``[B, P]``, 0 at padding; None means no padding.
            max_new_tokens: None fills the cache.
            eos_token_id: a row stops behind one of these; None takes the model's, ``()`` never stops.
            pad_token_id: what follows in a row that stopped; None takes the model's, else the first of eos.
            streamer: gets the prompt and then every token, as from transformers' ``generate``.

        Returns:
            int64 ``[B, P + new]`` on the device of ``input_ids``.

        Raises:
            ValueError: a prompt that is empty, too long, not padded on the left, or more rows than ``batch_size``.
            TypeError: an option that greedy decoding does not have, by name.
        """
        request = read_request(
            self,
            input_ids,
            attention_mask,
            max_new=max_new_tokens,
            eos=eos_token_id,
            pad=pad_token_id,
            defaults=getattr(self._model, "generation_config", None),
            unsupported=unsupported,
        )
        if streamer is not None:
            streamer.put(request.input_ids.cpu())
        with self._use() as session:
            new = run_greedy(session, request, streamer)
        if streamer is not None:
            streamer.end()
        return torch.cat([input_ids, new.to(input_ids.device)], dim=1)

    def reset(self) -> None:
        """Give caches and graphs back; the next call makes them again."""
        with self._lock:
            self._session = None

    @property
    def memory_bytes(self) -> int:
        """Device memory of caches and buffers held now."""
        return 0 if self._session is None else self._session.memory_bytes

    @contextmanager
    def _use(self) -> Iterator[Session]:
        with self._lock:
            if self._busy:
                yield self._new_session()
                return
            self._busy = True
            try:
                yield self._current_session()
            finally:
                self._busy = False

    def _current_session(self) -> Session:
        session = self._session
        if session is None or session.decoder.addresses() != self._bind().addresses():
            self._session = session = self._new_session()
        return session

    def _bind(self) -> BoundDecoder:
        return bind_decoder(self._model, self._spec, self.positions)

    def _new_session(self) -> Session:
        return Session(self._families, self._bind(), batch=self.batch_size, positions=self.positions)

    @property
    def positions(self) -> int:
        """Slots of the cache: ``max_len`` in whole groups."""
        return -(-self.max_len // SLOT_GROUP) * SLOT_GROUP


def run_greedy(session: Session, request: Request, streamer: Streamer | None) -> torch.Tensor:
    """All new tokens, int64 ``[B, new]``; the host stays at most one step behind the device."""
    graph = session.graph("greedy")
    reports = session.reports
    session.fill(request)
    session.step.choose()
    replay, post, take = graph.replay, reports.post, reports.take
    reports.begin()
    post()
    new = 0
    while new < request.max_new:
        if new < request.max_new - 1:
            replay()
            post()
        new += 1
        finished = take()
        if streamer is not None:
            streamer.put(reports.ids(request.pad)[: request.batch])
        if finished:
            break
    return session.state.generated(new, request.pad)[: request.batch]
