"""``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``: Mistral."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from ..schema.chat import Function
from .base import Call, How, TagParser, ToolParser, answer_rules, call_of, json_rules

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

    def lark(
        self, tools: Sequence[Function], *, how: How, token: Callable[[str], str | None]
    ) -> str | None:
        """A list of calls, behind which the answer ends."""
        repeat = "" if how == "one" else '(", " call)*'
        rest = f'" "? "[" call {repeat} "]"'
        if how == "free":
            rules = answer_rules(BEGIN, rest, how=how, between="", token=token)
            rules[0] = "start: lead rest | TEXT"
        else:
            rules = answer_rules(BEGIN, rest, how="one", between="", token=token)
        return "\n".join(rules + json_rules(tools, "arguments"))
