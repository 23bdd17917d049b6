"""``/v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .base import SamplingRequest, Strict

MAX_MESSAGES = 10_000
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class TextPart(Strict):
    """Text in a message."""

    type: Literal["text"]
    text: str


Texts = Annotated[list[TextPart], Field(fail_fast=True)]


class ImageAddress(Strict):
    """Where an image is: a data URL, or a web address where the server allows those."""

    url: str
    detail: Literal["auto"] | None = None


class ImagePart(Strict):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: ImageAddress


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class SystemMessage(Strict):
    """Instructions."""

    role: Literal["system", "developer"]
    content: str | Texts
    name: str | None = None


class UserMessage(Strict):
    """What a user says and shows."""

    role: Literal["user"]
    content: str | Annotated[list[Part], Field(fail_fast=True)]
    name: str | None = None


class CalledFunction(Strict):
    """Name, and arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call that the model made in an earlier turn."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Strict):
    """An earlier answer; clients send back what they got, with empty fields."""

    role: Literal["assistant"]
    content: str | Texts | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ToolMessage(Strict):
    """What a called tool answered."""

    role: Literal["tool"]
    content: str | Texts
    tool_call_id: str


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class Function(Strict):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """A function by name."""

    name: str


class NamedTool(Strict):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Strict):
    """A JSON schema; output always follows it, so that ``strict`` changes nothing when true."""

    name: Name
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: Literal[True] | None = None


class SchemaFormat(Strict):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class ChatRequest(SamplingRequest):
    """Body of ``/v1/chat/completions``.

    ``chat_template_kwargs`` sets variables of the model's chat template.
    """

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
