"""NVIDIA ModelOpt: FP8 and NVFP4 weights of its unified Hugging Face checkpoints.

Source: TensorRT Model Optimizer, ``torch/export/quant_utils.py`` and
``torch/quantization/qtensor/nvfp4_tensor.py``: the names of the tensors, and that NVFP4 values are
``x * (weight_scale * weight_scale_2)``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .scales import FP8, eight_bit, fp8_data, nvfp4
from .tensor import PackedTensor

NAMES = ("weight", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")
FILE = "hf_quant_config.json"
_PRECISIONS = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_PB_WO": "fp8",
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
}


def from_file(folder: Path) -> dict[str, Any] | None:
    """The configuration in ``hf_quant_config.json``, as ``config.json`` has it since; or None.

    Raises:
        ValueError: the file is no JSON object with a ``quantization``.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["quantization"]
        return {"quant_method": "modelopt", **found}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"flashrt: {path} must describe a quantization: {error!r}") from error


def precision(config: Mapping[str, Any]) -> str:
    """``fp8`` or ``nvfp4``.

    Raises:
        ValueError: another algorithm.
    """
    name = config.get("quant_algo") or (config.get("quantization") or {}).get("quant_algo")
    if name not in _PRECISIONS:
        raise ValueError(
            f"flashrt: a ModelOpt checkpoint's quant_algo must be one of "
            f"{', '.join(_PRECISIONS)}, got {name}"
        )
    if config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme"):
        warnings.warn(
            "flashrt: the checkpoint's scales of the KV cache are not read; the cache keeps the "
            "model's dtype unless attach is given kv_cache=",
            stacklevel=2,
        )
    return _PRECISIONS[name]


def read(
    tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> PackedTensor | None:
    """See ``foreign.Format``."""
    if "weight_scale" not in tensors:
        return None
    if "pre_quant_scale" in tensors:
        raise ValueError("pre_quant_scale (AWQ) must be absent: the kernels do not scale inputs")
    weight, scale = tensors["weight"], tensors["weight_scale"]
    if weight.dtype == torch.uint8:
        if "weight_scale_2" not in tensors:
            raise ValueError(f"NVFP4 must be stored with weight_scale_2, got {sorted(tensors)}")
        whole = tensors["weight_scale_2"].float().reshape(1)
        return nvfp4(
            *(weight, scale.to(FP8), shape, dtype),
            scale=whole,
            theirs=lambda numbers, blocks: numbers * (blocks * whole),
        )
    return eight_bit(fp8_data(weight, shape), scale, dtype, tensors.get("input_scale"))
