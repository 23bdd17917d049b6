"""An answer of the engine on its way into the cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .answer import Answer
from .cache import EOS_SLOTS
from .session import Session
from .staging import on_device

CHUNK = 512  # tokens of a prompt between two steps: what running answers wait at most


QUEUED_CHUNKS = 2  # so many keep a device busy


class Event(Protocol):
    """A place in the device's work, as ``torch.cuda.Event``."""

    def record(self) -> None:
        """Here."""

    def synchronize(self) -> None:
        """Wait until the device has come there."""


class Pace:
    """Keeps the host from queueing a whole prompt, behind which all who come would wait."""

    def __init__(self, event: Callable[[], Event] | None) -> None:
        """``event`` makes one; None on a device that queues nothing."""
        self._make = event
        self._queued: deque[Event] = deque()

    @classmethod
    def of(cls, device: torch.device) -> Pace:
        """The pace of a device."""
        return cls(torch.cuda.Event if device.type == "cuda" else None)

    def before(self) -> None:
        """Wait until there is room for a chunk."""
        while len(self._queued) >= QUEUED_CHUNKS:
            self._queued.popleft().synchronize()

    def behind(self) -> None:
        """A chunk was queued."""
        if self._make is not None:
            event = self._make()
            event.record()
            self._queued.append(event)


@dataclass(eq=False)
class Joining:
    """An answer whose prompt is being read into ``row``; ``logits`` where they are known."""

    session: Session
    answer: Answer
    row: int
    epoch: int
    logits: torch.Tensor | None = None

    @classmethod
    def begin(cls, session: Session, answer: Answer, free: Sequence[int]) -> Joining:
        """Take one of the ``free`` rows, with what it can use of earlier requests."""
        match = session.prefixes.match(answer.prompt, free, reuse=answer.request.reuse_prefix)
        if match.source != match.row:
            session.copy_positions(match.source, match.row, match.length)
        session.prefixes.drop([match.row])
        answer.filled = match.length
        made = cls(session, answer, match.row, session.prefixes.epoch, match.logits)
        made._hold()
        return made

    def read(self) -> bool:
        """The next chunk of the prompt; whether all of it has been read."""
        answer, session = self.answer, self.session
        if session.prefixes.epoch != self.epoch:  # what was read is of other weights
            answer.filled, self.logits, self.epoch = 0, None, session.prefixes.epoch
        part = answer.prompt[answer.filled : answer.filled + CHUNK]
        if part:
            last = answer.filled + len(part) == len(answer.prompt)
            session.prefill.chunk(self.row, self._ids(part), answer.filled, last=last)
        answer.filled += len(part)
        self._hold()
        return answer.filled == len(answer.prompt)

    def choose(self, *, controlled: bool) -> None:
        """The first token of the answer.

        ``controlled``: the row's settings are read even where it takes the likeliest.
        """
        answer, session, row = self.answer, self.session, self.row
        prompt, logits = answer.prompt, session.step.logits[row]
        if self.logits is not None:
            logits.copy_(self.logits)
        session.prefixes.drop([row])
        if answer.request.reuse_prefix:
            kept = logits.clone() if self.logits is None else self.logits
            session.prefixes.hold(row, prompt, prompt=len(prompt), logits=kept)
            answer.epoch = session.prefixes.epoch
        session.begin_row(row, length=len(prompt), max_new=answer.limit)
        if controlled:
            penalised = answer.sampling.penalised
            session.controls.set_row(
                row,
                answer.sampling,
                seed=answer.seed,
                stops=answer.stops[:EOS_SLOTS],
                prompt=self._ids(prompt if penalised else ()),
            )
        if answer.request.mask is not None:
            answer.mask = answer.request.mask()
            session.controls.allow(row, answer.mask.allowed())
        session.choose_row(row, answer.way)

    def leave(self) -> None:
        """Nobody wants it any more; what was read may serve the same prompt later."""
        if not self.answer.request.reuse_prefix:
            self.session.prefixes.drop([self.row])

    def _hold(self) -> None:
        """What has been read counts, should the row change places."""
        held = self.answer.prompt[: self.answer.filled]
        if held:
            self.session.prefixes.hold(self.row, held, prompt=len(held))

    def _ids(self, ids: Sequence[int]) -> torch.Tensor:
        return on_device(ids, torch.int64, self.session.state.tokens.device)
