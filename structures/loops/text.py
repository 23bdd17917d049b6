"""Text from tokens as they come: whole characters only, and up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"  # what decoders show for the bytes of a character that is not complete


class TextStream:
    """Decodes one answer token by token.

    A character whose bytes are spread over tokens is held back until it is complete, and text that
    may still become a stop string until it cannot. The pieces together are the decoded answer, or
    what it has before the first stop string.

    Args:
        tokenizer: of transformers, or any object with ``decode(ids, skip_special_tokens=...)``.
        stop: texts that end the answer, none of them empty; the one that is complete first counts.
        skip_special_tokens: leave control tokens out of the text.
        keep_stop: leave the stop string at the end of the text.

    Raises:
        ValueError: an empty stop string.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop: str | Sequence[str] = (),
        skip_special_tokens: bool = True,
        keep_stop: bool = False,
    ) -> None:
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"TextStream: stop must be texts that are not empty, got {text!r}")
        self._tokenizer, self._skip, self._keep_stop = tokenizer, skip_special_tokens, keep_stop
        self._ids: list[int] = []
        self._start = self._read = 0  # ids before start are done with; those before read are text
        self._shown = 0  # characters taken behind what the ids before read decode to
        self._held = ""
        self.stopped: str | None = None

    def put(self, token_id: int) -> str:
        """Add a token; the text that is certain now, which may be empty.

        ``stopped`` is then the stop string that ends the answer, or None.
        """
        if self.stopped is not None:
            return ""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])[len(before) :]
        whole = _whole(text)
        new, self._shown = whole[self._shown :], max(self._shown, len(whole))
        if len(whole) == len(text) and text:
            self._start, self._read, self._shown = self._read, len(self._ids), 0
        return self._release(new)

    def end(self) -> str:
        """No more tokens: what was held back."""
        if self.stopped is not None:
            return ""
        before = self._decode(self._ids[self._start : self._read])
        rest = self._decode(self._ids[self._start :])[len(before) :][self._shown :]
        self._start = self._read = len(self._ids)
        self._shown = 0
        text = self._release(rest)
        text, self._held = text + self._held, ""
        return text

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )
        return text

    def _release(self, new: str) -> str:
        text = self._held + new
        found = [(at + len(s), at, s) for s in self.stop if (at := text.find(s)) >= 0]
        if found:
            end, at, self.stopped = min(found)
            self._held = ""
            return text[: end if self._keep_stop else at]
        held = max((_overlap(text, s) for s in self.stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _whole(text: str) -> str:
    """``text`` up to a character that may not be complete.

    Decoders of bytes that fall back from SentencePiece show a whole run of bytes as replacements
    while its last character is not complete.
    """
    return text[: text.index(REPLACEMENT)] if text.endswith(REPLACEMENT) else text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
