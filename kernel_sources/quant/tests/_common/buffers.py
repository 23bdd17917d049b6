"""Buffers that show a kernel's stray reads and writes: poison, guard bands, odd offsets, gaps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

GUARD_ELEMENTS = 64  # on each side; a multiple of every vector width
POISON_BYTE = 0xFB  # 0xFBFB... is a huge negative fp16, bf16 or fp32 and no likely result


class Guarded:
    """A poisoned output between two guard bands.

    ``view`` has the shape asked for; ``offset`` elements shift it away from 16-byte alignment,
    and ``row_gap`` elements of guard lie between its rows.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: str | torch.device,
        *,
        offset: int = 0,
        row_gap: int = 0,
    ) -> None:
        row = shape[-1] if shape else 1
        rows = math.prod(shape[:-1])
        elements = rows * (row + row_gap) + offset + 2 * GUARD_ELEMENTS
        self._shape, self._dtype = tuple(shape), dtype
        self._strides = _row_strides(self._shape, row + row_gap)
        self._start = GUARD_ELEMENTS + offset
        self._size = dtype.itemsize
        self._bytes = torch.full(
            (elements * self._size,), POISON_BYTE, dtype=torch.uint8, device=device
        )
        self.view = self._window(self._bytes.view(dtype))
        inside = torch.zeros(elements, dtype=torch.bool, device=device)
        self._window(inside).fill_(True)
        self._outside = ~inside.repeat_interleave(self._size)

    def _window(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.as_strided(self._shape, self._strides, self._start)

    def assert_intact(self) -> None:
        """Nothing outside ``view`` was written."""
        touched = (self._bytes[self._outside] != POISON_BYTE).nonzero()
        assert len(touched) == 0, f"{len(touched)} guard bytes were written"

    def assert_written(self) -> None:
        """No element of ``view`` still holds the poison."""
        poison = torch.full((self._size,), POISON_BYTE, dtype=torch.uint8).view(self._dtype)
        left = (self.view.contiguous().cpu() == poison).nonzero()
        assert len(left) == 0, f"{len(left)} elements were not written, first at {left[0]}"
        self.assert_intact()


def offset_copy(tensor: torch.Tensor, elements: int = 1) -> torch.Tensor:
    """The same values at an address ``elements`` past a 16-byte boundary, NaN or -1 before."""
    flat = _filled(tensor.numel() + elements + GUARD_ELEMENTS, tensor)
    view = flat[elements : elements + tensor.numel()].view(tensor.shape)
    return view.copy_(tensor)


def gapped_copy(tensor: torch.Tensor, gap: int) -> torch.Tensor:
    """The same values with ``gap`` elements of NaN or -1 after each row."""
    wide = _filled(tensor.shape[:-1].numel() * (tensor.shape[-1] + gap), tensor)
    return wide.view(*tensor.shape[:-1], -1)[..., : tensor.shape[-1]].copy_(tensor)


def _filled(elements: int, like: torch.Tensor) -> torch.Tensor:
    poison = float("nan") if like.dtype.is_floating_point else -1
    return torch.full((elements,), poison, dtype=like.dtype, device=like.device)


def _row_strides(shape: tuple[int, ...], row_stride: int) -> tuple[int, ...]:
    leading = [math.prod(shape[dim + 1 : -1]) * row_stride for dim in range(len(shape) - 1)]
    return (*leading, 1) if shape else ()
