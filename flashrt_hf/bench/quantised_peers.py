"""Peers with weight-only quantisation by torchao, compiled as the fastest plain peer is.

Their weights are copies, so they need memory beside the model's. The vocabulary projection is
quantised with the other linear layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import models

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FP8, INT4 = "torchao-fp8", "torchao-int4"
QUANTISED_PEERS = (FP8, INT4)
MODE = "max-autotune"


def is_quantised(name: str) -> bool:
    """Whether a peer's weights have fewer bits than the model's."""
    return name in QUANTISED_PEERS


def check(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise where the peer ``name`` cannot run.

    Raises:
        ValueError: torchao is not installed; int4 on another device than CUDA, or not in BF16.
    """
    try:
        import torchao.quantization  # noqa: F401
    except ImportError as error:
        raise ValueError(f"bench: peer {name!r} needs the package torchao: {error}") from None
    if name == INT4 and (device.type != "cuda" or dtype is not torch.bfloat16):
        raise ValueError(
            f"bench: peer {name!r} must run in bfloat16 on CUDA, got {dtype} on {device}"
        )


def quantised(name: str, model: PreTrainedModel) -> PreTrainedModel:
    """A twin of ``model`` with the linear weights of the peer ``name``.

    ``torchao-fp8``: E4M3, one scale for each output channel. ``torchao-int4``: four bits, one scale
    and zero for 128 inputs, in the layout of torch's own int4 product.

    Raises:
        ValueError: as ``check``.
    """
    check(name, model.device, model.dtype)
    from torchao.quantization import Float8WeightOnlyConfig, Int4WeightOnlyConfig, quantize_

    config: Any = Float8WeightOnlyConfig()
    if name == INT4:
        config = Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d")
    twin = models.alias(model)
    quantize_(twin, config)
    return twin
