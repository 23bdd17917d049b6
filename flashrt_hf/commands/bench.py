"""``flash-rt bench``: hands its arguments to the benchmark's own parser."""

from __future__ import annotations

from typing import Annotated

import typer

# The benchmark's parser knows the options, and runs where typer is missing.
CONTEXT = {"ignore_unknown_options": True, "help_option_names": []}


def command(
    arguments: Annotated[list[str] | None, typer.Argument(help="see flash-rt bench --help")] = None,
) -> None:
    """Measure FlashRT and its peers and write a record."""
    from ..bench.command import main

    main(arguments or [])
