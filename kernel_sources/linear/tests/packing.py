"""An independent packer of quantised weights: it places each element by the words of the layout.

``linear.PackedWeight`` describes the layout; here it is written as a table of places, built element
by element, so that a mistake in the family's own arithmetic cannot be repeated.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import linear_cases as cases
import torch

FORMATS = ("fp8", "fp8_blocks", "int8", "nvfp4")
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# Where a slot of 16 bits keeps bit 3 (the sign) to bit 0 (the mantissa) of an E2M1 code.
SLOT_BITS = {0: (15, 11, 10, 9), 1: (12, 8, 7, 6), 2: (14, 5, 4, 3), 3: (13, 2, 1, 0)}


class Packed(NamedTuple):
    """What the family takes, and the fp32 matrix it stands for."""

    weight: Any
    dense: torch.Tensor


def make_packed(
    family: ModuleType, form: str, n: int, k: int, device: str, *, seed: int = 1
) -> Packed:
    """``[N, K]`` of random codes in ``form``, of variance about 1/K."""
    draw = cases.generator("cpu", seed)
    scale = (0.5 + torch.rand(n, generator=draw)) * k**-0.5
    if form == "int8":
        data = torch.randint(-127, 128, (n, k), generator=draw, dtype=torch.int8)
        scale, values = scale / 73, data.double()
    elif form in ("fp8", "fp8_blocks"):
        data = (torch.randn((n, k), generator=draw) * 40).clamp(-448, 448)
        data = data.to(torch.float8_e4m3fn)
        scale, values = scale / 40, data.double()
        if form == "fp8_blocks":
            scale = scale[::128, None].repeat(1, -(-k // 128))
            scale = scale * (0.5 + torch.rand(scale.shape, generator=draw))
            grid = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
            values = values * grid.double()
    else:
        codes, blocks = make_codes(n, k, draw)
        data = tile(codes, blocks)
        scale, values = scale / 400, code_values(codes, blocks)
    dense = values.float() if scale.dim() == 2 else (values * scale[:, None].double()).float()
    packed = family.PackedWeight(data.to(device), scale.to(device), (n, k))
    return Packed(packed, dense.to(device))


def make_codes(n: int, k: int, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """E2M1 codes ``[N, K]`` (4 bits each) and E4M3 block scales ``[N, ceil(K/16)]``.

    The scales cover every finite byte, subnormals and zero among them; zero has codes zero.
    """
    codes = torch.randint(0, 16, (n, k), generator=draw)
    images = torch.randint(0x50, 0x7F, (n, -(-k // 16)), generator=draw, dtype=torch.uint8)
    rare = torch.rand(images.shape, generator=draw) < 0.1
    everything = torch.randint(0, 0x7F, images.shape, generator=draw, dtype=torch.uint8)
    images = torch.where(rare, everything, images)
    blocks = images.view(torch.float8_e4m3fn)
    empty = (images == 0).repeat_interleave(16, 1)[:, :k]
    return codes.masked_fill(empty, 0), blocks


def code_values(codes: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Their product in fp64."""
    signs = 1.0 - 2.0 * (codes >> 3)
    scales = blocks.double().repeat_interleave(16, 1)[:, : codes.shape[1]]
    return signs * E2M1.double()[codes & 7] * scales


def scale_image(scale: float) -> int:
    """The byte of a block scale: a 5-bit exponent field with bias 22, and 3 bits of mantissa."""
    if scale == 0.0:
        return 0
    exponent = 0
    while scale >= 2.0:
        scale, exponent = scale / 2, exponent + 1
    while scale < 1.0:
        scale, exponent = scale * 2, exponent - 1
    return (exponent + 22) << 3 | int((scale - 1.0) * 8)


@cache
def code_places() -> torch.Tensor:
    """``[4, 16 * 256]``: which bit of a tile holds bit 3, 2, 1, 0 of the code at (row, column)."""
    result = torch.empty((4, 16, 256), dtype=torch.int64)
    for row in range(16):
        for column in range(256):
            lane = 4 * (row % 8) + column % 128 // 32
            word = column % 32 // 8
            byte = ((column // 128 * 2 + row // 8) * 32 + lane) * 16 + word * 4
            byte += 2 * (column % 2)  # odd columns: the high half of the word
            for i, bit in enumerate(SLOT_BITS[column % 8 // 2]):
                result[i, row, column] = byte * 8 + bit
    return result.flatten(1)


@cache
def scale_places() -> torch.Tensor:
    """``[16 * 16]``: which byte of a tile holds the scale of (row, block of 16 columns)."""
    result = torch.empty((16, 16), dtype=torch.int64)
    for row in range(16):
        for block in range(16):
            lane = 4 * (row % 8) + block % 8 // 2
            result[row, block] = 2048 + (lane * 2 + row // 8) * 4 + 2 * (block // 8) + block % 2
    return result.flatten()


def tile(codes: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """``[ceil(N/16), ceil(K/256), 2304]`` from codes ``[N, K]`` and scales ``[N, ceil(K/16)]``."""
    every = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    images = torch.tensor([scale_image(float(scale)) for scale in every], dtype=torch.uint8)
    parts = cut(codes.to(torch.uint8), 256)
    bits = torch.zeros((*parts.shape[:2], 2048 * 8), dtype=torch.uint8)
    for i, where in enumerate(code_places()):
        bits[:, :, where] = parts >> (3 - i) & 1
    tiles = torch.zeros((*parts.shape[:2], 2304), dtype=torch.uint8)
    for bit in range(8):
        tiles[:, :, :2048] |= bits[:, :, bit::8] << bit
    tiles[:, :, scale_places()] = cut(images[blocks.view(torch.uint8).int()], 16)
    return tiles


def cut(matrix: torch.Tensor, columns: int) -> torch.Tensor:
    """``[rows / 16, columns of tiles, 16 * columns]`` with zeros past the end."""
    n, k = matrix.shape
    padded = torch.nn.functional.pad(matrix, (0, -k % columns, 0, -n % 16))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, 16)).transpose(1, 2).flatten(2)


def expected(
    form: str, operands: dict[str, Any], dense: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``linear``, or ``gated_linear`` for two weights, gives in fp64 and in eager torch.

    ``operands`` come without weights, ``dense`` are those by their argument's name. Where the
    product runs in FP8, eager torch multiplies a quantised input too.
    """
    function = cases.gated_linear if "gate" in dense else cases.linear
    exact = function(**cases.double({**operands, **dense}))
    dtype = operands["x"].dtype
    plain = {name: matrix.to(dtype) for name, matrix in dense.items()}
    if not runs_in_fp8(form, operands["x"], *dense.values()):
        return exact, function(**operands, **plain)
    x = quantized(cases.prologue(**operands))
    before = ("x", "branch", "norm_")
    after = {name: v for name, v in operands.items() if not name.startswith(before)}
    return exact, function(x=x, **after, **plain)


def runs_in_fp8(form: str, x: torch.Tensor, *dense: torch.Tensor) -> bool:
    """Whether more rows than a launch takes are quantised as well."""
    if not x.is_cuda or torch.cuda.get_device_capability() < (8, 9):
        return False
    fits = all(size % 16 == 0 for matrix in dense for size in matrix.shape)
    return form == "fp8" and fits and x.shape[:-1].numel() > 8


def runs_in_the_kernel(form: str, x: torch.Tensor, *dense: torch.Tensor) -> bool:
    """Whether no bit of a weight is rounded."""
    return x.shape[:-1].numel() <= 32 and not runs_in_fp8(form, x, *dense)


def quantized(x: torch.Tensor) -> torch.Tensor:
    """Rows of ``x`` rounded to E4M3 with a scale each, in the dtype of ``x``."""
    scale = x.double().abs().amax(-1, keepdim=True).clamp(min=1e-30) / 448
    return ((x.double() / scale).float().to(torch.float8_e4m3fn).double() * scale).to(x.dtype)
