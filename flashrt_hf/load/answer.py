"""Tokens of one answer to text, for whoever asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flash_rt.structures import TextStream


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
        self._text = TextStream(tokenizer, stop=stop)
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
        for token in value.reshape(-1).tolist():
            wanted = self._send(self._text.put(token))
            if self._text.stopped is not None or not wanted:
                raise AnswerDone

    def end(self) -> None:
        """The text that was held back."""
        self._send(self._text.end())

    def _send(self, text: str) -> bool:
        return self._emit(text) if text else True
