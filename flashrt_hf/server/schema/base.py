"""What requests share: strict types, no unknown fields, sampling parameters."""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from flash_rt.structures.loops.controls import BIAS_SLOTS

from ..errors import ApiError, bad, unsupported

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
TYPES = frozenset({"str", "int", "float", "bool", "texts", "ids", "lists"})
TAGS = frozenset({"system", "developer", "user", "assistant", "tool", "text", "image_url"})
UNKNOWN = "unknown_field"
MAX_COUNT = 2**31 - 1
R = TypeVar("R", bound="Strict")


def small(most: int) -> BeforeValidator:
    """Refuses an object of more than ``most`` entries before any of them is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise PydanticCustomError("too_long", f"at most {most} entries are allowed")
        return value

    return BeforeValidator(check)


class Strict(BaseModel):
    """Part of a request: exact types, and no field that nobody reads."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        """Stop at the first unknown name: pydantic would collect a million of them."""
        if isinstance(data, dict):
            known = {field.alias or name for name, field in cls.model_fields.items()}
            unknown = next((name for name in data if name not in known), None)
            if unknown is not None:
                raise PydanticCustomError(UNKNOWN, "unknown field", {"name": unknown})
        return data


class StreamOptions(Strict):
    """What a stream carries beside text."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopTexts = Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)]
Unit = Annotated[float, Field(ge=0, le=1)]


class SamplingRequest(Strict):
    """Fields that ``/v1/chat/completions`` and ``/v1/completions`` share.

    ``top_k``, ``min_p``, ``repetition_penalty``, ``min_tokens``, ``stop_token_ids`` and
    ``ignore_eos`` are not OpenAI's; its clients send them through ``extra_body``. Fields whose
    type allows one value only ask for what this server does anyway.
    """

    model: str
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]] | None, small(BIAS_SLOTS)
    ] = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopText | StopTexts | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    min_p: Unit | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def read(kind: type[R], body: bytes) -> R:
    """A request out of JSON.

    Raises:
        ApiError: 400 that names the first parameter at fault and its rule.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _explained(error) from None


def _explained(error: ValidationError) -> ApiError:
    found = error.errors(include_url=False)
    if found[0]["type"] == "json_invalid":
        return bad(f"The body must be JSON: {found[0]['msg']}", code="invalid_json")
    unknown = next((e for e in found if e["type"] == UNKNOWN), None)
    if unknown is not None:
        return unsupported(_path((*unknown["loc"], unknown["ctx"]["name"])))
    # Of a field that may have several types, what is wrong with the value of the right one.
    same = [e for e in found if e["loc"][:1] == found[0]["loc"][:1]]
    first = next((e for e in same if not e["type"].endswith("_type")), found[0])
    name = _path(first["loc"]) or "body"
    if first["type"] == "missing":
        return bad(f"Missing required parameter: {name!r}", name, "missing_required_parameter")
    several = first["type"].endswith("_type") and len({e["loc"][:2] for e in same}) > 1
    rule = "none of its types fits" if several else first["msg"]
    return bad(f"Invalid value for {name!r}: {rule}, got {_shown(first['input'])}", name)


def _path(loc: tuple[int | str, ...]) -> str:
    """``messages[0].content``: without what pydantic calls the members of unions."""
    path, before = "", None
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not (part in TYPES or part == before or _is_tag(part, before)):
            path += f".{part}" if path else part
        before = part
        if isinstance(part, str) and not part.isidentifier():
            path = path.removesuffix(f".{part}")
    return path


def _is_tag(part: str, before: int | str | None) -> bool:
    if before in ("prompt", "input"):
        return part == "text"
    return isinstance(before, int) and part in TAGS


def _shown(value: Any) -> str:
    """A value in a few characters, whatever its size."""
    if isinstance(value, (dict, list)) and len(value) > 8:
        return f"{len(value)} entries"
    return reprlib.repr(value)
