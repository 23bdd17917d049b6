"""Where structures get their kernels: ``flashrt/<family>`` through ``flash_rt.kernel_loader``.

Which copy that finds (``LOCAL_KERNELS``, a local build, the Hub) is not decided here.
"""

from __future__ import annotations

import functools
from types import ModuleType

from flash_rt import kernel_loader

VERSION = 1


class KernelUnavailable(RuntimeError):
    """A kernel family that a structure needs cannot be loaded; the text says why."""


@functools.cache
def family(name: str) -> ModuleType:
    """The loaded kernel family ``flashrt/<name>``.

    Raises:
        KernelUnavailable: no usable build was found.
    """
    try:
        module = kernel_loader.load(name, version=VERSION)
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        raise KernelUnavailable(
            f"kernel family flashrt/{name} version {VERSION} cannot be loaded: {error}"
        ) from error
    return module


def label(name: str) -> str:
    """How explain names a family: ``"norm v1"``."""
    return f"{name} v{VERSION}"
