"""What a form of calls has: signs in the template, a parser, a grammar."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ..schema.chat import Function
from ..text import overlap

How = Literal["one", "some", "free"]  # a call alone, calls alone, prose with calls in it
ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class Call:
    """One call; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


class ToolParser(Protocol):
    """Takes the text of one answer in pieces and tells prose from calls."""

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Prose and calls that are certain now."""

    def flush(self) -> tuple[str, list[Call]]:
        """The rest; what looked like a call and is none comes back as prose."""


class ToolFormat(Protocol):
    """A form of calls.

    Attributes:
        signs: texts that a chat template of this form contains.
        markers: texts that are tokens of their own in some vocabularies, and must then be read.
    """

    @property
    def signs(self) -> tuple[str, ...]: ...

    @property
    def markers(self) -> tuple[str, ...]: ...

    def parser(self, tools: Sequence[Function]) -> ToolParser:
        """For one answer."""

    def lark(
        self, tools: Sequence[Function], *, how: How, token: Callable[[str], str | None]
    ) -> str | None:
        """Grammar of an answer; None where the form has none that leaves room for prose.

        ``token`` is the term of a marker that is a token of its own, None for plain text.
        """


def new_id() -> str:
    """Nine letters and digits, which every template accepts."""
    return secrets.token_hex(5)[:9]


def arguments_schema(tool: Function) -> dict[str, Any]:
    """JSON schema of a function's arguments."""
    return tool.parameters or ANY_ARGUMENTS


def quoted(text: str) -> str:
    """A text as a term of a lark grammar."""
    return json.dumps(text)


def json_rules(tools: Sequence[Function], key: str) -> list[str]:
    """Rules ``call``, and what it needs, of ``{"name": ..., key: {...}}`` for one of the tools."""
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        head = quoted(f'{{"name": {json.dumps(tool.name)}, "{key}": ')
        rules.append(f'call_{i}: {head} args_{i} "}}"')
        rules.append(f"args_{i}: %json {json.dumps(arguments_schema(tool))}")
    return rules


def answer_rules(
    begin: str, rest: str, *, how: How, between: str, token: Callable[[str], str | None]
) -> list[str]:
    """Rules ``start`` and what it needs for calls that open with ``begin`` and go on with ``rest``.

    ``between`` stands between two calls.
    """
    marker = token(begin)
    if how == "free":
        # Prose ends at the first marker: behind it nothing but a call may come.
        lead = f"lead: TEXT {marker}" if marker else f"lead[lazy]: TEXT {quoted(begin)}"
        return ["start: (lead rest)* TEXT", f"rest: {rest}", lead, r"TEXT: /(.|\n)*/"]
    repeat = f"({quoted(between)} one)*" if how == "some" else ""
    return [f"start: one {repeat}", f"one: {marker or quoted(begin)} {rest}"]


def json_call(text: str, tools: Sequence[Function], key: str) -> Call | None:
    """The call in ``{"name": ..., key: {...}}``; None when it is none of these tools."""
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return None
    return call_of(found, tools, key)


def call_of(found: Any, tools: Sequence[Function], key: str) -> Call | None:
    """The call that a parsed object stands for."""
    if not isinstance(found, dict) or found.get("name") not in {tool.name for tool in tools}:
        return None
    arguments = found.get(key, {})
    if not isinstance(arguments, dict):
        return None
    return Call(new_id(), found["name"], json.dumps(arguments, ensure_ascii=False))


class TagParser:
    """Calls between two markers, each read by ``read``; all else is prose.

    An ``end`` of None stands for the end of the answer.
    """

    def __init__(
        self, begin: str, end: str | None, read: Callable[[str], list[Call] | None]
    ) -> None:
        self._begin, self._end, self._read = begin, end, read
        self._held, self._inside, self._called = "", False, False

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Prose and calls that are certain now."""
        self._held += text
        prose: list[str] = []
        calls: list[Call] = []
        while True:
            if not self._inside:
                place = self._held.find(self._begin)
                if place < 0:
                    cut = len(self._held) - overlap(self._held, self._begin)
                    prose.append(self._prose(self._held[:cut]))
                    self._held = self._held[cut:]
                    break
                prose.append(self._prose(self._held[:place]))
                self._held, self._inside = self._held[place + len(self._begin) :], True
            end = -1 if self._end is None else self._held.find(self._end)
            if end < 0:
                break
            assert self._end is not None
            inner, self._held = self._held[:end], self._held[end + len(self._end) :]
            self._inside = False
            read = self._read(inner)
            if read is None:
                prose.append(f"{self._begin}{inner}{self._end}")
            else:
                self._called = True
                calls += read
        return "".join(prose), calls

    def flush(self) -> tuple[str, list[Call]]:
        """The rest."""
        held, self._held = self._held, ""
        if not self._inside:
            return self._prose(held), []
        self._inside = False
        read = self._read(held)
        return (self._begin + held, []) if read is None else ("", read)

    def _prose(self, text: str) -> str:
        """Line breaks between calls belong to their form."""
        return "" if self._called and not text.strip() else text
