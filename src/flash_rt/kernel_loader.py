"""The seam between structures, which use kernel families, and flashrt_hf, which finds them.

structures may not import flashrt_hf, so importing ``flash_rt`` puts flashrt_hf's resolver here.
"""

from __future__ import annotations

from types import ModuleType
from typing import Protocol


class Loader(Protocol):
    def __call__(self, name: str, *, version: int) -> ModuleType:
        """The module of kernel family ``flashrt/<name>``; raises when no build is usable."""
        ...


def load_from_library(name: str, *, version: int) -> ModuleType:
    """``kernels.get_kernel`` itself: LOCAL_KERNELS, then the Hub."""
    from kernels import get_kernel

    module: ModuleType = get_kernel(f"flashrt/{name}", version=version)
    return module


load: Loader = load_from_library
