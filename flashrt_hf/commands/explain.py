"""``flash-rt explain MODEL``: what would run where, and why. Nothing is attached."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer

from ..host import DTYPES, MODEL_HELP, default_device, default_dtype, load_host
from . import plain_errors


def command(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    device: Annotated[str, typer.Option(help="default: the first GPU, else cpu")] = "",
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}; default: bf16 on a GPU")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print the rows as JSON")] = False,
) -> None:
    """Print FlashRT's decision for every region of a model."""
    import torch

    from flash_rt import structures

    if dtype and dtype not in DTYPES:
        raise typer.BadParameter(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    place = torch.device(device) if device else default_device()
    with plain_errors():
        kind = DTYPES[dtype] if dtype else default_dtype(place)
        host = load_host(model, device=place, dtype=kind)
        table = structures.explain(structures.plan(host))
    if as_json:
        rows = [_row(row) for row in table]
        print(json.dumps(dict(rows=rows, notes=list(table.notes)), indent=1))
    else:
        print(table)


def _row(decision: Any) -> dict[str, Any]:
    return dict(decision=type(decision).__name__, **dataclasses.asdict(decision))
