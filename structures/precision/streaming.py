"""A model that is still on the CPU, proven and packed on the GPU that it is for.

Its quantised weights never are there together in full precision: each is lent for as long as one
call reads it, and goes there for good as a packed copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from .. import lending
from .observe import hooks


@contextmanager
def streamed(
    model: nn.Module, weights: Iterable[torch.Tensor], device: torch.device
) -> Iterator[None]:
    """Let ``model`` run on ``device`` while ``weights`` are elsewhere.

    Whoever owns one of them gets it lent for its own call. What autograd keeps of a lent weight is
    the way to it, so that a backward pass lends it again.
    """
    wanted = {id(weight) for weight in weights if lending.is_away(weight, device)}
    lender = _Lending(device)
    owners = [
        module
        for module in model.modules()
        if any(id(p) in wanted for p in module._parameters.values())
    ]
    if not owners:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(hooks(lender.watch(owners, wanted)))
        stack.enter_context(
            torch.autograd.graph.saved_tensors_hooks(lender.leave_out, lender.lend_again)
        )
        yield


class _Lending:
    """Weights that are lent now, by the address that they have meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._homes: dict[int, torch.Tensor] = {}

    def watch(self, owners: Iterable[nn.Module], wanted: set[int]) -> Iterator[Any]:
        for owner in owners:
            weights = [p for p in owner._parameters.values() if p is not None and id(p) in wanted]
            for weight in weights:
                if self._device.type == "cuda" and not weight.data.is_pinned():
                    weight.data = weight.data.pin_memory()  # it comes and goes many times

            def take(module: nn.Module, args: Any, own: list[Any] = weights) -> None:
                for weight in own:
                    home = weight.data
                    weight.data = lending.copied(home, self._device)
                    self._homes[_address(weight)] = home

            def give(module: nn.Module, args: Any, out: Any, own: list[Any] = weights) -> None:
                for weight in own:
                    weight.data = self._homes.pop(_address(weight))

            yield owner.register_forward_pre_hook(take, prepend=True)
            yield owner.register_forward_hook(give, always_call=True)

    def leave_out(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps instead of ``tensor``: of a lent weight its home and the view."""
        home = self._homes.get(_address(tensor))
        if home is None:
            return tensor
        return home, tensor.shape, tensor.stride(), tensor.storage_offset()

    def lend_again(self, kept: Any) -> torch.Tensor:
        """The tensor that ``leave_out`` got."""
        if isinstance(kept, torch.Tensor):
            return kept
        home, shape, stride, offset = kept
        return lending.copied(home, self._device).as_strided(shape, stride, offset)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
