"""Arguments of ``load_model`` that can be checked before anything is loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..host import DTYPES
from .files import WHERE
from .hub import Hub


def refuse_unattached(**options: Any) -> None:
    """What only an attached model reads.

    Raises:
        ValueError: such an option, by name.
    """
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{WHERE}: attach must be True with {name}={shown(value)}, got False")


def shown(value: Any) -> str:
    """A value for a message; a model by its kind."""
    return f"a {type(value).__name__}" if isinstance(value, nn.Module) else repr(value)


def refuse_beside_module(hub: Hub, **options: Any) -> None:
    """What says where to load from has no meaning for a module.

    Raises:
        ValueError: such an option, by name.
    """
    for name, value in {**vars(hub), **options}.items():
        if value:
            raise ValueError(f"{WHERE}: {name} must be left out for a module, got {value!r}")


def checked_device(device: torch.device | str | None) -> torch.device | None:
    """The device asked for; None where none is.

    Raises:
        ValueError: neither a CPU nor a GPU that is there.
    """
    if device is None:
        return None
    try:
        place = torch.device(device)
    except RuntimeError:
        place = None
    if place is None or place.type not in ("cpu", "cuda"):
        raise ValueError(f"{WHERE}: device must be cpu, cuda or cuda:N, got {device!r}")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"{WHERE}: device must be one of the {torch.cuda.device_count()} GPUs that torch sees, "
            f"or cpu, got {str(device)!r}"
        )
    return place


def checked_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype asked for, by itself or by its name; None where none is.

    Raises:
        ValueError: it is none of ``DTYPES``.
    """
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and found not in DTYPES.values():
        raise ValueError(f"{WHERE}: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return found
