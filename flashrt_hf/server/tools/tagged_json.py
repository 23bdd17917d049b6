"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from ..schema.chat import Function
from .base import Call, TagParser, ToolParser, arguments_schema, json_call, quoted

BEGIN, END = "<tool_call>", "</tool_call>"


class TaggedJson:
    """A JSON object between tags."""

    signs = (BEGIN, "arguments")
    markers = (BEGIN, END)

    def parser(self, tools: Sequence[Function]) -> ToolParser:
        """For one answer."""

        def read(text: str) -> list[Call] | None:
            call = json_call(text, tools, "arguments")
            return None if call is None else [call]

        return TagParser(BEGIN, END, read)

    def lark(self, tools: Sequence[Function], *, many: bool, token: Callable[[str], str]) -> str:
        """One call, or calls on lines of their own."""
        options = " | ".join(f"call_{i}" for i in range(len(tools)))
        repeat = '("\\n" one)*' if many else ""
        lines = [
            f"start: one {repeat}",
            f'one: {token(BEGIN)} "\\n" ({options}) "\\n" {token(END)}',
        ]
        for i, tool in enumerate(tools):
            head = quoted(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
            lines.append(f'call_{i}: {head} args_{i} "}}"')
            lines.append(f"args_{i}: %json {json.dumps(arguments_schema(tool))}")
        return "\n".join(lines)
