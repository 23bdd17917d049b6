"""FlashRT: one request, fast, on one GPU.

``flash_rt.structures`` attaches fused kernels to unmodified models; ``flash_rt.flashrt_hf`` is the
product on top of it, and ``flash_rt.load_model`` its front door. Importing this package makes the
local kernel builds visible to the ``kernels`` library of this process, and quantised checkpoints
readable by transformers and diffusers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from flash_rt import cache_folder, kernel_loader
from flash_rt.flashrt_hf import settings
from flash_rt.flashrt_hf.kernels import resolver
from flash_rt.flashrt_hf.quantization import registration

if TYPE_CHECKING:
    from flash_rt import flashrt_hf, structures
    from flash_rt.flashrt_hf.load import load_model
    from flash_rt.flashrt_hf.quantization import FlashRTConfig

__version__ = "0.1.0"
__all__ = ["FlashRTConfig", "__version__", "flashrt_hf", "load_model", "structures"]

_SUBMODULES = ("flashrt_hf", "structures")

resolver.set_local_kernels()
kernel_loader.load = resolver.load
cache_folder.get = settings.cache_folder
registration.register()


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return importlib.import_module(f"flash_rt.{name}")
    if name == "load_model":
        return importlib.import_module("flash_rt.flashrt_hf.load").load_model
    if name == "FlashRTConfig":
        return importlib.import_module("flash_rt.flashrt_hf.quantization.config").FlashRTConfig
    raise AttributeError(f"module 'flash_rt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
