"""Greedy decoding of a whole request: prompt, captured steps, stop conditions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ..attach import attach
from ..binding import PLAN
from ..catalogue.base import MAX_FUSED_ROWS
from ..catalogue.layer_math import Families
from ..catalogue.spec import NotThisForm
from ..plan import Plan, host_of
from .decoder import read_decoder
from .request import Request, integer, read_request
from .session import Session, Sessions, decoder_device, plain_tensors, token_table
from .step import BoundDecoder

MAX_BATCH = MAX_FUSED_ROWS  # a decode step has one row for each of a request


class Streamer(Protocol):
    """What transformers calls a streamer."""

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt ``[B, P]``, then the tokens ``[B]`` of each step."""

    def end(self) -> None:
        """No more tokens."""


def decode_loop(model: Any, *, max_len: int, batch_size: int = 1) -> DecodeLoop:
    """A loop that generates from ``model`` with one captured graph a token.

    Args:
        model: a decoder in eval mode on one device, or a handle with ``.model``; attached first
            when it is not yet.
        max_len: most positions of a row, prompt and new tokens together.
        batch_size: most rows of a request, 1 to 8.

    Raises:
        ValueError: a size out of range, or a model that the loop cannot run; the text lists the
            regions that are not bound and why, or says that its rotary does not allow ``max_len``.
            A model that came unattached leaves unattached after any error.
        TypeError: a size that is no integer.
    """
    max_len = integer("decode_loop", "max_len", max_len)
    batch_size = integer("decode_loop", "batch_size", batch_size)
    if not 1 <= batch_size <= MAX_BATCH:
        raise ValueError(f"decode_loop: batch_size must be 1 to {MAX_BATCH}, got {batch_size}")
    host, sessions = open_decoder("decode_loop", model, max_len)
    return DecodeLoop(host, sessions, max_len=max_len, batch_size=batch_size)


def open_decoder(where: str, model: Any, max_len: int) -> tuple[nn.Module, Sessions]:
    """The host, attached where it was not, and sessions of its decoder; see ``decode_loop``."""
    if max_len < 2:
        raise ValueError(f"{where}: max_len must be at least 2, got {max_len}")
    host = host_of(model)
    attached: Plan | None = vars(host).get(PLAN)
    plan = attached or attach(model)
    try:
        known = None if plan.generation is None else plan.generation.spec
        spec = known or read_decoder(host, plan)
        with plain_tensors(decoder_device(host, spec)):
            BoundDecoder.of(host, spec, max_len=max_len, slots=max_len)
    except BaseException as error:
        if attached is None:
            plan.detach()
        if not isinstance(error, NotThisForm):
            raise
        name = type(host).__name__
        raise ValueError(f"{where}: {name} cannot run on the loop: {error}") from None
    return host, Sessions(host, spec, Families.load())


class DecodeLoop:
    """Generates from one model; made by ``decode_loop``."""

    def __init__(
        self, model: nn.Module, sessions: Sessions, *, max_len: int, batch_size: int
    ) -> None:
        self.max_len, self.batch_size = max_len, batch_size
        self._model, self._sessions = model, sessions

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
            input_ids: int64 ``[B, P]``, B at most ``batch_size``; padded on the left.
            attention_mask: ``[B, P]``, 0 at padding; None means no padding.
            max_new_tokens: None fills the cache.
            eos_token_id: a row stops behind one of these; None takes the model's, ``()`` none.
            pad_token_id: fills rows that stopped; None takes the model's, else the first eos.
            streamer: gets the prompt, then the tokens of every step, as in transformers; ``end``
                also when the request fails behind the prompt.

        Returns:
            int64 ``[B, P + new]`` on the device of ``input_ids``.

        Raises:
            ValueError: a prompt that is empty, too long, not padded on the left or of ids outside
                the vocabulary; more rows than ``batch_size``; new tokens beyond ``max_len``.
            TypeError: an option that greedy decoding does not have, by name; an argument of
                another type than asked for.
            LoopRefused: the model has since got a hook, training mode, an adapter or another
                dtype, or the device has no memory for the cache.
        """
        for name, value in unsupported.items():
            raise TypeError(
                f"decode_loop.generate: {name} is not an option, got {value!r}; the loop decodes "
                "greedily, other ways run through model.generate"
            )
        defaults = getattr(self._model, "generation_config", None)
        if eos_token_id is None:
            eos_token_id = getattr(defaults, "eos_token_id", None)
        if pad_token_id is None:
            pad_token_id = getattr(defaults, "pad_token_id", None)
        table = token_table(self._model, self._sessions.spec)
        request = read_request(
            input_ids,
            attention_mask,
            batch_size=self.batch_size,
            max_len=self.max_len,
            max_new=max_new_tokens,
            eos=eos_token_id,
            pad=pad_token_id,
            vocabulary=table.shape[0],
        )
        listening: Streamer | None = None  # from the prompt on, when it is owed an end
        try:
            with (
                plain_tensors(decoder_device(self._model, self._sessions.spec)),
                self._sessions.use(self.batch_size, self.max_len) as session,
            ):
                if streamer is not None:
                    streamer.put(input_ids.cpu())
                    listening = streamer
                new = run_greedy(session, request, streamer)
        finally:
            if listening is not None:
                listening.end()
        return torch.cat([input_ids, new.to(input_ids.device)], dim=1)

    def reset(self) -> None:
        """Give caches and graphs back; the next call makes them again."""
        self._sessions.clear()

    @property
    def memory_bytes(self) -> int:
        """Device memory of caches and buffers held now."""
        return self._sessions.memory_bytes


def run_greedy(session: Session, request: Request, streamer: Streamer | None) -> torch.Tensor:
    """All new tokens, int64 ``[B, new]``; the host stays at most one step behind the device."""
    graph, reports = session.graph("greedy"), session.reports
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
