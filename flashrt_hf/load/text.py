"""Token ids to text, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

UNFINISHED = (
    "\N{REPLACEMENT CHARACTER}"  # what a decoder shows for bytes that make no character yet
)


class Detokenizer:
    """Turns the tokens of one sequence into text; the pieces joined are the text of the whole.

    A piece is held back while the last token ends inside a character. What a token looks like may
    depend on the one before it (a leading space), so both are decoded together.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._begin = self._shown = 0

    def add(self, ids: Sequence[int]) -> str:
        """The text that further tokens complete."""
        self._ids += ids
        text = self._new()
        if not text or text.endswith(UNFINISHED):
            return ""
        self._begin, self._shown = self._shown, len(self._ids)
        return text

    def rest(self) -> str:
        """What was held back, at the end."""
        text = self._new()
        self._begin = self._shown = len(self._ids)
        return text

    def _new(self) -> str:
        shown = self._decode(self._ids[self._begin : self._shown])
        return self._decode(self._ids[self._begin :])[len(shown) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


class StopText:
    """Passes text on until one of several strings is complete, which it leaves out."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """What of the text so far cannot be the beginning of a stop string any more."""
        self._held += text
        ends = [i for i in (self._held.find(s) for s in self._strings) if i >= 0]
        if ends:
            self.found = True
            text, self._held = self._held[: min(ends)], ""
            return text
        keep = max((self._overlap(s) for s in self._strings), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def rest(self) -> str:
        """What was held back, at the end."""
        text, self._held = self._held, ""
        return text

    def _overlap(self, string: str) -> int:
        """Length of the longest end of the held text that begins ``string``."""
        most = min(len(self._held), len(string) - 1)
        return next((n for n in range(most, 0, -1) if string.startswith(self._held[-n:])), 0)


class AnswerDone(Exception):
    """Raised out of ``Answer.put`` to end a generation whose text is complete or not wanted."""


class Answer:
    """A streamer, as loops and transformers take one, that hands text to ``emit``.

    Args:
        tokenizer: of the model.
        emit: gets every piece that is not empty; returns whether more is wanted.
        stop: strings that end the answer and are left out.
    """

    def __init__(
        self, tokenizer: Any, emit: Callable[[str], bool], *, stop: Sequence[str] = ()
    ) -> None:
        self._detokenizer, self._stop = Detokenizer(tokenizer), StopText(stop)
        self._emit = emit
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """The prompt, which is skipped, then the tokens of one sequence.

        Raises:
            AnswerDone: a stop string is complete, or the text is not wanted any more.
        """
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        wanted = self._send(self._stop.add(self._detokenizer.add(value.reshape(-1).tolist())))
        if self._stop.found or not wanted:
            raise AnswerDone

    def end(self) -> None:
        """The text that was held back."""
        if not self._stop.found:
            self._send(self._stop.add(self._detokenizer.rest()))
        if not self._stop.found:
            self._send(self._stop.rest())

    def _send(self, text: str) -> bool:
        return self._emit(text) if text else True
