"""What makes two calls the same graph, and what keeps a call from being one.

A key holds the shape, dtype and strides of every tensor and the type and value of every constant.
Two calls with equal keys run the same device work on other data. Values whose equality says too
little are spelled out: ``True``, ``1`` and ``1.0`` differ, and so do ``0.0`` and ``-0.0``.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from typing import Any

import torch

from .trees import NotATreeError, items

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_PLAIN = frozenset(
    {
        type(None),
        bool,
        int,
        str,
        bytes,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
        torch.Size,
        range,
    }
)


class NotCapturableError(Exception):
    """Why a call must run eagerly."""


class OtherDeviceError(NotCapturableError):
    """An argument is not a strided tensor on the model's device."""


class Signature:
    """Turns calls of one function into keys.

    Positional and keyword spelling, keyword order, and defaults spelled out make no difference.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._names: list[str] = []
        self._defaults: dict[str, Any] = {}
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                self._names.append(parameter.name)
            if parameter.default is not parameter.empty:
                self._defaults[parameter.name] = parameter.default

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        """The arguments that differ from their default, by name, sorted by name.

        Surplus positional arguments are named by their position.
        """
        names, defaults = self._names, self._defaults
        values = dict(zip(names, args, strict=False))
        for position in range(len(names), len(args)):
            values[f"*{position}"] = args[position]
        values.update(kwargs)
        return [
            (name, values[name])
            for name in sorted(values)
            if name not in defaults or not _equal(values[name], defaults[name])
        ]

    def rebuilder(
        self, named: list[tuple[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[list[Any]], tuple[list[Any], dict[str, Any]]]:
        """From values in the order of ``named`` to a call in the form of args and kwargs."""
        labels = [name for name, _ in named]
        positions = [*self._names, *(f"*{i}" for i in range(len(self._names), len(args)))]

        def call(values: list[Any]) -> tuple[list[Any], dict[str, Any]]:
            by_name = dict(zip(labels, values, strict=True))
            new_args = [by_name.get(positions[i], value) for i, value in enumerate(args)]
            return new_args, {k: by_name.get(k, value) for k, value in kwargs.items()}

        return call


def read(
    named: list[tuple[str, Any]], device: torch.device, *, grad: bool
) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
    """The key of a call and its tensors, in the order of ``trees.flatten``.

    Args:
        named: of ``Signature.named``.
        device: where every tensor must be.
        grad: whether grad is enabled; a tensor that requires it then asks for the host.

    Raises:
        NotCapturableError: an argument carries state, wants a gradient, is on another device, or is
            neither a tensor nor an immutable constant.
    """
    key: list[Any] = []
    tensors: list[torch.Tensor] = []
    name = ""

    def visit(value: Any) -> None:
        kind = type(value)
        if kind in _TENSORS:
            if value.device != device or value.layout is not torch.strided:
                raise OtherDeviceError(f"argument {name} is {value.layout} on {value.device}")
            if grad and value.requires_grad:
                raise NotCapturableError(f"argument {name} requires grad")
            tensors.append(value)
            key.append(value.shape)
            key.append(value.dtype)
            if not value.is_contiguous():
                key.append(value.stride())
        elif kind in _PLAIN:
            key.append(kind)
            key.append(value)
        elif kind is float or kind is complex:
            key.append(kind)
            key.append(repr(value))
        elif kind is list or kind is tuple:
            key.append(kind)
            key.append(len(value))
            for child in value:
                visit(child)
        else:
            visit_other(kind, value)

    def visit_other(kind: type, value: Any) -> None:
        if carries_state(value):
            raise NotCapturableError(f"argument {name} carries state ({kind.__name__})")
        try:
            children = items(value)
        except NotATreeError:
            children = None
        if children is not None:
            key.append(kind)
            key.append(tuple(label for label, _ in children))
            for _, child in children:
                visit(child)
        elif isinstance(value, enum.Enum) or kind is frozenset:
            key.append(value)
        else:
            raise NotCapturableError(
                f"argument {name} is neither a tensor nor an immutable constant ({kind.__name__})"
            )

    for name, value in named:
        key.append(name)
        visit(value)
    if len(tensors) > 1:
        identities = [*map(id, tensors)]
        if len(set(identities)) < len(identities):
            key.append(tuple(map(identities.index, identities)))
    return tuple(key), tensors


def _equal(value: Any, default: Any) -> bool:
    """Whether ``value`` is the default, by identity or as a constant of the same type."""
    if value is default:
        return True
    kind = type(value)
    plain = kind in _PLAIN or kind is float
    return plain and kind is type(default) and repr(value) == repr(default)


def carries_state(value: Any) -> bool:
    """Whether ``value`` is a cache of transformers' family, by its interface or its ancestry."""
    return not isinstance(value, torch.Tensor) and (
        hasattr(value, "get_seq_length")
        or any(kind.__name__ == "Cache" for kind in type(value).__mro__)
    )
