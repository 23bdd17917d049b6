"""Define the operators of a family; their CUDA implementations are in its torch_binding.cpp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._ops import add_op_namespace_prefix

_LIBRARY = torch.library.Library(add_op_namespace_prefix("").removesuffix("::"), "DEF")


def returns_nothing(*arguments: Any) -> None:
    """The fake of an operator that only writes."""


def define(
    schema: str, implementation: Callable[..., Any], fake: Callable[..., Any] = returns_nothing
) -> None:
    """Define one operator.

    Args:
        schema: ``name(arguments) -> results``, what it writes marked.
        implementation: on the CPU, which is also the ground truth of the tests.
        fake: the shapes and dtypes of its results.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, implementation, "CPU")
    torch.library.register_fake(add_op_namespace_prefix(name), fake, lib=_LIBRARY)
