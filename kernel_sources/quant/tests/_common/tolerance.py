"""How close a kernel must be, in one place: tolerances come from a baseline, never from taste.

A result passes when its error against an exact (fp32 or fp64) computation is at most twice the
error that the same-dtype eager computation makes, in the maximum and in root mean square. One
rounding into the result's dtype is always granted, as no kernel can avoid it. An fp32 result is
granted ``FP32_ROUNDINGS``: its sums round at every step, in an order that each processor picks, so
both errors are a few draws of chance and neither bounds the other.
"""

from __future__ import annotations

import torch

MAX_FACTOR = 2.0
RMS_FACTOR = 1.5
FP32_ROUNDINGS = 8
INTEGER_VIEW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to nearest: 2**-8 for bf16, 2**-11 for fp16."""
    return torch.finfo(dtype).eps / 2


def granted(dtype: torch.dtype) -> float:
    """Relative error that a result of ``dtype`` may always have."""
    return unit_roundoff(dtype) * (FP32_ROUNDINGS if dtype == torch.float32 else 1)


def assert_accurate(actual: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor) -> None:
    """``actual`` errs against ``exact`` at most twice as much as ``eager`` does.

    Args:
        actual: the kernel's result.
        exact: the same computation in fp32 or fp64, any device.
        eager: the same computation by torch in the dtype of ``actual``.
    """
    assert actual.shape == exact.shape == eager.shape, (actual.shape, exact.shape, eager.shape)
    assert actual.dtype == eager.dtype, (actual.dtype, eager.dtype)
    if actual.numel() == 0:
        return
    exact64 = exact.double().cpu()
    actual64, eager64 = actual.double().cpu(), eager.double().cpu()
    finite = exact64.isfinite() & (exact64.abs() <= torch.finfo(actual.dtype).max)
    where = (actual64.isfinite() != finite).nonzero()
    assert len(where) == 0, f"finite where exact is not, or the reverse, first at {where[0]}"
    zero = torch.zeros((), dtype=torch.float64)
    error = torch.where(finite, actual64 - exact64, zero)
    baseline = torch.where(finite & eager64.isfinite(), eager64 - exact64, zero)
    magnitude = torch.where(finite, exact64, zero)
    rounding = granted(actual.dtype)

    largest = MAX_FACTOR * baseline.abs().max() + rounding * magnitude.abs().max()
    worst = int(error.abs().argmax())
    assert error.abs().max() <= largest, (
        f"error {error.flatten()[worst].item():.3e} at {_coordinate(error, worst)}: "
        f"got {actual64.flatten()[worst].item()}, exact {exact64.flatten()[worst].item()}, "
        f"allowed {largest.item():.3e}"
    )
    allowed_rms = RMS_FACTOR * _rms(baseline) + rounding / 2 * _rms(magnitude)
    assert _rms(error) <= allowed_rms, f"rms error {_rms(error):.3e}, allowed {allowed_rms:.3e}"


def assert_bitwise(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal in every bit; NaN payloads and signs of zero count."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    differs = _bits(actual) != _bits(expected).to(actual.device)
    if bool(differs.any()):
        first = int(differs.flatten().int().argmax())
        raise AssertionError(
            f"{int(differs.sum())} of {differs.numel()} elements differ, first at "
            f"{_coordinate(actual, first)}: {actual.flatten()[first].item()} against "
            f"{expected.flatten()[first].item()}"
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(INTEGER_VIEW[tensor.element_size()])


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.square().mean().sqrt())


def _coordinate(tensor: torch.Tensor, flat: int) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), tensor.shape))
