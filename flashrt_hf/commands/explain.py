"""``flash-rt explain MODEL``: what would run where, and why. Nothing is attached."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..host import MODEL_HELP, load_handle
from . import DEVICE_HELP, DTYPE_HELP, PRECISION_HELP, placement, plain_errors

if TYPE_CHECKING:
    from flash_rt.structures.explain import Table

HEAD = ("region", "decision", "structure", "precision")
UNNAMED = ("kernels", "reason")  # cells that say themselves what they are


def command(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    precision: Annotated[str, typer.Option(help=PRECISION_HELP)] = "auto",
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "",
    dtype: Annotated[str, typer.Option(help=DTYPE_HELP)] = "",
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit on the Hub")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="run the checkpoint's own Python")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the rows as JSON")] = False,
) -> None:
    """Print FlashRT's decision for every region of a model."""
    import torch

    from flash_rt import structures

    place, kind = placement(device, dtype)
    packs = precision not in ("auto", "bf16")  # which would not need the whole model on a GPU
    with plain_errors():
        handle = load_handle(
            model,
            device=place,
            dtype=kind,
            home=torch.device("cpu") if packs else None,
            revision=revision,
            trust_remote_code=trust_remote_code,
            attach=False,
        )
        table = structures.explain(structures.plan(handle, precision=precision, device=place))
    if as_json:
        rows = [_row(row) for row in table]
        print(json.dumps(dict(rows=rows, notes=list(table.notes)), indent=1))
    elif sys.stdout.isatty():
        print(fitted(table, shutil.get_terminal_size().columns))
    else:
        print(table)


def fitted(table: Table, width: int) -> str:
    """A table within ``width`` columns: the rest of a row stands wrapped below its beginning."""
    from flash_rt.structures.explain import COLUMNS

    head = [COLUMNS.index(name) for name in HEAD]
    lines = [COLUMNS, *table.cells()]
    widths = [max(len(line[i]) for line in lines) for i in head]
    text = []
    for number, line in enumerate(lines):
        first = "  ".join(line[i].ljust(w) for i, w in zip(head, widths, strict=True)).rstrip()
        text += _wrapped(first, width)
        rest = [
            cell if name in UNNAMED else f"{name} {cell}"
            for name, cell in zip(COLUMNS, line, strict=True)
            if name not in HEAD and cell and number
        ]
        text += _wrapped(", ".join(rest), width, indent="    ")
    return "\n".join([*text, *(row for note in table.notes for row in _wrapped(note, width))])


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent or "    ",
        replace_whitespace=False,
        drop_whitespace=True,
        break_on_hyphens=False,
    )


def _row(decision: Any) -> dict[str, Any]:
    return dict(decision=type(decision).__name__, **dataclasses.asdict(decision))
