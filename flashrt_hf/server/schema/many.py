"""One or several texts or lists of token ids."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

MAX_ITEMS = 2048


def _kind(value: Any) -> str:
    """Which form a value has, by its first entry, so that one form alone is looked at."""
    if not isinstance(value, list) or not value:
        return "text"
    first = value[0]
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"


Ids = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
Lists = Annotated[list[Ids], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
OneOrMany = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[Lists, Tag("lists")],
    Discriminator(_kind),
]


def several(value: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Every text or list of ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value[0], int):
        return [value]
    return list(value)
