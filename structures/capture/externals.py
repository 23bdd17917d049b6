"""Keeps alive what a step reads besides its inputs and its module's own memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Externals(TorchDispatchMode):
    """Collects one alias of every storage that a run read and did not make itself.

    A graph holds addresses only. A table in a closure, or a cache that a module keeps as a plain
    attribute, may be replaced later; as long as the alias lives, a replay reads the old content
    instead of memory that has been given to someone else.

    Args:
        known: ``data_ptr`` of storages that someone else watches.
    """

    def __init__(self, known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = set(known)
        self._made: list[torch.Tensor] = []  # alive until the run ends, so no address comes twice
        self._aliases: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                memory = leaf.untyped_storage().data_ptr()
                if memory not in self._known:
                    self._known.add(memory)
                    self._aliases[memory] = leaf.detach()
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                memory = leaf.untyped_storage().data_ptr()
                if memory not in self._known:
                    self._known.add(memory)
                    self._made.append(leaf.detach())
        return result

    def take(self) -> list[torch.Tensor]:
        """The aliases found; forgets what the run made."""
        self._made.clear()
        return [*self._aliases.values()]
