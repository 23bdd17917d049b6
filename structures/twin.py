"""Copies of host modules to experiment on: other parameters, no hooks, and a config that tells.

Weights over ``LARGE`` elements are drawn as overlapping windows of one short random vector
(``w[i, j] = v[7 i + j]``), so the copy of a 12288 x 4096 layer costs neither 50 million random
numbers nor their memory; all rows and columns still differ, so a transposed, shifted or swapped
weight shows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

LARGE = 1 << 20


class Twin:
    """An fp32 copy of a module on ``device``, with other parameters and no hooks.

    Weights are N(0, 1/fan_in) with fan_in the last dimension, vectors N(0.7, 0.4^2): norm weights
    and biases that are neither 0 nor 1. Buffers keep their values; tied parameters stay tied.

    Args:
        shapes: other shapes for some parameters, by name.

    Attributes:
        module: the copy, in eval mode.
        config_reads: fields of its ``config`` that were read inside ``recording()``, with values.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        shapes: Mapping[str, tuple[int, ...]],
        seed: int,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.config_reads: dict[str, Any] = {}
        self._recording = False
        memo: dict[int, Any] = {}
        for name, parameter in module.named_parameters():
            values = _draw(torch.Size(shapes.get(name, parameter.shape)), generator, device)
            memo[id(parameter)] = nn.Parameter(values, requires_grad=False)
        for buffer in module.buffers():
            kept = buffer.detach().to(device, copy=True)
            memo[id(buffer)] = kept.float() if kept.is_floating_point() else kept
        for inner in module.modules():
            config = vars(inner).get("config")
            if config is not None and id(config) not in memo:
                memo[id(config)] = self._telling(config)
        self.module: nn.Module = copy.deepcopy(module, memo)
        for inner in self.module.modules():
            _clear_hooks(inner)
        self.module.eval()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note the config fields that are read meanwhile."""
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def _telling(self, config: Any) -> Any:
        """A copy of ``config`` that notes which of its fields are read."""
        kind, twin = type(config), self

        class Telling(_Quiet, kind):  # type: ignore[misc,valid-type]
            def __getattribute__(self, name: str) -> Any:
                value = super().__getattribute__(name)
                if twin._recording and not name.startswith("__") and not callable(value):
                    twin.config_reads[name] = value
                return value

        told = copy.copy(config)
        try:
            object.__setattr__(told, "__class__", Telling)
        except TypeError:  # a class of C: its fields stay unseen
            return told
        return told


class _Quiet:
    """Keeps a config class from registering the one derived from it."""

    def __init_subclass__(cls, **kwargs: Any) -> None: ...


def _draw(shape: torch.Size, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    if len(shape) < 2:
        return _normal(shape, generator).mul_(0.4).add_(0.7).to(device)
    columns = shape[-1]
    rows = shape.numel() // max(1, columns)
    if shape.numel() <= LARGE:
        return _normal(shape, generator).mul_(columns**-0.5).to(device)
    # Moved before it is spread: a copy of overlapping windows would be as large as it looks.
    values = _normal((7 * (rows - 1) + columns,), generator).mul_(columns**-0.5).to(device)
    windows: torch.Tensor = values.as_strided((rows, columns), (7, 1))
    return windows.view(shape) if len(shape) == 2 else windows.reshape(shape)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _clear_hooks(module: nn.Module) -> None:
    for name, value in list(vars(module).items()):
        if name.endswith("_hooks") and isinstance(value, dict):
            vars(module)[name] = type(value)()
