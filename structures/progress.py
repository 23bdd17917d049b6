"""Long work that somebody may want to watch: who loads a model shows a bar, others nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
# Wraps what is worked through, with words for it; as tqdm does.
Bar: TypeAlias = "Callable[[Sequence[Any], str], Iterable[Any]]"


def _no_bar(items: Sequence[Any], what: str) -> Iterable[Any]:
    return items


_bar: ContextVar[Bar] = ContextVar("flashrt_bar", default=_no_bar)


def watched(items: Sequence[T], what: str) -> Iterable[T]:
    """``items``, through the bar of whoever called."""
    return _bar.get()(items, what)


@contextmanager
def watching(bar: Bar) -> Iterator[None]:
    """Let ``bar`` wrap the long work of this block."""
    token = _bar.set(bar)
    try:
        yield
    finally:
        _bar.reset(token)
