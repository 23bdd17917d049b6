"""Commands of ``flash-rt``, one file each."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..host import DTYPES, default_device

if TYPE_CHECKING:
    import torch

DEVICE_HELP = "default: the first GPU, else cpu"
DTYPE_HELP = f"{', '.join(DTYPES)}; default: the checkpoint's own on a GPU, fp32 on a CPU"
PRECISION_HELP = "auto, bf16, fp8, int8 or nvfp4"


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Print what a user can mend (a name, a size, a missing build) as one message."""
    import typer

    from flash_rt.structures.kernels import KernelUnavailable

    try:
        yield
    except (ValueError, FileNotFoundError, ImportError, MemoryError, KernelUnavailable) as error:
        print(f"flash-rt: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def placement(device: str, dtype: str) -> tuple[torch.device, torch.dtype | None]:
    """Where a model goes and what its parameters are cast to; empty text means the default.

    None as the dtype is the checkpoint's own, see ``load_handle``.

    Raises:
        typer.BadParameter: no such device, or a dtype that is not in ``DTYPES``.
    """
    import torch
    import typer

    if dtype and dtype not in DTYPES:
        raise typer.BadParameter(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    try:
        place = torch.device(device) if device else default_device()
    except RuntimeError:
        place = None
    if place is None or place.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"device must be cpu, cuda or cuda:N, got {device!r}")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter(f"device must be cpu, as torch sees no GPU, got {device!r}")
    return place, DTYPES[dtype] if dtype else None
