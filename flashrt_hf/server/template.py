"""Messages into the model's prompt, by its own chat template."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
from transformers import PreTrainedTokenizerBase

from .errors import bad, unsupported
from .schema.chat import (
    AssistantMessage,
    ImagePart,
    Message,
    SystemMessage,
    TextPart,
    Tool,
    ToolMessage,
)

OWN_VARIABLES = {
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    *("messages", "tools", "documents", "add_generation_prompt", "raise_exception"),
    *("strftime_now", "bos_token", "eos_token", "namespace", "range"),
}


class ChatTemplate:
    """A chat template with what it knows of.

    Attributes:
        text: the template; None where the model has none.
    """

    def __init__(self, owner: Any) -> None:
        """``owner`` is a tokenizer or processor."""
        self._owner = owner
        found = getattr(owner, "chat_template", None)
        if isinstance(found, dict):
            found = found.get("tool_use") or found.get("default")
        self.text: str | None = found
        self._variables: set[str] = set()
        if found:
            environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", _GenerationTag])
            self._variables = jinja2.meta.find_undeclared_variables(environment.parse(found))

    def check_variables(self, given: Mapping[str, Any], prefix: str) -> None:
        """Refuse variables that the template does not read.

        Raises:
            ApiError: 400 with the first one's name.
        """
        for name in given:
            if name in OWN_VARIABLES or name not in self._variables:
                why = "the model's chat template has no such variable"
                raise unsupported(f"{prefix}{name}", why)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool],
        variables: Mapping[str, Any],
        images: bool,
    ) -> str:
        """The prompt as text.

        Raises:
            ApiError: 400, the model has no template, or its template refuses the messages.
        """
        if self.text is None:
            raise bad(
                "The model has no chat template; use /v1/completions", "messages", "no_template"
            )
        plain = [_plain(message, images=images) for message in messages]
        name_tool_messages(plain)
        try:
            text: str = self._owner.apply_chat_template(
                plain,
                tools=[tool.model_dump(exclude_none=True) for tool in tools] or None,
                chat_template=self.text,
                add_generation_prompt=True,
                tokenize=False,
                **variables,
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError, IndexError) as error:
            raise bad(
                f"The model's chat template does not take these messages: {error}", "messages"
            ) from None
        return text


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}``, which marks answers in templates for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        parser.stream.skip()
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _plain(message: Message, *, images: bool) -> dict[str, Any]:
    """A message as chat templates read it."""
    role = "system" if isinstance(message, SystemMessage) else message.role
    plain: dict[str, Any] = {"role": role, "content": _content(message.content, images)}
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
    elif message.name is not None:
        plain["name"] = message.name
    if isinstance(message, AssistantMessage) and message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return plain


def _content(content: str | Sequence[TextPart | ImagePart] | None, images: bool) -> Any:
    if content is None or (isinstance(content, str) and not images):
        return content or ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if images:
        return [
            {"type": "image"}
            if isinstance(part, ImagePart)
            else {"type": "text", "text": part.text}
            for part in content
        ]
    return "\n".join(part.text for part in content if isinstance(part, TextPart))


def _arguments(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (json.JSONDecodeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise bad(
            f"Arguments of a tool call must be the JSON text of an object, got {text[:100]!r}",
            "messages",
        )
    return found


def name_tool_messages(messages: Sequence[dict[str, Any]]) -> None:
    """Give every tool message the name of the function it answers; some templates print it."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        known = names.get(message.get("tool_call_id", ""))
        if message["role"] == "tool" and known is not None:
            message["name"] = known
