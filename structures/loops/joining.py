"""An answer of the engine on its way into the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .answer import Answer
from .cache import EOS_SLOTS
from .session import Session

CHUNK = 512  # tokens of a prompt between two steps: what running answers wait at most


@dataclass(frozen=True)
class Joining:
    """An answer whose prompt is being read into ``row``."""

    session: Session
    answer: Answer
    row: int

    @classmethod
    def begin(cls, session: Session, answer: Answer, free: Sequence[int]) -> Joining:
        """Take one of the ``free`` rows, with what it can use of earlier requests."""
        match = session.prefixes.match(answer.prompt, free, reuse=answer.request.reuse_prefix)
        if match.source != match.row:
            session.copy_positions(match.source, match.row, match.length)
        session.prefixes.drop([match.row])
        if match.logits is not None:
            session.step.logits[match.row].copy_(match.logits)
        answer.filled = match.length
        return cls(session, answer, match.row)

    def read(self) -> bool:
        """The next chunk of the prompt; whether all of it has been read."""
        answer, session = self.answer, self.session
        part = answer.prompt[answer.filled : answer.filled + CHUNK]
        if part:
            last = answer.filled + len(part) == len(answer.prompt)
            session.prefill.chunk(self.row, self._ids(part), answer.filled, last=last)
        answer.filled += len(part)
        return answer.filled == len(answer.prompt)

    def choose(self, *, controlled: bool) -> None:
        """The first token of the answer.

        ``controlled``: the row's settings are read even where it takes the likeliest.
        """
        answer, session, row = self.answer, self.session, self.row
        prompt = answer.prompt
        if answer.request.reuse_prefix:
            logits = session.step.logits[row].clone()
            session.prefixes.hold(row, prompt, prompt=len(prompt), logits=logits)
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
        if self.answer.filled and self.answer.request.reuse_prefix:
            held = self.answer.prompt[: self.answer.filled]
            self.session.prefixes.hold(self.row, held, prompt=len(held))

    def _ids(self, ids: Sequence[int]) -> torch.Tensor:
        found = torch.tensor(ids, dtype=torch.int64, device="cpu")
        return found.to(self.session.state.tokens.device)
