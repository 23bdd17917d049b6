"""Tensors of a module, elsewhere for a while: the same objects with other data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def lent(module: nn.Module, device: torch.device | None) -> Iterator[None]:
    """All tensors of ``module`` on ``device``, then where they were; None leaves them there."""
    undo = move(module, device) if device is not None else _nothing
    try:
        yield
    finally:
        undo()


def move(
    module: nn.Module, device: torch.device, *, stay: Iterable[torch.Tensor] = ()
) -> Callable[[], None]:
    """Put the tensors of ``module`` on ``device``, the same objects, but for those in ``stay``.

    Returns:
        What puts them back.
    """
    kept = {id(tensor) for tensor in stay}
    moved: list[tuple[torch.Tensor, torch.Tensor]] = []
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) not in kept and is_away(tensor, device):
            moved.append((tensor, tensor.data))
            tensor.data = copied(tensor.data, device)

    def undo() -> None:
        for tensor, data in moved:
            tensor.data = data

    return undo


def indexed(device: torch.device | str) -> torch.device:
    """The device with its number, as tensors name it."""
    device = torch.device(device)
    if str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device


def is_away(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether ``tensor`` is not on ``device``."""
    return tensor.device != device


def copied(data: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``data`` on ``device``."""
    return data.to(device, non_blocking=True)


def _nothing() -> None:
    return None
