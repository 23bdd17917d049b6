"""The tensors that a packed weight is stored as.

``<name>_packed`` holds the data in the kernels' layout and ``<name>_scale`` the fp32 scales of
``<name>``, a linear weight; ``<module>.input_scale`` the static scale of its input, if any.
The names differ from those of other formats, and from the weight's own, so that a reader that does
not know them reports a missing weight, and never takes bytes for numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flash_rt.structures.precision.formats import TILE_BYTES, TILE_COLUMNS, TILE_ROWS

from .scales import BLOCK
from .tensor import PackedTensor, packed_weight

DATA, SCALE, INPUT_SCALE = "weight_packed", "weight_scale", "input_scale"
NAMES = (DATA, SCALE, INPUT_SCALE)


def data_shape(dtype: torch.dtype, rows: int, columns: int) -> tuple[int, ...]:
    """Shape of the stored data of a weight ``[N, K]``: uint8 means NVFP4 in tiles."""
    if dtype == torch.uint8:
        return (-(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS), TILE_BYTES)
    return (rows, columns)


def flatten(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict of plain tensors."""
    flat: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if not isinstance(value, PackedTensor):
            flat[name] = value
            continue
        prefix = name.removesuffix("weight")
        flat[prefix + DATA], flat[prefix + SCALE] = value.packed.data, value.packed.scale
        if value.input_scale is not None:
            flat[prefix + INPUT_SCALE] = value.input_scale
    return flat


def rebuild(
    tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype, name: str
) -> PackedTensor:
    """The weight ``name`` from its stored tensors, by their short names.

    Raises:
        ValueError: one is missing, or does not fit ``shape``.
    """
    for wanted in (DATA, SCALE):
        if wanted not in tensors:
            raise ValueError(f"flashrt: {name} must be stored with {wanted}, got {sorted(tensors)}")
    data, scale = tensors[DATA], tensors[SCALE].float()
    rows, columns = shape
    expected = data_shape(data.dtype, rows, columns)
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    if tuple(data.shape) != expected or tuple(scale.shape) not in ((rows,), blocks):
        raise ValueError(
            f"flashrt: {name} {shape} must be stored as {expected} with scales ({rows},), got "
            f"{tuple(data.shape)} with {tuple(scale.shape)}"
        )
    packed = packed_weight(data, scale.contiguous(), (rows, columns))
    return PackedTensor(packed, dtype, tensors.get(INPUT_SCALE))
