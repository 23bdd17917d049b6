"""Tokenizer and processor of a checkpoint, where it has any."""

from __future__ import annotations

from typing import Any

from .source import Source

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


class Unavailable:
    """Stands for a processor that cannot be made here; using it raises the reason."""

    def __init__(self, reason: ImportError) -> None:
        self.reason = reason


def load_tokenizer(source: Source, *, remote_code: bool) -> Any:
    """The checkpoint's tokenizer; None where it has no files of one."""
    from transformers import AutoTokenizer

    if source.gguf and not _any(source, TOKENIZER_FILES):
        return AutoTokenizer.from_pretrained(source.folder, gguf_file=source.gguf)
    if not _any(source, TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(source.folder, trust_remote_code=remote_code)


def load_processor(source: Source, *, remote_code: bool) -> Any:
    """The checkpoint's processor; None where it has no files of one.

    One that needs a package which is not installed becomes ``Unavailable``: text runs without it.
    """
    from transformers import AutoProcessor

    if not _any(source, PROCESSOR_FILES):
        return None
    try:
        return AutoProcessor.from_pretrained(source.folder, trust_remote_code=remote_code)
    except ImportError as error:
        return Unavailable(error)


def _any(source: Source, names: tuple[str, ...]) -> bool:
    return any((source.folder / name).is_file() for name in names)
