"""The seam between structures, which use kernel families, and flashrt_hf, which finds them.

structures may not import flashrt_hf, so importing ``flash_rt`` puts flashrt_hf's resolver here.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Protocol


class LocalKernelsError(ValueError):
    """LOCAL_KERNELS breaks its rule."""


class Loader(Protocol):
    def __call__(self, name: str, *, version: int) -> ModuleType:
        """The module of kernel family ``flashrt/<name>``; raises when no build is usable."""
        ...


def load_from_library(name: str, *, version: int) -> ModuleType:
    """``kernels.get_kernel`` itself: LOCAL_KERNELS, then the Hub."""
    from kernels import get_kernel

    module: ModuleType = get_kernel(f"flashrt/{name}", version=version)
    return module


def local_overrides() -> dict[str, Path]:
    """The entries of LOCAL_KERNELS, as the ``kernels`` library reads them.

    Raises:
        LocalKernelsError: an entry is not ``repo_id=path``.
    """
    overrides = {}
    for entry in filter(None, os.environ.get("LOCAL_KERNELS", "").split(":")):
        repo_id, separator, path = entry.partition("=")
        if not separator:
            raise LocalKernelsError(f"LOCAL_KERNELS: an entry must be repo_id=path, got {entry!r}")
        overrides[repo_id] = Path(path)
    return overrides


load: Loader = load_from_library
