"""What the formats share: scales as fp32, and NVFP4 with its two scales."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from flash_rt.structures import kernels

from .tensor import FLOATS, PackedTensor, packed_weight

FP8 = torch.float8_e4m3fn
BLOCK = 128
_E2M1 = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NEARBY = (0, 1, -1, 2, -2, 3, -3)  # steps of the fp32 scale that are tried, the nearest first


def fp8_data(weight: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """A stored E4M3 weight, also where it was cast to the model's dtype on its way.

    Older transformers cast everything that is called weight; E4M3 comes back exactly.

    Raises:
        ValueError: another dtype or shape, or values that are no E4M3.
    """
    data = weight
    if weight.dtype in FLOATS:
        data = weight.to(FP8)
        if not torch.equal(data.to(weight.dtype), weight):
            data = weight
    if data.dtype != FP8 or tuple(data.shape) != shape:
        raise ValueError(
            f"weight must be float8_e4m3fn {shape}, got {data.dtype} {tuple(data.shape)}"
        )
    return data


def eight_bit(
    data: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    input_scale: torch.Tensor | None = None,
) -> PackedTensor:
    """FP8 or INT8 ``[N, K]`` with a scale for the tensor, each row, or each block of 128 x 128.

    Raises:
        ValueError: a scale of another shape, or one that is not finite.
    """
    rows, columns = data.shape
    scale = scale.detach().float()
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
    if scale.numel() == 1:
        scale = scale.reshape(1).expand(rows).contiguous()
    elif scale.numel() == rows and tuple(scale.shape) in ((rows,), (rows, 1)):
        scale = scale.reshape(rows).contiguous()
    elif data.dtype == FP8 and [s for s in scale.shape if s > 1] == [s for s in blocks if s > 1]:
        scale = scale.reshape(blocks).contiguous()
    else:
        raise ValueError(
            f"scales of a weight {(rows, columns)} must be one, ({rows},) or {blocks}, got "
            f"{tuple(scale.shape)}"
        )
    _check_finite(scale)
    packed = packed_weight(data.contiguous(), scale, (rows, columns))
    return PackedTensor(packed, dtype, one_scale(input_scale))


def one_scale(scale: torch.Tensor | None) -> torch.Tensor | None:
    """A static scale of the input as fp32 ``[1]``; None for none, or for one that is dynamic."""
    if scale is None or scale.numel() != 1:
        return None
    found = scale.detach().float().reshape(1)
    return found if bool((found > 0).all() & found.isfinite().all()) else None


def nvfp4(
    codes: torch.Tensor,
    block_scales: torch.Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    scale: torch.Tensor,
    theirs: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> PackedTensor:
    """NVFP4 from its row-major form.

    Args:
        codes: uint8 ``[N, K / 2]``, the even one low.
        block_scales: E4M3 ``[N, K / 16]``.
        shape: (N, K).
        dtype: what the values are rounded to.
        scale: fp32, one element: the tensor's own scale.
        theirs: the format's arithmetic: fp32 values of E2M1 numbers under block scales.

    Raises:
        ValueError: parts that do not fit each other, or scales that are not finite.
    """
    rows, columns = shape
    for name, part, kind, size in (
        ("codes", codes, torch.uint8, (rows, columns // 2)),
        ("block scales", block_scales, FP8, (rows, columns // 16)),
    ):
        if part.dtype != kind or tuple(part.shape) != size or columns % 16:
            raise ValueError(
                f"NVFP4 {name} of a weight {shape} must be {kind} {size}, got {part.dtype} "
                f"{tuple(part.shape)}"
            )
    _check_finite(scale)
    quant = kernels.family("quant")
    tiles = quant.tile_nvfp4(codes.contiguous(), block_scales.contiguous())
    exact = _exact(scale.reshape(1), block_scales, dtype, theirs)
    packed = packed_weight(tiles, exact.expand(rows).contiguous(), shape)
    return PackedTensor(packed, dtype)


def _exact(
    scale: torch.Tensor,
    block_scales: torch.Tensor,
    dtype: torch.dtype,
    theirs: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The fp32 scale by which all values become theirs, once both are rounded to ``dtype``.

    They multiply the two scales first, the kernels last, and each product rounds. In fp32 the
    results may differ by a unit in the last place; in 16 bits that shows only where a value lies on
    the border of two numbers, and then for a neighbour of the scale it does not. Every product of
    an E2M1 number and a block scale that occurs is looked at.
    """
    used = block_scales.view(torch.uint8).unique().view(FP8).float()
    numbers = torch.tensor(_E2M1, device=used.device)
    wanted = theirs(numbers[:, None], used[None, :]).to(dtype)
    products = numbers[:, None] * used[None, :]  # exact
    best, fewest = scale, products.numel() + 1
    for step in _NEARBY:
        near = (scale.view(torch.int32) + step).view(torch.float32)
        wrong = int(((products * near).to(dtype) != wanted).sum())
        if wrong < fewest:
            best, fewest = near, wrong
        if wrong == 0:
            return best
    warnings.warn(
        f"flashrt: {fewest} of {products.numel()} products of an NVFP4 weight differ from the "
        f"format's own library in the last place of {dtype}",
        stacklevel=2,
    )
    return best


def _check_finite(scale: torch.Tensor) -> None:
    if not bool(scale.isfinite().all()):
        raise ValueError("scales must be finite, got a NaN or an infinity")
