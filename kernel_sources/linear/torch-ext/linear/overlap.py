"""Which operands may share memory, on the CPU; torch_binding.cpp asks the same on CUDA."""

from __future__ import annotations

import torch


def check_overlap(
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
    x: torch.Tensor,
    branch: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> None:
    """Refuse what a kernel could not do: write where another of its blocks still reads."""
    in_place = (
        residual is not None
        and residual.data_ptr() == out.data_ptr()
        and residual.dtype == out.dtype
        and (residual.stride(0) == out.stride(0) or out.shape[0] == 1)
    )
    for name, written in (("out", out), ("residual_out", residual_out)):
        if written is not None and written.shape[0] > 1 and written.stride(0) < written.shape[1]:
            raise RuntimeError(f"linear: rows of {name} must not share memory")
    pairs = [("out", out, "x", x), ("out", out, "branch", branch)]
    if not in_place:
        pairs.append(("out", out, "residual", residual))
    pairs += [
        ("residual_out", residual_out, name, t)
        for name, t in (("x", x), ("branch", branch), ("residual", residual), ("out", out))
    ]
    for written_name, written, read_name, read in pairs:
        if written is not None and read is not None and _overlap(written, read):
            raise RuntimeError(f"linear: {written_name} must not share memory with {read_name}")


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two row-major matrices share an element; columns of one buffer do not."""
    start_a, start_b = a.data_ptr(), b.data_ptr()
    pitch_a, pitch_b = a.stride(0) * a.element_size(), b.stride(0) * b.element_size()
    row_a, row_b = a.shape[1] * a.element_size(), b.shape[1] * b.element_size()
    end_a = start_a + (a.shape[0] - 1) * pitch_a + row_a
    end_b = start_b + (b.shape[0] - 1) * pitch_b + row_b
    if end_a <= start_b or end_b <= start_a:
        return False
    if pitch_a == pitch_b and pitch_a > 0:
        shift = (start_b - start_a) % pitch_a
        return not (row_a <= shift and shift + row_b <= pitch_a)
    return True
