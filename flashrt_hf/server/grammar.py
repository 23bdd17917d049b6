"""Grammars that constrain sampling, by llguidance."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable
from typing import Any

import torch
from llguidance import LLMatcher, LLParserLimits

from .errors import ApiError, bad
from .text import Codec

# A schema comes from a client; these bound what its grammar may cost.
LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
# One space, or a line break with its indentation: what JSON is written with, and no endless rest.
JSON_OPTIONS: Any = {"whitespace_pattern": r" ?|\n {0,16}"}
NO_TOKEN_ALLOWED = "NoExtensionBias"  # how llguidance calls a grammar that nothing follows
MAX_SCHEMA_CHARACTERS = 100_000
MAX_SCHEMA_DEPTH = 64


class GrammarError(ValueError):
    """A grammar that turned out to be too much for its limits while text was written."""


class Mask:
    """``TokenMask`` of one answer."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher, self._words = matcher, -(-vocabulary // 32)

    def allowed(self) -> torch.Tensor:
        """int32 ``[ceil(V / 32)]``.

        Raises:
            GrammarError: the next step costs more than the limits allow.
        """
        bits = self._matcher.compute_bitmask()
        self._check()
        return torch.frombuffer(bytearray(bits), dtype=torch.int32)[: self._words]

    def accept(self, token_id: int) -> bool:
        """Advance; True when nothing but an end may follow."""
        self._matcher.consume_token(token_id)
        self._check()
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(_first_line(self._matcher.get_error()))


def mask_factory(codec: Codec, grammar: str, param: str, *, given: Any) -> Callable[[], Mask]:
    """What ``GenerationRequest.mask`` takes; the grammar is compiled here, once for all answers.

    Raises:
        ApiError: 400, the grammar cannot be used, or no text follows it; ``param`` is what it came
            from, ``given`` its value.
    """
    matcher = LLMatcher(codec.grammar_tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise _invalid(param, _first_line(matcher.get_error()), given)
    begun = matcher.deep_copy()
    begun.compute_bitmask()
    if begun.is_error():
        found = _first_line(begun.get_error())
        empty = "a text must be able to follow it" if found == NO_TOKEN_ALLOWED else None
        raise _invalid(param, empty or f"its first token is too complex: {found}", given)
    return lambda: Mask(matcher.deep_copy(), codec.vocabulary)


def json_grammar(schema: dict[str, Any], param: str) -> str:
    """Grammar of the JSON texts that follow a schema.

    Raises:
        ApiError: 400, the schema is too large, or uses what llguidance does not have.
    """
    check_schema(schema, param)
    try:
        return str(LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS))
    except ValueError as error:
        raise _invalid(param, _first_line(str(error)), schema) from None


def check_schema(schema: dict[str, Any], param: str) -> None:
    """Refuse a schema whose size or depth is out of all proportion.

    Raises:
        ApiError: 400.
    """
    depth = 0
    level: list[Any] = [schema]
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise _too_large(param, f"nested at most {MAX_SCHEMA_DEPTH} deep")
        inner = [v for x in level for v in (x.values() if isinstance(x, dict) else x)]
        level = [v for v in inner if isinstance(v, (dict, list))]
    if len(json.dumps(schema)) > MAX_SCHEMA_CHARACTERS:
        raise _too_large(param, f"at most {MAX_SCHEMA_CHARACTERS} characters")


def _too_large(param: str, rule: str) -> ApiError:
    return bad(f"Invalid value for {param!r}: must be {rule}", param, "invalid_schema")


def _invalid(param: str, rule: str, given: Any) -> ApiError:
    text = f"Invalid value for {param!r}: {rule}, got {reprlib.repr(given)[:200]}"
    return bad(text, param, "invalid_schema")


def _first_line(text: str) -> str:
    """The first line; of an error of a regular expression, which draws a picture, its last too."""
    lines = [line.strip() for line in text.strip().splitlines()] or ["the grammar is invalid"]
    shown = f"{lines[0]} {lines[-1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return shown[:500]
