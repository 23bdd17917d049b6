"""One answer on its way to the client: tokens in, text, calls and logprobs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flash_rt.structures.loops.generation import TokenEvent

from .text import Codec, Stops
from .tools import Call, ToolParser


@dataclass
class Piece:
    """What one or more tokens added.

    Attributes:
        finish: as OpenAI names it; None while the answer goes on.
    """

    text: str = ""
    calls: list[Call] = field(default_factory=list)
    tokens: list[TokenEvent] = field(default_factory=list)
    finish: str | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.text or self.calls or self.finish)


class Answer:
    """Tokens of one answer, in the order they came.

    Attributes:
        done: whether the client has all of it.
        tokens: how many there were.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        stops: Sequence[str],
        stop_ids: Sequence[int],
        parser: ToolParser | None,
        keep: Sequence[int] = (),
        one_call: bool = False,
    ) -> None:
        self._decoder, self._stop_ids = codec.decoder(keep), frozenset(stop_ids)
        self._stops, self._parser, self._one_call = Stops(stops), parser, one_call
        self._calls = 0
        self._pending: list[TokenEvent] = []
        self.done, self.tokens = False, 0

    def push(self, event: TokenEvent) -> Piece:
        """What a token adds; its logprobs go with the text that they led to."""
        piece = Piece()
        ended = event.finish_reason
        if event.token_id is not None:
            self.tokens += 1
            if event.token_id not in self._stop_ids:  # a grammar's last token has text
                self._pending.append(event)
                self._add(piece, self._stops.push(self._decoder.push(event.token_id)))
        if self._stops.found is not None:
            self._finish(piece, "stop")
        elif ended is not None and not self.done:
            self._add(piece, self._stops.push(self._decoder.flush()) + self._stops.flush())
            self._finish(piece, "length" if ended == "length" else "stop")
        if not piece.empty:
            piece.tokens, self._pending = self._pending, []
        return piece

    def _add(self, piece: Piece, text: str) -> None:
        if self._parser is None:
            piece.text += text
        elif text:
            self._take(piece, *self._parser.push(text))

    def _take(self, piece: Piece, text: str, calls: list[Call]) -> None:
        if self._one_call and calls:
            calls = calls[: 1 - self._calls] if self._calls == 0 else []
        piece.text += text
        piece.calls += calls
        self._calls += len(calls)
        if self._one_call and self._calls and not self.done:
            self._finish(piece, "tool_calls", flush=False)

    def _finish(self, piece: Piece, reason: str, *, flush: bool = True) -> None:
        if self.done:
            return
        self.done = True
        if flush and self._parser is not None:
            self._take(piece, *self._parser.flush())
        piece.finish = "tool_calls" if self._calls else reason
