"""Counts what a call launches and writes: the columns of explain that say what binding saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .decision import Cost

_UNCOUNTED = ("aten::empty", "aten::new_empty", "aten::_local_scalar_dense", "aten::_unsafe_view")


class _Counter(TorchDispatchMode):
    """Counts operators that compute: neither views nor bare allocations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = 0
        self.written_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if not view and not schema.name.startswith(_UNCOUNTED):
            self.launches += 1
            self.written_bytes += sum(
                leaf.numel() * leaf.element_size()
                for leaf in tree_leaves(result)
                if isinstance(leaf, torch.Tensor)
            )
        return result


def measure(call: Callable[[], Any]) -> Cost:
    """Operators run by ``call`` (one is one launch or more) and bytes of their results."""
    with _Counter() as counter:
        call()
    return Cost(counter.launches, counter.written_bytes)
