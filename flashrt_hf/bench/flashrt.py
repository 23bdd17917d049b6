"""FlashRT as a runner, and what its start costs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from . import models, timing

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FlashRTRunner:
    """``structures.decode_loop`` behind the interface of the peers."""

    def __init__(self, model: PreTrainedModel, *, cache_tokens: int, rows: int = 1) -> None:
        from flash_rt import structures

        self.name = "flashrt"
        self.loop = structures.decode_loop(model, max_len=cache_tokens, batch_size=rows)

    def generate(self, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
        """See ``peers.Runner.generate``."""
        out = self.loop.generate(ids, max_new_tokens=new_tokens)
        return out[:, ids.shape[1] :]
