"""``flash-rt explain MODEL``: what would run where, and why. Nothing is attached."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import typer

from ..host import MODEL_HELP, load_host
from . import DEVICE_HELP, DTYPE_HELP, placement, plain_errors


def command(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "",
    dtype: Annotated[str, typer.Option(help=DTYPE_HELP)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="print the rows as JSON")] = False,
) -> None:
    """Print FlashRT's decision for every region of a model."""
    from flash_rt import structures

    place, kind = placement(device, dtype)
    with plain_errors():
        host = load_host(model, device=place, dtype=kind)
        table = structures.explain(structures.plan(host))
    if as_json:
        rows = [_row(row) for row in table]
        print(json.dumps(dict(rows=rows, notes=list(table.notes)), indent=1))
    else:
        print(table)


def _row(decision: Any) -> dict[str, Any]:
    return dict(decision=type(decision).__name__, **dataclasses.asdict(decision))
