"""A region: one place in a host model that a structure may execute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class Region:
    """A module of the host model, and every dotted path that leads to it.

    Attributes:
        path: first path from the model in ``named_modules()`` order; ``""`` is the model itself.
        module: the host's own module, never a copy.
        aliases: further paths to the same module object.
    """

    path: str
    module: nn.Module
    aliases: tuple[str, ...] = field(default=())

    def child(self, name: str) -> Region:
        """The region of a child module; ``name`` may be dotted (``"net.0.proj"``)."""
        path = f"{self.path}.{name}" if self.path else name
        return Region(path, self.module.get_submodule(name))

    def children(self) -> Iterator[Region]:
        """One region for each direct child module, in the host's order."""
        for name, _ in self.module.named_children():
            yield self.child(name)

    def owners(self) -> Iterator[Region]:
        """Modules in this region, itself included, that directly own a parameter or buffer."""
        for name, module in self.module.named_modules():
            if owns_tensors(module):
                yield self.child(name) if name else self

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and values of all parameters and buffers in this region."""
        yield from self.module.named_parameters()
        yield from self.module.named_buffers()


def owns_tensors(module: nn.Module) -> bool:
    """Whether ``module`` itself, not a child, holds a parameter or a buffer."""
    return any(p is not None for p in module._parameters.values()) or any(
        b is not None for b in module._buffers.values()
    )
