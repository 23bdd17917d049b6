"""FP8 by enumeration: what an op with FP8 output must write, from the result that it quantises."""

from __future__ import annotations

import torch
from _common.tolerance import assert_bitwise

FP8 = torch.float8_e4m3fn


def quantised(
    y: torch.Tensor, static: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 bytes of ``y`` (on the CPU) and the scale.

    The nearest of all values in fp64, the even byte in a tie; the scale of each row is
    ``max(abs(y)) / 448`` unless ``static`` is given.
    """
    scale, divisor = static, static
    if static is None:
        magnitude = y.float().abs().amax(-1)
        scale = torch.where(magnitude > 0, magnitude / torch.full_like(magnitude, 448), 1.0)
        divisor = scale[..., None]
    quotient = (y.float() / divisor).double().cpu()
    grid = torch.arange(0x7F, dtype=torch.uint8).view(FP8).double()
    middles = (grid[1:] + grid[:-1]) / 2
    sizes = quotient.abs().clamp(max=448)
    code = torch.bucketize(sizes, middles)
    tie = (code < len(middles)) & (sizes == middles[code.clamp(max=len(middles) - 1)])
    code = torch.where(tie & (code % 2 == 1), code + 1, code).to(torch.uint8)
    return code | (torch.signbit(quotient).to(torch.uint8) << 7), scale


def assert_quantised(
    actual: tuple[torch.Tensor, torch.Tensor], y: torch.Tensor, static: torch.Tensor | None = None
) -> None:
    """``actual`` is the E4M3 of ``y`` and its scale, in every bit."""
    code, scale = quantised(y, static)
    assert actual[0].dtype == FP8
    assert_bitwise(actual[0].view(torch.uint8).cpu(), code)
    assert_bitwise(actual[1], scale)
