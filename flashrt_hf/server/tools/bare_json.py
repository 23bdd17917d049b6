"""An answer that is ``{"name": ..., "parameters": {...}}`` and nothing else: Llama 3."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from ..schema.chat import Function
from .base import Call, ToolParser, arguments_schema, json_call, quoted

MARKER = "<|python_tag|>"


class BareJson:
    """One JSON object, with or without a marker in front."""

    signs = ('{"name": function name, "parameters": ',)
    markers = (MARKER,)

    def parser(self, tools: Sequence[Function]) -> ToolParser:
        """For one answer."""
        return _WholeAnswer(tools)

    def lark(self, tools: Sequence[Function], *, many: bool, token: Callable[[str], str]) -> str:
        """One call; this form has no list of them."""
        options = " | ".join(f"call_{i}" for i in range(len(tools)))
        lines = [f"start: {options}"]
        for i, tool in enumerate(tools):
            head = quoted(f'{{"name": {json.dumps(tool.name)}, "parameters": ')
            lines.append(f'call_{i}: {head} args_{i} "}}"')
            lines.append(f"args_{i}: %json {json.dumps(arguments_schema(tool))}")
        return "\n".join(lines)


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
