"""``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``: Mistral."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from ..schema.chat import Function
from .base import Call, TagParser, ToolParser, arguments_schema, call_of, quoted

BEGIN = "[TOOL_CALLS]"


class Bracketed:
    """A list of JSON objects behind a marker, up to the end of the answer."""

    signs = (BEGIN,)
    markers = (BEGIN,)

    def parser(self, tools: Sequence[Function]) -> ToolParser:
        """For one answer."""

        def read(text: str) -> list[Call] | None:
            try:
                found = json.loads(text)
            except (json.JSONDecodeError, RecursionError):
                return None
            if not isinstance(found, list) or not found:
                return None
            calls = [call_of(each, tools, "arguments") for each in found]
            return None if None in calls else [call for call in calls if call is not None]

        return TagParser(BEGIN, None, read)

    def lark(self, tools: Sequence[Function], *, many: bool, token: Callable[[str], str]) -> str:
        """A list of one call, or of some."""
        options = " | ".join(f"call_{i}" for i in range(len(tools)))
        repeat = '(", " one)*' if many else ""
        lines = [f'start: {token(BEGIN)} " "? "[" one {repeat} "]"', f"one: {options}"]
        for i, tool in enumerate(tools):
            head = quoted(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
            lines.append(f'call_{i}: {head} args_{i} "}}"')
            lines.append(f"args_{i}: %json {json.dumps(arguments_schema(tool))}")
        return "\n".join(lines)
