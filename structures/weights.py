"""The one way from a bound region to its weights: the host's own tensor, or a packed copy of it.

A packed copy hangs on the host's parameter, so tied weights have one, and whoever finds the
parameter through ``self`` finds the copy. It remembers the version and the address of the
parameter it was made from, and is made again when either has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn, Protocol, TypeAlias

import torch
from torch import nn

COPY = "_flashrt_packed"


class PackedWeight(Protocol):
    """``linear.PackedWeight``: quantised ``data``, fp32 ``scale``, and ``shape`` = (N, K)."""

    @property
    def data(self) -> torch.Tensor: ...
    @property
    def scale(self) -> torch.Tensor: ...
    @property
    def shape(self) -> tuple[int, int]: ...


Weight: TypeAlias = "torch.Tensor | PackedWeight"
Pack: TypeAlias = "Callable[[torch.Tensor], PackedWeight]"


@dataclass(frozen=True)
class BoundLinear:
    """Weight ``[N, K]`` and bias of a linear layer, or of some of its rows.

    ``input_scale`` is the static scale (fp32, one element) of the layer's input in FP8 products of
    many rows; None scales every row by its own largest value.
    """

    weight: Weight
    bias: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None


class PackedCopy:
    """The packed copy of one parameter, whole or in separately packed runs of rows.

    Args:
        parameter: ``[N, K]``, or ``[K, N]`` where ``transposed``.
        precision: its format's name.
        pack: makes a packed weight of a ``[N, K]`` tensor.
        device: where the copy lives.
        cuts: rows at which it must be divisible. Formats that store rows in groups are packed in
            these runs when a cut is inside a group, and have no ``whole`` then.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        *,
        precision: str,
        pack: Pack,
        device: torch.device,
        transposed: bool = False,
        cuts: tuple[int, ...] = (),
    ) -> None:
        self.precision, self.transposed = precision, transposed
        self.input_scale: torch.Tensor | None = None
        self.repacked = 0
        self._pack, self.device = pack, device
        rows = parameter.shape[1] if transposed else parameter.shape[0]
        runs = [(0, rows)]
        if precision == "nvfp4" and any(cut % ROW_GROUP for cut in cuts):
            edges = sorted({0, *cuts, rows})
            runs = [*pairwise(edges)]
        self._rows = rows
        self._parts = dict(zip(runs, self._packed(parameter, runs), strict=True))
        self._views: dict[tuple[int, int], PackedWeight] = {}
        self.mark(parameter)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies are the host's: they leave the packed copy behind."""
        return (type(None), ())

    def mark(self, parameter: torch.Tensor) -> None:
        """Take ``parameter`` as it is now for what the copy was made from."""
        self._seen = _state(parameter)

    def is_current(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter`` is still what the copy was made from."""
        return self._seen == _state(parameter)

    def refresh(self, parameter: torch.Tensor) -> bool:
        """Pack again what was written to ``parameter`` since, at the same addresses.

        Returns:
            Whether there was anything to do.
        """
        if self._seen == _state(parameter):
            return False
        runs = [*self._parts]
        for old, new in zip(self._parts.values(), self._packed(parameter, runs), strict=True):
            old.data.view(torch.uint8).copy_(new.data.view(torch.uint8))
            old.scale.copy_(new.scale)
        self.repacked += 1
        self.mark(parameter)
        return True

    def weight(self, start: int | None = None, stop: int | None = None) -> PackedWeight:
        """Rows ``start:stop``, views where they can be; all of them without arguments.

        Raises:
            KeyError: the whole of a weight that is packed in runs.
        """
        run = start or 0, self._rows if stop is None else stop
        found = self._parts.get(run) or self._views.get(run)
        if found is None:
            found = self._views[run] = sliced(self._parts[0, self._rows], *run)
        return found

    @property
    def runs(self) -> list[PackedWeight]:
        """The packed weights, which have all rows together in their order."""
        return [*self._parts.values()]

    @property
    def whole(self) -> bool:
        """Whether the copy is one packed weight."""
        return (0, self._rows) in self._parts

    @property
    def memory_bytes(self) -> int:
        """Of data and scales."""
        return sum(packed_bytes(part) for part in self._parts.values())

    def _packed(self, parameter: torch.Tensor, runs: list[tuple[int, int]]) -> list[PackedWeight]:
        with torch.inference_mode(False), torch.no_grad():
            values = parameter.detach().to(self.device)
            values = values.t() if self.transposed else values
            return [self._pack(values[start:stop]) for start, stop in runs]


ROW_GROUP = 16  # rows of an NVFP4 tile
SCALE_GROUP = 128  # rows of a block of FP8 that shares a scale


def sliced(packed: PackedWeight, start: int, stop: int) -> PackedWeight:
    """Rows ``start:stop`` of ``packed`` as views.

    Raises:
        ValueError: ``start`` is inside a group of rows that are stored together: a tile of NVFP4,
            or a block that shares a scale.
    """
    kind: Any = type(packed)
    data, scale = packed.data, packed.scale
    group = ROW_GROUP if data.dtype == torch.uint8 else SCALE_GROUP if scale.dim() == 2 else 1
    if start % group:
        raise ValueError(
            f"packed weight: rows must be taken from a multiple of {group}, got {start}:{stop}"
        )
    groups = slice(start // group, -(-stop // group))
    data = data[groups] if data.dtype == torch.uint8 else data[start:stop]
    scale = scale[groups] if scale.dim() == 2 else scale[start:stop]
    made: PackedWeight = kind(data, scale, (stop - start, packed.shape[1]))
    return made


def packed_bytes(packed: PackedWeight) -> int:
    """Of data and scales."""
    return sum(t.numel() * t.element_size() for t in (packed.data, packed.scale))


def own_copy(parameter: torch.Tensor) -> PackedCopy | None:
    """The copy that was hung on ``parameter``; None also where its values came packed."""
    found: PackedCopy | None = parameter.__dict__.get(COPY)
    return found


def copy_of(parameter: torch.Tensor) -> PackedCopy | None:
    """The packed copy of ``parameter`` as it is, which may be older than its values."""
    found: PackedCopy | None = getattr(parameter, COPY, None)
    return found


def stored_as(parameter: torch.Tensor) -> str | None:
    """Format of a weight that has no other form than its packed one; None for every other."""
    return None if COPY in vars(parameter) else getattr(copy_of(parameter), "precision", None)


class Copies:
    """The packed copies that the parameters of ``model`` have now."""

    def __init__(self, model: nn.Module) -> None:
        found = ((parameter, copy_of(parameter)) for parameter in model.parameters())
        self._pairs = [(parameter, packed) for parameter, packed in found if packed is not None]

    def refresh(self) -> bool:
        """Pack again what was written to since; one look at each version.

        Returns:
            Whether the parameters still have these copies.
        """
        same = True
        for parameter, packed in self._pairs:
            packed.refresh(parameter)
            same &= copy_of(parameter) is packed
        return same


def bound_linear(
    parameter: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    start: int | None = None,
    stop: int | None = None,
    transposed: bool = False,
) -> BoundLinear:
    """What a bound forward reads for rows ``start:stop`` of a weight: the packed copy if any.

    Args:
        parameter: the host's, ``[N, K]``, or ``[K, N]`` where ``transposed``.
    """
    if bias is not None and start is not None:
        bias = bias[start:stop]
    packed = copy_of(parameter)
    if packed is None:
        weight = parameter.t() if transposed else parameter
        return BoundLinear(weight if start is None else weight[start:stop], bias)
    packed.refresh(parameter)
    return BoundLinear(packed.weight(start, stop), bias, packed.input_scale)


def table_of(parameter: torch.Tensor) -> Weight:
    """What an embedding reads: the packed copy if there is one, else the host's own table."""
    packed = copy_of(parameter)
    if packed is None:
        return parameter
    packed.refresh(parameter)
    return packed.weight()


def _state(parameter: torch.Tensor) -> tuple[int, int]:
    version = 0 if parameter.is_inference() else parameter._version
    return version, parameter.data_ptr()


def refuse_released(*_: Any, **__: Any) -> NoReturn:
    """Raise what every way to a released weight raises."""
    raise RuntimeError(RELEASED)


RELEASED = (
    "attach: the full-precision weights were released (keep_host=False), so the host cannot be "
    "saved, copied or restored; load the model again, or attach with keep_host='cpu'"
)
