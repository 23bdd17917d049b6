"""``<tool_call><function=name><parameter=key>value</parameter></function>``: Qwen3-Coder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from ..schema.chat import Function
from .base import Call, How, TagParser, ToolParser, answer_rules, arguments_schema, new_id, quoted

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


class FunctionTags:
    """Tags for function and parameters; values of strings are bare, others are JSON."""

    signs = (BEGIN, "<function=", "<parameter=")
    markers = (BEGIN, END)

    def parser(self, tools: Sequence[Function]) -> ToolParser:
        """For one answer."""
        by_name = {tool.name: tool for tool in tools}

        def read(text: str) -> list[Call] | None:
            found = FUNCTION.fullmatch(text)
            if found is None or found[1] not in by_name:
                return None
            if PARAMETER.sub("", found[2]).strip():
                return None
            properties = _properties(by_name[found[1]])
            given = {
                part[1]: _value(part[2], properties.get(part[1]))
                for part in PARAMETER.finditer(found[2])
            }
            return [Call(new_id(), found[1], json.dumps(given, ensure_ascii=False))]

        return TagParser(BEGIN, END, read)

    def lark(
        self, tools: Sequence[Function], *, how: How, token: Callable[[str], str | None]
    ) -> str | None:
        """Parameters in the schema's order, the required ones always."""
        rest = f'"\\n" call "\\n" {token(END) or quoted(END)}'
        rules = answer_rules(BEGIN, rest, how=how, between="\n", token=token)
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
        rules.append('value[suffix="\\n</parameter>\\n"]: /(.|\\n)*/')
        for i, tool in enumerate(tools):
            names = []
            required = arguments_schema(tool).get("required")
            required = required if isinstance(required, list) else []
            for j, (key, schema) in enumerate(_properties(tool).items()):
                names.append(f"value_{i}_{j}" if key in required else f"value_{i}_{j}?")
                rules += _value_rules(f"{i}_{j}", key, schema)
            head = quoted(f"<function={tool.name}>\n")
            rules.append(f'call_{i}: {head} {" ".join(names)} "</function>"')
        return "\n".join(rules)


def _value_rules(number: str, key: str, schema: Any) -> list[str]:
    """Rule ``value_<number>``: a parameter with a value that its schema allows."""
    head, end = quoted(f"<parameter={key}>\n"), quoted("\n</parameter>\n")
    if _words(schema):
        options = " | ".join(quoted(word) for word in _words(schema))
        return [f"value_{number}: {head} ({options}) {end}"]
    if _is_text(schema):
        return [f"value_{number}: {head} value"]
    return [
        f"value_{number}: {head} json_{number} {end}",
        f"json_{number}: %json {json.dumps(schema)}",
    ]


def _properties(tool: Function) -> dict[str, Any]:
    found = arguments_schema(tool).get("properties", {})
    return found if isinstance(found, dict) else {}


def _is_text(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return True
    return schema.get("type", "string") == "string" and (
        "enum" not in schema or bool(_words(schema))
    )


def _words(schema: Any) -> list[str]:
    """The texts that a schema allows; none where it allows others."""
    found = schema.get("enum") if isinstance(schema, dict) else None
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        return []
    return found


def _value(text: str, schema: Any) -> Any:
    if _is_text(schema):
        return text
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return text
