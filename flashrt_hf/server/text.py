"""Text into token ids and back, a token at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from llguidance import LLTokenizer
from tokenizers.decoders import DecodeStream

BROKEN = "\ufffd"  # what decoders put for bytes that are no UTF-8


class Codec:
    """A fast tokenizer of transformers as the server needs it.

    Attributes:
        stop_ids: tokens that end an answer.
        vocabulary: how many ids the model has logits for.
    """

    def __init__(self, tokenizer: Any, *, stop_ids: Iterable[int], vocabulary: int) -> None:
        """Read the tokenizer once.

        Raises:
            ValueError: it is not a fast one.
        """
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"serve: the tokenizer must be a fast one, got {type(tokenizer).__name__}"
            )
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self.stop_ids = tuple(dict.fromkeys(stop_ids))
        self.backend = tokenizer.backend_tokenizer
        added = self.backend.get_added_tokens_decoder()
        self.special = frozenset(i for i, token in added.items() if token.special)
        self.special |= frozenset(tokenizer.all_special_ids) | frozenset(self.stop_ids)
        from llguidance.hf import from_tokenizer

        self.grammar_tokenizer: LLTokenizer = from_tokenizer(
            tokenizer, eos_token=list(self.stop_ids) or None
        )

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, with the special tokens that the tokenizer puts around it."""
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; a special token's are those of its name."""
        if token in self.special or token >= self.grammar_tokenizer.vocab_size:
            return str(self.backend.id_to_token(token) or f"<{token}>").encode()
        return bytes(self.grammar_tokenizer.decode_bytes([token]))

    def special_id(self, text: str) -> int | None:
        """Id of the special token with this name, None where the text is ordinary."""
        token = self.backend.token_to_id(text)
        return token if token in self.special else None

    def decoder(self, keep: Collection[int] = ()) -> Decoder:
        """For one answer; special tokens have no text, but for those in ``keep``."""
        return Decoder(self, self.special - frozenset(keep))


class Decoder:
    """Text of a growing list of tokens; together its pieces are the text of the whole list."""

    def __init__(self, codec: Codec, silent: frozenset[int]) -> None:
        self._backend, self._silent = codec.backend, silent
        self._vocabulary = codec.backend.get_vocab_size(with_added_tokens=True)
        self._stream = DecodeStream(skip_special_tokens=False)
        self._held: list[int] = []  # tokens that end within a character

    def push(self, token: int) -> str:
        """Text that is certain now; empty within a character."""
        if token in self._silent or token >= self._vocabulary:
            return ""
        self._held.append(token)
        piece = self._stream.step(self._backend, token)
        if piece is None:
            return ""
        self._held.clear()
        return str(piece)

    def flush(self) -> str:
        """What a last, incomplete character shows."""
        held, self._held = self._held, []
        return str(self._backend.decode(held, skip_special_tokens=False)) if held else ""


class Stops:
    """Cuts a text in front of the first stop string, wherever tokens end."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = tuple(stops), ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Text that no stop string can begin in; nothing more behind one."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        places = [(self._held.find(stop), stop) for stop in self._stops]
        hits = [(place, stop) for place, stop in places if place >= 0]
        if hits:
            place, self.found = min(hits)
            done, self._held = self._held[:place], ""
            return done
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        done, self._held = self._held[:cut], self._held[cut:]
        return done

    def flush(self) -> str:
        """What was held back and turned out to be no stop string."""
        done, self._held = self._held, ""
        return done


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that ``marker`` begins with, short of all of it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
