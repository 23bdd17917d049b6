"""Storages as a tape sees them: who reaches one, whether its owner still does, and poison."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch

_Geometry = tuple[Any, ...]


class Aliases:
    """The tensors through which tapes reach a storage: one for each geometry, shared by all tapes.

    A storage whose every reference is one of these has been freed by its owner.
    """

    def __init__(self) -> None:
        self._by_storage: dict[int, WeakValueDictionary[_Geometry, torch.Tensor]] = {}
        # torch counts its own look at the storage, in some versions.
        alone = torch.empty(1)
        self._looks = torch._C._storage_Use_Count(storage_of(alone)) - 1

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The one alias with the geometry of ``tensor``."""
        storage = storage_of(tensor)
        known = self._by_storage.setdefault(storage, WeakValueDictionary())
        geometry = (
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        alias = known.get(geometry)
        if alias is None:
            alias = known[geometry] = tensor.detach()
        return alias

    def has_owner(self, storage: int) -> bool:
        """Whether anything but aliases refers to ``storage``."""
        uses = torch._C._storage_Use_Count(storage) - self._looks
        return bool(uses > len(self._by_storage[storage]))


def poison(tensor: torch.Tensor) -> None:
    """Fill the whole storage of ``tensor``: NaN for floats, True for bool, else 0x7F bytes."""
    every_byte = whole(tensor)
    if tensor.dtype is torch.bool:
        every_byte.fill_(1)
    elif tensor.is_floating_point() or tensor.is_complex():
        every_byte.fill_(0xFF)
    else:
        every_byte.fill_(0x7F)  # indexes nothing, in any integer width


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage of ``tensor``."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of the storage of ``tensor``."""
    return int(tensor.untyped_storage()._cdata)
