"""Makes transformers and diffusers know ``quant_method`` "flashrt", without importing either.

Both keep tables of their quantizers in ``quantizers/auto.py``. Entries are added there as soon as
that module has been imported, by whomever; what the entries need is imported when they are used.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

METHOD = "flashrt"
_HERE = __name__.rpartition(".")[0]
# Module that has the tables, and the module and class of ours that it gets as quantizer.
_TABLES = {
    "transformers.quantizers.auto": ("transformers_quantizer", "FlashRTQuantizer"),
    "diffusers.quantizers.auto": ("diffusers_quantizer", "FlashRTDiffusersQuantizer"),
}


def register() -> None:
    """Add the entries now where the tables exist, and otherwise when they will; safe to repeat."""
    for name in _TABLES:
        module = sys.modules.get(name)
        if module is not None:
            _fill(module)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _fill(module: ModuleType) -> None:
    place, name = _TABLES[module.__name__]

    def made(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(f"{_HERE}.{place}"), name)(*args, **kwargs)

    module.AUTO_QUANTIZER_MAPPING[METHOD] = made
    module.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = _LazyConfig


class _LazyConfig:
    """Stands for ``FlashRTConfig`` in a table that only reads dictionaries with it."""

    @staticmethod
    def from_dict(*args: Any, **kwargs: Any) -> Any:
        """``FlashRTConfig.from_dict``."""
        config = importlib.import_module(f"{_HERE}.config").FlashRTConfig
        return config.from_dict(*args, **kwargs)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules with tables as everyone else does, and fills the tables after them."""

    def __init__(self) -> None:
        self._finding: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The usual spec, with a loader that fills the tables; None for every other module."""
        if name not in _TABLES or name in self._finding:
            return None
        self._finding.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, _fill)
        return spec


class _Loader(importlib.abc.Loader):
    """Another loader, and something to do after it."""

    def __init__(self, loader: Any, after: Callable[[ModuleType], None]) -> None:
        self._loader, self._after = loader, after

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the other loader."""
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """As the other loader, then the rest."""
        self._loader.exec_module(module)
        self._after(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
