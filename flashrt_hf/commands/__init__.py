"""Commands of ``flash-rt``, one file each."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Print what a user can mend (a name, a size, a model that cannot run) as one message."""
    import typer

    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        print(f"flash-rt: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
