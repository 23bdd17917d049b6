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
    """Refuse what a kernel could not do: write where another of its blocks still reads.

    Raises:
        RuntimeError: an output shares memory with an operand or its own rows, other than ``out``
            with a residual that is the same rows.
    """
    if residual is not None and _same_memory(out, residual):
        residual = None
    reads = {"x": x, "branch": branch, "residual": residual}
    _check_written("out", out, reads)
    if residual_out is not None:
        _check_written("residual_out", residual_out, {**reads, "out": out})


def _check_written(name: str, written: torch.Tensor, reads: dict[str, torch.Tensor | None]) -> None:
    span = _Span(written)
    if span.count > 1 and span.pitch < span.row:
        raise RuntimeError(f"linear: rows of {name} must not share memory")
    for read_name, read in reads.items():
        if read is not None and span.overlaps(_Span(read)):
            raise RuntimeError(f"linear: {name} must not share memory with {read_name}")


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.data_ptr() == b.data_ptr()
        and a.dtype == b.dtype
        and (_Span(a).pitch == _Span(b).pitch or _Span(a).count == 1)
    )


class _Span:
    """Bytes of a tensor's rows: ``count`` rows of ``row`` bytes, ``pitch`` apart."""

    def __init__(self, rows: torch.Tensor) -> None:
        size, columns = rows.element_size(), rows.shape[-1]
        self.count = rows.numel() // columns
        self.pitch = (rows.stride(0) if rows.dim() == 2 else columns) * size
        self.row = columns * size
        self.start = rows.data_ptr()
        self.end = self.start + (self.count - 1) * self.pitch + self.row

    def overlaps(self, other: _Span) -> bool:
        """Whether any byte is in both; columns of one buffer with equal pitch share none."""
        if self.end <= other.start or other.end <= self.start:
            return False
        if self.pitch != other.pitch or self.pitch == 0:
            return True
        shift = (other.start - self.start) % self.pitch
        return shift < self.row or shift + other.row > self.pitch
