"""compressed-tensors: FP8, INT8 and NVFP4 weights.

Source: compressed-tensors 0.20, ``config/base.py`` and ``compressors/``: the names of the tensors,
and that values are ``x * (scale / global_scale)``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from .scales import BLOCK, FP8, eight_bit, fp8_data, nvfp4
from .tensor import PackedTensor

NAMES = (
    *("weight", "weight_packed", "weight_scale", "weight_global_scale"),
    *("weight_zero_point", "weight_shape", "weight_g_idx"),
    *("input_scale", "input_zero_point", "input_global_scale"),
)
_FORMATS = (
    *("float-quantized", "int-quantized", "naive-quantized", "nvfp4-pack-quantized"),
    *("pack-quantized", "mixed-precision", "dense"),
)
_BLOCKS = ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}")
_EIGHT_BIT_STRATEGIES = ("tensor", "channel", "block")


def precision(config: Mapping[str, Any]) -> str:
    """``fp8``, ``int8`` or ``nvfp4``, of the first group of layers.

    Raises:
        ValueError: a scheme that packed weights cannot hold.
    """
    groups = config.get("config_groups") or {}
    formats = {config.get("format"), *(group.get("format") for group in groups.values())}
    for name in sorted(str(f) for f in formats - {None}):
        if name not in _FORMATS:
            raise _refusal(f"format must be one of {', '.join(_FORMATS)}", name)
    if config.get("quantization_status") not in ("compressed", None):
        raise _refusal("quantization_status must be 'compressed'", config["quantization_status"])
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _refusal("sparsity_config must be dense", config["sparsity_config"]["format"])
    if (config.get("transform_config") or {}).get("config_groups"):
        raise _refusal("transform_config must be empty", sorted(config["transform_config"]))
    if config.get("kv_cache_scheme"):
        warnings.warn(
            "flashrt: the checkpoint's kv_cache_scheme is not read; the cache keeps the model's "
            "dtype unless attach is given kv_cache=",
            stacklevel=2,
        )
    found = [_scheme(group.get("weights")) for group in groups.values()]
    if not found:
        raise _refusal("config_groups must name a scheme", "none")
    return found[0]


def _scheme(weights: Mapping[str, Any] | None) -> str:
    """The precision of one group's weights."""
    if weights is None:
        raise _refusal("every group must have quantised weights", "a group without")
    bits, kind = weights.get("num_bits"), weights.get("type")
    strategy, group = weights.get("strategy"), weights.get("group_size")
    symmetric = weights.get("symmetric", True)
    blocks_fit = strategy != "block" or weights.get("block_structure") in _BLOCKS
    if bits == 8 and kind == "float" and strategy in _EIGHT_BIT_STRATEGIES and blocks_fit:
        return "fp8"
    if bits == 8 and kind == "int" and strategy in _EIGHT_BIT_STRATEGIES[:2] and symmetric:
        return "int8"
    if bits == 4 and kind == "float" and strategy == "tensor_group" and group == 16:
        return "nvfp4"
    described = f"{bits}-bit {kind} by {strategy}" + (f" of {group}" if group else "")
    if not symmetric:
        described += ", asymmetric"
    raise _refusal(
        "weights must be 8-bit float by tensor, channel or block of 128x128, 8-bit int by tensor "
        "or channel, or 4-bit float by groups of 16 (NVFP4)",
        described,
    )


def _refusal(rule: str, value: object) -> ValueError:
    return ValueError(f"flashrt: a compressed-tensors checkpoint's {rule}, got {value}")


def read(
    tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> PackedTensor | None:
    """See ``foreign.Format``."""
    if "weight_scale" not in tensors:
        return None
    zero = tensors.get("weight_zero_point")
    if zero is not None and bool((zero.float() != 0).any()):
        raise ValueError("weight_zero_point must be 0: the kernels are symmetric")
    scale = tensors["weight_scale"]
    if "weight_global_scale" in tensors:
        whole = tensors["weight_global_scale"].float()
        return nvfp4(
            *(tensors["weight_packed"], scale.to(FP8), shape, dtype),
            scale=1.0 / whole,
            theirs=lambda numbers, blocks: numbers * (blocks / whole),
        )
    data = tensors.get("weight")
    if data is None:
        data = _unpacked(tensors["weight_packed"], shape)
    if data.dtype != torch.int8:
        data = fp8_data(data, shape)
    elif tuple(data.shape) != shape:
        raise ValueError(f"weight must have shape {shape}, got {tuple(data.shape)}")
    static = tensors.get("input_scale") if data.dtype == FP8 else None
    return eight_bit(data, scale, dtype, static)


def _unpacked(packed: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """INT8 out of int32 words of four, each value stored plus 128, the first lowest."""
    if packed.dtype != torch.int32 or tuple(packed.shape) != (shape[0], -(-shape[1] // 4)):
        raise ValueError(
            f"weight_packed of 8-bit values {shape} must be int32 {(shape[0], -(-shape[1] // 4))}, "
            f"got {packed.dtype} {tuple(packed.shape)}"
        )
    values = packed.contiguous().view(torch.uint8)[:, : shape[1]]
    return (values.to(torch.int16) - 128).to(torch.int8)
