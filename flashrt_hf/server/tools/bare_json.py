"""An answer that is ``{"name": ..., "parameters": {...}}`` and nothing else: Llama 3."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..schema.chat import Function
from .base import Call, How, ToolParser, json_call, json_rules

MARKER = "<|python_tag|>"


class BareJson:
    """One JSON object, with or without a marker in front."""

    signs = ('{"name": function name, "parameters": ',)
    markers = (MARKER,)

    def parser(self, tools: Sequence[Function]) -> ToolParser:
        """For one answer."""
        return _WholeAnswer(tools)

    def lark(
        self, tools: Sequence[Function], *, how: How, token: Callable[[str], str | None]
    ) -> str | None:
        """One call; this form has no list of them, and no mark to tell a call from prose."""
        if how == "free":
            return None
        return "\n".join(["start: call", *json_rules(tools, "parameters")])


class _WholeAnswer:
    """Holds an answer that begins like an object back to its end."""

    def __init__(self, tools: Sequence[Function]) -> None:
        self._tools, self._held, self._prose = tools, "", False

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Prose as soon as it is certain to be prose."""
        if self._prose:
            return text, []
        self._held += text
        start = self._held.lstrip()
        if not start or start.startswith(("{", MARKER)) or MARKER.startswith(start):
            return "", []
        self._prose, held, self._held = True, self._held, ""
        return held, []

    def flush(self) -> tuple[str, list[Call]]:
        """The call, or the prose that it was after all."""
        held, self._held = self._held, ""
        call = json_call(held.strip().removeprefix(MARKER), self._tools, "parameters")
        return (held, []) if call is None else ("", [call])
