"""``/v1/completions``: from a checked request to an answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from flash_rt.structures.loops.generation import GenerationRequest

from .answer import Answer, Piece
from .chat import sum_up
from .config import ServerConfig
from .errors import bad
from .exchange import TextExchange
from .sampling import generation_request
from .schema.completions import CompletionRequest
from .served import Served
from .text import Codec
from .wire import Head, finite

DEFAULT_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 64


def prepare(
    body: CompletionRequest, model: Served, config: ServerConfig
) -> list[tuple[GenerationRequest, list[Answer]]]:
    """Tokenise and check every prompt.

    Raises:
        ApiError: 400 with the parameter at fault.
    """
    codec = model.codec
    assert codec is not None
    if len(body.prompts) > MAX_PROMPTS:
        got = len(body.prompts)
        raise bad(f"Invalid value for 'prompt': at most {MAX_PROMPTS} prompts, got {got}", "prompt")
    found = []
    for prompt in body.prompts:
        request = generation_request(
            body,
            codec.encode(prompt) if isinstance(prompt, str) else prompt,
            codec=codec,
            defaults=model.defaults,
            max_len=model.max_len,
            config=config,
            max_new=body.max_tokens or DEFAULT_TOKENS,
            logprobs=body.logprobs,
            mask=None,
            limit_param="max_tokens",
        )
        answers = [
            Answer(codec, stops=body.stops, stop_ids=request.stop_token_ids or (), parser=None)
            for _ in range(request.n)
        ]
        found.append((request, answers))
    return found


def _shown(codec: Codec, token: int) -> tuple[str, str]:
    """How a token is named, which for one within a character is by its bytes, and its text."""
    raw = codec.token_bytes(token)
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), ""
    return text, text


class Offsets:
    """Where the tokens of each choice begin in its text."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}

    def logprobs(
        self, choice: int, piece: Piece, body: CompletionRequest, codec: Codec
    ) -> dict[str, Any] | None:
        """The logprobs of a piece; None where they were not asked for."""
        if body.logprobs is None:
            return None
        made: dict[str, Any] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        place = self._places.get(choice, 0)
        for event in piece.tokens:
            assert event.token_id is not None
            name, text = _shown(codec, event.token_id)
            top = {_shown(codec, t.token_id)[0]: t.logprob for t in event.top_logprobs}
            made["tokens"].append(name)
            made["token_logprobs"].append(finite(event.logprob))
            made["top_logprobs"].append({key: finite(value) for key, value in top.items()})
            made["text_offset"].append(place)
            place += len(text)
        self._places[choice] = place
        return made


async def chunks(
    exchange: TextExchange, body: CompletionRequest, codec: Codec, head: Head
) -> AsyncGenerator[dict[str, Any], None]:
    """A stream's events."""
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    offsets = Offsets()
    async for choice, piece in exchange.pieces():
        if not piece.empty:
            yield head.chunk(
                {
                    "index": choice,
                    "text": piece.text,
                    "logprobs": offsets.logprobs(choice, piece, body, codec),
                    "finish_reason": piece.finish,
                },
                usage=usage,
            )
    if usage:
        yield head.usage_chunk(exchange.usage())


async def whole(
    exchange: TextExchange, body: CompletionRequest, codec: Codec, head: Head
) -> dict[str, Any]:
    """An answer in one piece."""
    found: dict[int, Piece] = {}
    async for choice, piece in exchange.pieces():
        sum_up(found.setdefault(choice, Piece()), piece)
    offsets = Offsets()
    choices = [
        {
            "index": choice,
            "text": piece.text,
            "logprobs": offsets.logprobs(choice, piece, body, codec),
            "finish_reason": piece.finish,
        }
        for choice, piece in sorted(found.items())
    ]
    return head.answer(choices, exchange.usage())
