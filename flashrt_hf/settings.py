"""Environment variables, declared once: name, type, default, meaning."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from flash_rt.cache_folder import user_cache

T = TypeVar("T")


class SettingError(ValueError):
    """An environment variable breaks its rule; names variable, rule and text."""


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One environment variable. ``parse`` raises ValueError with the rule a value broke."""

    name: str
    parse: Callable[[str], T]
    default: T
    help: str

    def get(self) -> T:
        """Value of the variable, or the default where it is unset or empty.

        Raises:
            SettingError: the text is not a valid value.
        """
        text = os.environ.get(self.name, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise SettingError(f"{self.name}: {error}, got {text!r}") from None


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("must be 0 or 1")
    return text == "1"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ValueError("must be a positive integer")
    return int(text)


def _directory(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise ValueError("must be an existing directory")
    return path.resolve()


def _path(text: str) -> Path:
    return Path(text).resolve()


KERNEL_BUILDS = Setting[Path | None](
    "FLASH_RT_KERNEL_BUILDS",
    _path,
    None,
    "folder of local kernel builds; default build/kernels of the checkout",
)
CUDA_HOME = Setting[Path | None](
    "CUDA_HOME", _directory, None, "CUDA toolkit whose bin/nvcc compiles kernels; default: search"
)
MAX_JOBS = Setting[int](
    "MAX_JOBS", _positive, os.cpu_count() or 1, "compilations at a time; default: the processors"
)
REQUIRE_GPU = Setting[bool](
    "FLASH_RT_REQUIRE_GPU", _flag, False, "1: a test that cannot find its GPU fails"
)
API_KEY = Setting[str | None](
    "FLASH_RT_API_KEY", str, None, "key that opens flash-rt serve, where --api-key is not given"
)
CACHE = Setting[Path | None](
    "FLASH_RT_CACHE",
    _path,
    None,
    "folder of calibration statistics; default flash_rt in XDG_CACHE_HOME or ~/.cache",
)

SETTINGS = (KERNEL_BUILDS, CUDA_HOME, MAX_JOBS, REQUIRE_GPU, API_KEY, CACHE)


def cache_folder() -> Path:
    """Where calibration statistics are cached."""
    return CACHE.get() or user_cache()
