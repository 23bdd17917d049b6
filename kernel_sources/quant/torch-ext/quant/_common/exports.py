"""What a family says when it is asked for a name that it does not have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn


def unknown_name(family: str, exported: Sequence[str]) -> Callable[[str], NoReturn]:
    """The ``__getattr__`` of a family's module.

    Its ``AttributeError`` reads ``"family: no kernel 'name'; it has a, b, c"``.
    """

    def refuse(name: str) -> NoReturn:
        raise AttributeError(f"{family}: no kernel {name!r}; it has {', '.join(sorted(exported))}")

    return refuse
