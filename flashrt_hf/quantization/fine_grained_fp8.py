"""transformers' fine-grained FP8: blocks of 128 x 128, as DeepSeek publishes its weights.

Source: transformers, ``integrations/finegrained_fp8.py``: values are ``x * weight_scale_inv``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .scales import BLOCK, eight_bit, fp8_data
from .tensor import PackedTensor

NAMES = ("weight", "weight_scale_inv", "activation_scale")


def precision(config: Mapping[str, Any]) -> str:
    """``fp8``.

    Raises:
        ValueError: another block.
    """
    block = config.get("weight_block_size", [BLOCK, BLOCK])
    if block is not None and [*block] != [BLOCK, BLOCK]:
        raise ValueError(
            f"flashrt: a fine-grained FP8 checkpoint's weight_block_size must be "
            f"[{BLOCK}, {BLOCK}] or null, got {block}"
        )
    return "fp8"


def read(
    tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> PackedTensor | None:
    """See ``foreign.Format``."""
    if "weight_scale_inv" not in tensors:
        return None
    weight = fp8_data(tensors["weight"], shape)
    scale = tensors["weight_scale_inv"]
    if scale.dtype == torch.uint8:
        raise ValueError("weight_scale_inv must be floating-point, got uint8 (MXFP8)")
    return eight_bit(weight, scale, dtype, tensors.get("activation_scale"))
