"""Values made of tensors: taken apart once at recording, rebuilt at every replay.

Handles tensors, immutable constants, list, tuple, namedtuple, torch's own result tuples, dict,
OrderedDict, dataclasses, and dict subclasses with attributes such as the outputs of transformers
and diffusers, none of which is imported. Rebuilding calls no ``__init__`` of the host: the parts go
where they were.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

Build = Callable[[Sequence[torch.Tensor]], Any]

_CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    enum.Enum,
    frozenset,
)


class NotATreeError(TypeError):
    """A value is neither a container listed above, nor a tensor, nor an immutable constant."""

    def __init__(self, value: Any) -> None:
        super().__init__(f"{type(value).__name__} is no container of tensors")
        self.value = value


def is_record(value: Any) -> bool:
    """Whether ``value`` keeps its parts as attributes, perhaps beside items."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def items(value: Any) -> list[tuple[Any, Any]]:
    """Labels and parts of a container.

    Raises:
        NotATreeError: ``value`` is no container.
    """
    kind = type(value)
    if kind is list or isinstance(value, tuple):
        return [*enumerate(value)]
    if kind is dict or kind is OrderedDict:
        return [*value.items()]
    if is_record(value):
        attributes = _attributes(value)
        if not isinstance(value, dict):
            return [*attributes.items()]
        # The same part usually is an item and an attribute; it is visited once.
        own = dict.items(value)
        extra = [(k, v) for k, v in attributes.items() if dict.get(value, k) is not v]
        return [*own, *((("attribute", k), v) for k, v in extra)]
    raise NotATreeError(value)


def flatten(value: Any) -> tuple[list[torch.Tensor], Build]:
    """The tensors in ``value`` and a function that builds its like from others.

    The same tensor object in two places is listed twice.

    Raises:
        NotATreeError: a part is none of what the module lists.
    """
    leaves: list[torch.Tensor] = []
    return leaves, _builder(value, leaves)


def _builder(value: Any, leaves: list[torch.Tensor]) -> Build:
    if isinstance(value, torch.Tensor):
        index = len(leaves)
        leaves.append(value)
        return lambda tensors: tensors[index]
    if isinstance(value, _CONSTANTS):
        return lambda tensors: value
    parts = [(label, _builder(part, leaves)) for label, part in items(value)]
    kind = type(value)
    if kind is list:
        builds = [build for _, build in parts]
        return lambda tensors: [build(tensors) for build in builds]
    if isinstance(value, tuple):
        builds = [build for _, build in parts]
        return _tuple_builder(value, builds)
    if not is_record(value):
        return lambda tensors: kind((label, build(tensors)) for label, build in parts)
    return _record_builder(value, parts)


def _tuple_builder(value: Any, builds: list[Build]) -> Build:
    kind: Any = type(value)
    if kind is tuple:
        return lambda tensors: tuple(build(tensors) for build in builds)
    if hasattr(kind, "_make"):
        return lambda tensors: tuple.__new__(kind, (build(tensors) for build in builds))
    if hasattr(kind, "n_sequence_fields"):  # torch.return_types
        return lambda tensors: kind([build(tensors) for build in builds])
    raise NotATreeError(value)


def _record_builder(value: Any, parts: list[tuple[Any, Build]]) -> Build:
    kind: Any = type(value)
    has_items = isinstance(value, dict)
    own = list(dict.keys(value)) if has_items else []
    item_builds = parts[: len(own)]
    attribute_builds = [
        (label[1] if has_items else label, build) for label, build in parts[len(own) :]
    ]
    extra = {label for label, _ in attribute_builds}
    shared = [label for label in _attributes(value) if label not in extra]
    set_item = OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__
    set_attribute = object.__setattr__

    def build_record(tensors: Sequence[torch.Tensor]) -> Any:
        made = kind.__new__(kind)
        for label, build in item_builds:
            set_item(made, label, build(tensors))
        for label in shared:
            set_attribute(made, label, dict.get(made, label))
        for label, build in attribute_builds:
            set_attribute(made, label, build(tensors))
        return made

    return build_record


def _attributes(value: Any) -> dict[str, Any]:
    if hasattr(value, "__dict__"):
        return dict(vars(value))
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
