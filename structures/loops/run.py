"""A request on captured steps, from its prompts to its last token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from .controls import way_of
from .request import Request
from .sampling import TOP_LOGPROBS
from .session import Session

# Given the tokens ``[B]`` of a step on the host: which rows end with them.
Observe = Callable[[torch.Tensor], torch.Tensor]


class Streamer(Protocol):
    """What transformers calls a streamer."""

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt ``[B, P]``, then the tokens ``[B]`` of each step."""

    def end(self) -> None:
        """No more tokens."""


@dataclass(frozen=True)
class StepLogprobs:
    """Per step: of the chosen ids fp32 ``[N, B]``, the likeliest ids and values ``[N, B, K]``."""

    chosen: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor

    @classmethod
    def empty(cls, session: Session, steps: int) -> StepLogprobs:
        """Room for ``steps`` steps of every row of a session."""
        logits = session.step.logits
        rows, top = logits.shape[0], min(TOP_LOGPROBS, logits.shape[1])
        return cls(
            logits.new_zeros(steps, rows),
            logits.new_zeros(steps, rows, top, dtype=torch.int64),
            logits.new_zeros(steps, rows, top),
        )

    def note(self, session: Session, index: int) -> None:
        """Behind a choice, while the logits are still those that it was made from."""
        step = session.step
        out = (self.chosen[index], self.top_ids[index], self.top[index])
        step.sampling.logprobs(
            step.logits,
            step.state.next_ids,
            top_n=self.top.shape[-1],
            workspace=step.draw_scratch(),
            out=out,
        )


def run_steps(
    session: Session,
    request: Request,
    streamer: Streamer | None = None,
    *,
    observe: Observe | None = None,
    logprobs: StepLogprobs | None = None,
) -> torch.Tensor:
    """All new tokens, int64 ``[B, new]``; the host stays at most one step behind the device.

    A row that ``observe`` ends is padded from there on when ``request.pads_rows``, else it goes on
    until every row has ended.
    """
    way = way_of(request.sampling)
    graph, reports = session.graph(way), session.reports
    session.fill(request)
    session.step.draw(way)
    replay, post, take = graph.replay, reports.post, reports.take
    ended = _Ended(session, request) if observe is not None else None
    reports.begin()
    if logprobs is not None:
        logprobs.note(session, 0)
    post()
    new = 0
    while new < request.max_new:
        if new < request.max_new - 1:
            replay()
            if logprobs is not None:
                logprobs.note(session, new + 1)
            post()
        new += 1
        finished = take()
        if streamer is not None or observe is not None:
            ids = reports.ids(request.pad)[: request.batch]
            if ended is not None:
                ids = ended.padded(ids)
            if streamer is not None:
                streamer.put(ids)
            if observe is not None and ended is not None:
                finished = ended.note(observe(ids), new, reports.finished()) or finished
        if finished:
            break
    tokens = session.state.generated(new, request.pad)[: request.batch]
    return tokens if ended is None else ended.cut(tokens)


class _Ended:
    """Rows that the host has ended, which the device learns a step later."""

    def __init__(self, session: Session, request: Request) -> None:
        self._session, self._request = session, request
        self._rows = torch.zeros(request.batch, dtype=torch.bool, device="cpu")
        self._lengths = [request.max_new] * request.batch

    def padded(self, ids: torch.Tensor) -> torch.Tensor:
        if not self._request.pads_rows:
            return ids
        return ids.masked_fill(self._rows, self._request.pad)

    def note(self, ends: torch.Tensor, new: int, finished: torch.Tensor) -> bool:
        """Rows that end behind ``new`` tokens; whether every row has ended."""
        fresh = ends.cpu() & ~self._rows
        if self._request.pads_rows:
            for row in fresh.nonzero().flatten().tolist():
                self._lengths[row] = new
                self._session.state.finished[row].fill_(True)
        self._rows |= fresh
        return bool((self._rows | finished[: self._request.batch]).all())

    def cut(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens [B, new]`` with padding behind the rows that were ended."""
        column = torch.arange(tokens.shape[1], device=tokens.device)
        lengths = torch.tensor(self._lengths, device="cpu").to(tokens.device)
        return tokens.masked_fill(column >= lengths[:, None], self._request.pad)
