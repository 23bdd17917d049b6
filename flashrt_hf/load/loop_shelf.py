"""The decode loops of one handle, made when they are needed and kept for the next request."""

from __future__ import annotations

import threading
from typing import Any

from torch import nn

from flash_rt import structures

DEFAULT_LEN = 4096  # positions of the first cache where max_len is not given
KEPT = 2  # a conversation, and a batch beside it


class LoopShelf:
    """At most ``KEPT`` loops, one for each number of rows.

    Args:
        draft: see ``structures.decode_loop``.
    """

    def __init__(self, draft: Any = None) -> None:
        self._draft = draft
        self._loops: dict[int, structures.DecodeLoop] = {}
        self._making = threading.Lock()

    def get(
        self, model: nn.Module, *, rows: int, needed: int, max_len: int | None, limit: int | None
    ) -> structures.DecodeLoop:
        """A loop for ``rows`` with room for at least ``needed`` positions.

        Args:
            max_len: what every loop has room for; None lets loops grow in powers of two.
            limit: positions of the model, which a growing loop does not pass.

        Raises:
            ValueError: see ``structures.decode_loop``.
        """
        with self._making:
            loop = self._loops.pop(rows, None)
            if loop is None or loop.max_len < needed:
                grown = max(DEFAULT_LEN, 1 << (needed - 1).bit_length())
                loop = None  # its cache is free before the next one is made
                loop = structures.decode_loop(
                    model,
                    max_len=max_len or min(limit or grown, grown),
                    batch_size=rows,
                    draft=self._draft,
                )
            self._loops[rows] = loop
            for other in list(self._loops)[:-KEPT]:
                del self._loops[other]
            return loop

    def clear(self) -> None:
        """Give every cache back."""
        self._loops.clear()
