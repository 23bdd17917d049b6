"""Where the host's full-precision weights are while packed copies are read."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from ..binding import Binder, Overridden
from ..weights import COPY, own_copy, refuse_released

KeepHost: TypeAlias = "str | bool"
PLACES = ("cpu", "gpu", False)


def checked(keep_host: object) -> KeepHost:
    """``keep_host`` itself.

    Raises:
        ValueError: it is none of ``PLACES``.
    """
    if keep_host is False or (isinstance(keep_host, str) and keep_host in ("cpu", "gpu")):
        return keep_host
    raise ValueError(f"plan: keep_host must be 'cpu', 'gpu' or False, got {keep_host!r}")


class HostWeights:
    """Full-precision weights that have packed copies: moved, released, and given back.

    Args:
        keep_host: ``"cpu"`` moves each to the CPU, ``"gpu"`` leaves it, False releases it.
        device: where they were.
    """

    def __init__(self, keep_host: KeepHost, device: torch.device) -> None:
        self.keep_host, self.device = keep_host, device
        self.released = False
        self._moved: dict[int, torch.Tensor] = {}

    def move(self, parameter: torch.Tensor) -> None:
        """Make room where the weight was; until ``settle`` it stays on the CPU in any case."""
        if self.keep_host == "gpu" or self.device.type == "cpu":
            return
        packed = own_copy(parameter)
        parameter.data = parameter.data.to("cpu")
        self._moved[id(parameter)] = parameter
        if packed is not None:
            packed.mark(parameter)

    def adopt(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take weights that are on the CPU and never were elsewhere for moved ones."""
        self._moved.update((id(parameter), parameter) for parameter in parameters)

    def disown(self, parameters: Iterable[torch.Tensor]) -> None:
        """Leave them where they are."""
        for parameter in parameters:
            self._moved.pop(id(parameter), None)

    def back(self, parameter: torch.Tensor) -> None:
        """Put one weight back: the same object, its values as they are now."""
        if self._moved.pop(id(parameter), None) is not None:
            parameter.data = parameter.data.to(self.device)
            packed = own_copy(parameter)
            if packed is not None:
                packed.mark(parameter)

    def settle(self, owners: Iterable[nn.Module], binder: Binder) -> None:
        """Give weights up where they are not to be kept; guard what would copy or save them.

        Args:
            owners: every module that has one of the weights.
        """
        owners = [*owners]
        if self.keep_host is False:
            for module in owners:
                binder.override(module, "released weights", **_RELEASED_METHODS)
            self._release(owners)
        elif self._moved:
            for module in owners:
                binder.override(module, ("moved weights", self.device), **_moved(self.device))

    def _release(self, owners: list[nn.Module]) -> None:
        self.released = True
        self._moved.clear()
        hollow: dict[int, nn.Parameter] = {}
        for module in owners:
            for name, parameter in module._parameters.items():
                packed = None if parameter is None else own_copy(parameter)
                if parameter is None or packed is None:
                    continue
                if id(parameter) not in hollow:
                    empty = torch.empty_like(parameter, device="meta")
                    hollow[id(parameter)] = made = nn.Parameter(empty, requires_grad=False)
                    made.__dict__[COPY] = packed
                    packed.mark(made)
                module._parameters[name] = hollow[id(parameter)]

    def restore(self) -> None:
        """Put every weight back."""
        for parameter in [*self._moved.values()]:
            self.back(parameter)


def refuse_absent(module: nn.Module) -> None:
    """Refuse a call that the host would have to answer while its weights are elsewhere.

    Raises:
        RuntimeError: weights inside ``module`` have packed copies and are not beside them.
    """
    for name, parameter in module.named_parameters():
        packed = own_copy(parameter)
        if packed is not None and packed.device != parameter.device:
            where = "were released" if parameter.is_meta else f"are on the {parameter.device}"
            raise RuntimeError(
                f"attach: this call of {type(module).__name__} needs the host's own forward "
                "(training mode, autograd, autocast, a hook, or arguments that no structure "
                f"covers), but {name} is read as {packed.precision} and its full-precision values "
                f"{where}; call plan.detach(), or attach with keep_host='gpu'"
            )


def _copied(self: nn.Module, memo: dict[int, Any]) -> Any:
    """What ``copy.deepcopy`` makes of a module that has no say in it."""
    reduced = Overridden.__reduce_ex__(cast(Any, self), 4)
    return copy._reconstruct(self, memo, *reduced)  # type: ignore[attr-defined]


def _moved(device: torch.device) -> dict[str, Any]:
    """A copy of a module is a host: its weights are where the model's others are."""

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> Any:
        for parameter in self._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                values = parameter.detach().to(device, copy=True)
                memo[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        return _copied(self, memo)

    return {"__deepcopy__": deepcopy}


def _refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
    refuse_released()


def _refuse_deepcopy(self: nn.Module, memo: dict[int, Any]) -> Any:
    """Proofs copy a module with parameters of their own, which needs none of the released."""
    if any(id(p) not in memo for p in self._parameters.values() if p is not None):
        refuse_released()
    return _copied(self, memo)


_RELEASED_METHODS = {
    "_save_to_state_dict": _refuse,
    "_load_from_state_dict": _refuse,
    "__deepcopy__": _refuse_deepcopy,
    "__reduce_ex__": _refuse,
}
