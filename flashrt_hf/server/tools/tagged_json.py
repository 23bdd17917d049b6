"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..schema.chat import Function
from .base import Call, How, TagParser, ToolParser, answer_rules, json_call, json_rules, quoted

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

    def lark(
        self, tools: Sequence[Function], *, how: How, token: Callable[[str], str | None]
    ) -> str | None:
        """Calls on lines of their own."""
        rest = f'"\\n" call "\\n" {token(END) or quoted(END)}'
        rules = answer_rules(BEGIN, rest, how=how, between="\n", token=token)
        return "\n".join(rules + json_rules(tools, "arguments"))
