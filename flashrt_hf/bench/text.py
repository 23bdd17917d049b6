"""Real text that every Python has: the language reference that ``help()`` prints.

``pydoc_data.topics`` holds several hundred kilobytes of edited English. It differs a little between
Python versions, so a record keeps the text's hash.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def reference_text() -> str:
    """All help topics of this Python, in the order of their names.

    Raises:
        RuntimeError: this Python was packaged without them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise RuntimeError("bench: pydoc_data.topics must be installed with this Python") from error
    return "\n".join(topics[name] for name in sorted(topics))


def digest(text: str) -> str:
    """SHA-256 of ``text`` in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def windows(
    tokenizer: PreTrainedTokenizerBase, text: str, *, rows: int, tokens: int
) -> torch.Tensor:
    """Cut ``text`` into ``[rows, tokens]`` int64 token ids, consecutive windows from its beginning.

    Raises:
        ValueError: the text is shorter than that.
    """
    # Ten characters a token is far more than English needs; tokenizing the rest would be waste.
    ids = tokenizer(text[: 10 * rows * tokens], add_special_tokens=False)["input_ids"]
    if len(ids) < rows * tokens:
        raise ValueError(f"bench: text must have {rows * tokens} tokens, got {len(ids)}")
    return torch.tensor(ids[: rows * tokens], dtype=torch.int64).view(rows, tokens)
