"""Text from tokens: characters over several tokens, stop strings over several tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flash_rt.structures import TextStream

TEXTS = [
    "plain words, and  two spaces ",
    "Grüße aus Köln",
    "日本語のテキスト",
    "mixed 🙂🚀 and ẞ \u200b end",
    "👩‍👩‍👧‍👦 a family is many characters",
    " leading",
    "line\nbreaks\n\n",
]


def byte_level() -> Any:
    """Every byte is a token, written as GPT-2 writes them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def byte_fallback() -> Any:
    """Words of ASCII as SentencePiece writes them, and bytes for everything else."""
    words = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *map(chr, range(33, 127))]
    vocabulary = {word: i for i, word in enumerate(words)}
    raw = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw)


class Pieces:
    """Tokens are runs of bytes that may begin and end inside characters."""

    def __init__(self, text: str, seed: int) -> None:
        rng, data = random.Random(seed), text.encode()
        self.pieces: list[bytes] = []
        while data:
            size = rng.randint(1, 5)
            self.pieces.append(data[:size])
            data = data[size:]

    def decode(self, ids: list[int], **options: Any) -> str:
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


def pieces_of(stream: TextStream, ids: list[int]) -> list[str]:
    return [*(stream.put(i) for i in ids), stream.end()]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", TEXTS)
def test_characters_come_whole(make: Any, text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(TextStream(tokenizer), ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(map(bool, pieces)) >= len(text) - 1  # and each as soon as it is there


@pytest.mark.parametrize("seed", range(20))
def test_tokens_that_begin_and_end_inside_characters(seed: int) -> None:
    text = "".join(TEXTS)
    tokenizer = Pieces(text, seed)
    pieces = pieces_of(TextStream(tokenizer), [*range(len(tokenizer.pieces))])
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_are_no_text_are_shown_and_lost_nowhere() -> None:
    tokenizer = byte_level()
    alphabet = {c: tokenizer.convert_tokens_to_ids(c) for c in pre_tokenizers.ByteLevel.alphabet()}
    broken = [alphabet[c] for c in ("Ł", "Ń", "a", "Ń", "Ń")]
    pieces = pieces_of(TextStream(tokenizer), broken)
    assert "".join(pieces) == tokenizer.decode(broken)
    assert "".join(pieces[:3]).endswith("a")
    assert pieces[-1].count("\ufffd") == 2


@pytest.mark.parametrize(
    ("text", "stop", "before", "met"),
    [
        ("one two three", ["two"], "one ", "two"),
        ("one two three", "three", "one two ", "three"),
        ("aaab and more", ["aab"], "a", "aab"),
        ("abababac", ["ababac"], "ab", "ababac"),
        ("x END y", ["END y", "END"], "x ", "END"),
        ("Grüße", ["üß"], "Gr", "üß"),
        ("go 🚀 on", ["🚀"], "go ", "🚀"),
        ("nothing to stop", ["stopp", "STOP"], "nothing to stop", None),
        ("ends in a part: STO", ["STOP"], "ends in a part: STO", None),
        ("\n\nUser: hi", ["\n\nUser:"], "", "\n\nUser:"),
    ],
)
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_stop_strings_over_tokens(
    make: Any, text: str, stop: Any, before: str, met: str | None
) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(tokenizer, stop=stop)
    shown = ""
    for token_id in ids:
        shown += stream.put(token_id)
        assert before.startswith(shown)
        if stream.stopped is not None:
            break
    shown += stream.end()
    assert (shown, stream.stopped) == (before, met)
    if met is not None:
        assert stream.put(ids[0]) == "" and stream.end() == ""

    keeping = TextStream(tokenizer, stop=stop, keep_stop=True)
    kept = "".join(pieces_of(keeping, ids))
    assert kept == before + (met or "")


def test_special_tokens_are_left_out_unless_wanted() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    ids = [*tokenizer.encode("hi", add_special_tokens=False), tokenizer.eos_token_id]
    assert "".join(pieces_of(TextStream(tokenizer), ids)) == "hi"
    with_them = TextStream(tokenizer, skip_special_tokens=False)
    assert "".join(pieces_of(with_them, ids)) == "hi<end>"


@pytest.mark.parametrize("stop", [("a", ""), "", (3,)])
def test_empty_stop_strings_are_refused(stop: Any) -> None:
    if stop == "":
        stop = ("",)
    with pytest.raises(ValueError, match="stop must be texts that are not empty"):
        TextStream(byte_level(), stop=stop)
