"""Tokens of one answer to text, for whoever asked."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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


def in_pieces(run: Callable[[Callable[[str], bool]], None]) -> Iterator[str]:
    """What ``run`` hands to the function that it gets, piece by piece as it comes.

    ``run`` works in a thread of its own. The function returns False once the iterator is closed,
    which waits for ``run`` to end; what ``run`` raises is raised behind the last piece.
    """
    pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    closed = threading.Event()

    def emit(text: str) -> bool:
        pieces.put(text)
        return not closed.is_set()

    with ThreadPoolExecutor(1, thread_name_prefix="flash_rt stream") as thread:
        request = thread.submit(run, emit)
        request.add_done_callback(lambda _: pieces.put(None))
        try:
            while (piece := pieces.get()) is not None:
                yield piece
        finally:
            closed.set()
        request.result()
