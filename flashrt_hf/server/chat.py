"""``/v1/chat/completions``: from a checked request to an answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flash_rt.structures.loops.generation import GenerationRequest, TokenEvent

from .answer import Answer, Piece
from .config import ServerConfig
from .errors import bad, unsupported
from .exchange import TextExchange
from .grammar import json_grammar, mask_factory
from .images import Images
from .sampling import generation_request
from .schema.chat import (
    ChatRequest,
    Function,
    ImagePart,
    NamedTool,
    ObjectFormat,
    SchemaFormat,
    UserMessage,
)
from .served import Served
from .text import Codec
from .tools import Call, How, ToolFormat
from .wire import Head, token_entry


@dataclass(frozen=True)
class ChatPlan:
    """A chat request, ready for the engine."""

    request: GenerationRequest
    inputs: Any
    answers: list[Answer]


def prepare(body: ChatRequest, model: Served, config: ServerConfig, images: Images) -> ChatPlan:
    """Render, tokenise and check; takes time, and no model.

    Raises:
        ApiError: 400 with the parameter at fault.
    """
    codec = model.codec
    assert codec is not None and model.template is not None
    tools = _tools(body, model.tools)
    forced = body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)
    if body.tool_choice == "none":
        tools = []
    prompt_ids, inputs = _prompt(body, model, images, offered=bool(tools))
    mask = _mask(body, codec, model.tools, tools, forced=forced)
    limit = body.max_completion_tokens or body.max_tokens
    request = generation_request(
        body,
        prompt_ids,
        codec=codec,
        defaults=model.defaults,
        max_len=model.max_len,
        config=config,
        max_new=limit,
        logprobs=_logprobs(body),
        mask=mask,
        limit_param="messages" if limit is None else "max_completion_tokens",
    )
    markers = model.tools.markers if model.tools and tools else ()
    keep = [found for found in map(codec.special_id, markers) if found is not None]
    answers = [
        Answer(
            codec,
            stops=body.stops,
            stop_ids=request.stop_token_ids or (),
            parser=model.tools.parser(tools) if model.tools and tools else None,
            keep=keep,
            one_call=body.parallel_tool_calls is False,
        )
        for _ in range(request.n)
    ]
    return ChatPlan(request, inputs, answers)


def quick(body: ChatRequest) -> bool:
    """Whether ``prepare`` has no grammar to compile and no image to read."""
    plain = all(isinstance(message.content, (str, type(None))) for message in body.messages)
    return plain and not body.tools and body.response_format is None


def has_images(body: ChatRequest) -> bool:
    """Whether ``prepare`` reads images, perhaps from elsewhere."""
    return any(
        isinstance(part, ImagePart)
        for message in body.messages
        if isinstance(message.content, (list, tuple))
        for part in message.content
    )


def _tools(body: ChatRequest, form: ToolFormat | None) -> list[Function]:
    if not body.tools:
        for name in ("tool_choice", "parallel_tool_calls"):
            if getattr(body, name) not in (None, "none", "auto"):
                raise bad(f"{name!r} needs 'tools', got none", name)
        return []
    if form is None:
        raise unsupported("tools", "the model's chat template has no form of tools that is known")
    tools = [tool.function for tool in body.tools]
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad("Names of 'tools' must differ", "tools")
    if isinstance(body.tool_choice, NamedTool):
        wanted = body.tool_choice.function.name
        tools = [tool for tool in tools if tool.name == wanted]
        if not tools:
            raise bad(f"'tool_choice' must name one of {names}, got {wanted!r}", "tool_choice")
    return tools


def _prompt(
    body: ChatRequest, model: Served, images: Images, *, offered: bool
) -> tuple[list[int], Any]:
    assert model.template is not None and model.codec is not None
    variables = dict(body.chat_template_kwargs or {})
    model.template.check_variables(variables, "chat_template_kwargs.")
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
        model.template.check_variables({"reasoning_effort": 0}, "")
    urls = [
        part.image_url.url
        for message in body.messages
        if isinstance(message, UserMessage) and not isinstance(message.content, str)
        for part in message.content
        if isinstance(part, ImagePart)
    ]
    if urls and model.vision is None:
        raise unsupported("messages.content.image_url", "the model does not take images")
    text = model.template.render(
        body.messages,
        tools=(body.tools or []) if offered else [],
        variables=variables,
        images=model.vision is not None,
    )
    if urls:
        assert model.vision is not None
        return model.vision.inputs(text, images.read(urls))
    ids: list[int] = model.codec.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids, None


def _mask(
    body: ChatRequest,
    codec: Codec,
    form: ToolFormat | None,
    tools: Sequence[Function],
    *,
    forced: bool,
) -> Callable[[], Any] | None:
    shape = body.response_format
    constrains = isinstance(shape, (ObjectFormat, SchemaFormat))
    if constrains and tools:
        raise bad("'response_format' and 'tools' cannot be used together", "response_format")
    if isinstance(shape, SchemaFormat):
        param = "response_format.json_schema.schema"
        schema = shape.json_schema.schema_
        return mask_factory(codec, json_grammar(schema, param), param, given=schema)
    if isinstance(shape, ObjectFormat):
        grammar = json_grammar({"type": "object"}, "")
        return mask_factory(codec, grammar, "response_format", given=shape.type)
    if not (forced or any(tool.strict for tool in tools)):
        return None
    assert form is not None
    for tool in tools:
        json_grammar(tool.parameters or {}, "tools.function.parameters")
    several = body.tool_choice == "required" and body.parallel_tool_calls is not False
    how: How = "free" if not forced else "some" if several else "one"

    def token(text: str) -> str | None:
        special = codec.special_id(text)
        return None if special is None else f"<[{special}]>"

    lark = form.lark(tools, how=how, token=token)
    if lark is None:
        why = "the model's form of calls can be constrained with tool_choice 'required' only"
        raise unsupported("tools.function.strict", why)
    return mask_factory(codec, lark, "tools", given=[tool.name for tool in tools])


def _logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise bad("'top_logprobs' needs 'logprobs': true", "top_logprobs")
    return None


async def chunks(
    exchange: TextExchange, body: ChatRequest, codec: Codec, head: Head
) -> AsyncGenerator[dict[str, Any], None]:
    """A stream's events."""
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    begun: set[int] = set()
    calls: dict[int, int] = {}
    async for choice, piece in exchange.pieces():
        deltas: list[dict[str, Any]] = []
        if choice not in begun:
            begun.add(choice)
            deltas.append({"role": "assistant", "content": ""})
        if piece.text:
            deltas.append({"content": piece.text})
        for call in piece.calls:
            number = calls.get(choice, 0)
            calls[choice] = number + 1
            deltas.append({"tool_calls": [{"index": number, **_call(call)}]})
        if piece.finish is not None:
            deltas.append({})
        for i, delta in enumerate(deltas):
            last = i == len(deltas) - 1
            yield head.chunk(
                {
                    "index": choice,
                    "delta": delta,
                    "logprobs": _logprobs_of(piece, body, codec) if last else None,
                    "finish_reason": piece.finish if last else None,
                },
                usage=usage,
            )
    if usage:
        yield head.usage_chunk(exchange.usage())


async def whole(
    exchange: TextExchange, body: ChatRequest, codec: Codec, head: Head
) -> dict[str, Any]:
    """An answer in one piece."""
    found: dict[int, Piece] = {}
    async for choice, piece in exchange.pieces():
        sum_up(found.setdefault(choice, Piece()), piece)
    choices = []
    for choice, piece in sorted(found.items()):
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.calls:
            message["tool_calls"] = [_call(call) for call in piece.calls]
            message["content"] = piece.text.strip() or None
        choices.append(
            {
                "index": choice,
                "message": message,
                "logprobs": _logprobs_of(piece, body, codec),
                "finish_reason": piece.finish,
            }
        )
    return head.answer(choices, exchange.usage())


def sum_up(total: Piece, piece: Piece) -> None:
    """Add ``piece`` to what came before."""
    total.text += piece.text
    total.calls += piece.calls
    total.tokens += piece.tokens
    total.finish = piece.finish or total.finish


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _logprobs_of(piece: Piece, body: ChatRequest, codec: Codec) -> dict[str, Any] | None:
    if not body.logprobs:
        return None
    return {"content": [_entry(event, codec) for event in piece.tokens], "refusal": None}


def _entry(event: TokenEvent, codec: Codec) -> dict[str, Any]:
    assert event.token_id is not None
    top = [token_entry(codec, t.token_id, t.logprob) for t in event.top_logprobs]
    return token_entry(codec, event.token_id, event.logprob) | {"top_logprobs": top}
