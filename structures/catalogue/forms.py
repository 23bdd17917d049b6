"""What a module is made of: the questions that ``propose`` functions ask."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from torch import nn

from ..region import Region, owns_tensors
from .base import Guess, Refusal, Spec
from .spec import ACTIVATIONS, NotThisForm, read_activation

AnySpec = TypeVar("AnySpec", bound=Spec)

# Modules that do nothing in eval mode, or only hold others.
SILENT = (nn.Dropout, nn.Identity)
CONTAINERS = (nn.ModuleList, nn.Sequential)


def own_vectors(module: nn.Module) -> dict[str, int] | None:
    """Sizes of a leaf's parameters when all are vectors; ``None`` for any other module."""
    if any(True for _ in module.children()) or any(b is not None for b in module.buffers()):
        return None
    parameters = {n: p for n, p in module._parameters.items() if p is not None}
    if any(p.dim() != 1 for p in parameters.values()):
        return None
    return {n: p.shape[0] for n, p in parameters.items()}


def few_owners(module: nn.Module, limit: int) -> list[str] | None:
    """Paths of the modules inside that own tensors; ``None`` beyond ``limit`` of them."""
    paths: list[str] = []
    for name, inner in module.named_modules():
        if owns_tensors(inner):
            paths.append(name)
            if len(paths) > limit:
                return None
    return paths


def takes_one_tensor(module: nn.Module) -> bool:
    """Whether the forward has exactly one argument, apart from ``*args`` and ``**kwargs``."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    named = [p for p in parameters if p.kind not in _VARIADIC]
    return len(named) == 1 and parameters[0] is named[0]


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def is_function(module: nn.Module) -> bool:
    """Whether a module is a leaf without tensors, such as an activation: its values say it all."""
    return not any(True for _ in module.children()) and not owns_tensors(module)


def activations(region: Region) -> tuple[str, ...] | Refusal:
    """Names of the activation inside a region, read from its values; ``()`` when there is none.

    With two objects or an unknown one the region is refused.
    """
    found: dict[str, Callable[..., Any]] = {}
    for name, module in region.module.named_modules():
        if name and is_function(module):
            if not isinstance(module, (*SILENT, *CONTAINERS)):
                found[name] = module
            continue
        for attribute, value in vars(module).items():
            if callable(value) and not attribute.startswith("_") and attribute != "forward":
                found[f"{name}.{attribute}" if name else attribute] = value
    if not found:
        return ()
    if len(found) > 1:
        return Refusal(f"one activation is wanted, found {sorted(found)}")
    name, function = next(iter(found.items()))
    try:
        return (read_activation(function, name),)
    except NotThisForm as error:
        return Refusal(str(error))


def with_activation(
    names: tuple[str, ...], make: Callable[[str], Iterable[AnySpec]]
) -> tuple[AnySpec, ...]:
    """Specs for the activation that was read; without one, a guess at each: the proof picks."""
    if names:
        return tuple(make(names[0]))
    return cast("tuple[AnySpec, ...]", Guess(s for name in ACTIVATIONS for s in make(name)))
