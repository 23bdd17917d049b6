"""Forms of calls: parsed from text in pieces of any size, and written by their own grammars."""

from __future__ import annotations

import json
import random

import pytest
import tiny_model
import torch
from llguidance import LLMatcher

from flash_rt.flashrt_hf.server.grammar import mask_factory
from flash_rt.flashrt_hf.server.schema.chat import Function
from flash_rt.flashrt_hf.server.text import Codec
from flash_rt.flashrt_hf.server.tools import FORMATS, format_of
from flash_rt.flashrt_hf.server.tools.bare_json import BareJson
from flash_rt.flashrt_hf.server.tools.bracketed import Bracketed
from flash_rt.flashrt_hf.server.tools.function_tags import FunctionTags
from flash_rt.flashrt_hf.server.tools.tagged_json import TaggedJson

ADD = Function(
    name="add",
    parameters={
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x"]}},
        "required": ["a"],
        "additionalProperties": False,
    },
)
PING = Function(name="ping")
TOOLS = [ADD, PING]
TAGGED = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
BARE = '{"name": "add", "parameters": {"a": 1}}'
LIST = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "ping", "arguments": {}}]'
TAGS = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n"
    "</parameter>\n</function>\n</tool_call>"
)


def parse(form, text: str, size: int) -> tuple[str, list[tuple[str, dict]]]:
    parser = form.parser(TOOLS)
    prose, calls = "", []
    for i in range(0, len(text), size):
        more, found = parser.push(text[i : i + size])
        prose, calls = prose + more, calls + found
    more, found = parser.flush()
    assert len({call.id for call in calls + found}) == len(calls + found)
    return prose + more, [(call.name, json.loads(call.arguments)) for call in calls + found]


A1, P0 = ("add", {"a": 1}), ("ping", {})
CASES = [
    (TaggedJson(), TAGGED, "", [A1]),
    (TaggedJson(), f"Let me see.\n{TAGGED}\n{TAGGED}", "Let me see.\n", [A1, A1]),
    (TaggedJson(), "no <tool> here < tool_call>", "no <tool> here < tool_call>", []),
    (TaggedJson(), "<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
    (TaggedJson(), TAGGED.replace("add", "sub"), TAGGED.replace("add", "sub"), []),
    (TaggedJson(), TAGGED.removesuffix("</tool_call>"), "", [A1]),
    (TaggedJson(), "<tool_call>{", "<tool_call>{", []),
    (BareJson(), BARE, "", [A1]),
    (BareJson(), f"<|python_tag|>{BARE}", "", [A1]),
    (BareJson(), "A {brace} in prose", "A {brace} in prose", []),
    (BareJson(), '{"name": "sub"}', '{"name": "sub"}', []),
    (Bracketed(), LIST, "", [A1, P0]),
    (Bracketed(), f"Hm. {LIST}", "Hm. ", [A1, P0]),
    (Bracketed(), "[TOOL_CALLS] oops", "[TOOL_CALLS] oops", []),
    (FunctionTags(), TAGS, "", [("add", {"a": 1, "b": "x"})]),
    (FunctionTags(), f"First.\n{TAGS}", "First.\n", [("add", {"a": 1, "b": "x"})]),
    (FunctionTags(), TAGS.replace("=add", "=sub"), TAGS.replace("=add", "=sub"), []),
]


@pytest.mark.parametrize(("form", "text", "prose", "calls"), CASES)
def test_parsing(form, text, prose, calls):
    for size in (1, 2, 7, 1000):
        assert parse(form, text, size) == (prose, calls)


def test_text_before_a_call_comes_at_once():
    parser = TaggedJson().parser(TOOLS)
    assert parser.push("I will look <") == ("I will look ", [])
    assert parser.push("b>") == ("<b>", [])


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: type(form).__name__)
@pytest.mark.parametrize("many", [False, True])
def test_whatever_the_grammar_allows_is_parsed(form, many):
    tokenizer = tiny_model.tokenizer()
    codec = Codec(tokenizer, stop_ids=[tokenizer.eos_token_id], vocabulary=512)
    tools = [ADD, Function(name="ping", parameters={"type": "object", "properties": {},
                                                    "additionalProperties": False})]  # fmt: skip
    factory = mask_factory(codec, form.lark(tools, many=many, token=json.dumps), "tools")
    for seed in range(6):
        draw, mask, tokens, decoder = random.Random(seed), factory(), [], codec.decoder()
        while len(tokens) < 600:
            words = mask.allowed()
            bits = ((words[:, None] >> torch.arange(32)) & 1).flatten().nonzero().flatten()
            token = draw.choice(bits.tolist())
            done = mask.accept(token)
            tokens.append(token)
            if done or token == tokenizer.eos_token_id:
                break
        text = "".join(map(decoder.push, tokens)) + decoder.flush()
        prose, calls = parse(form, text, 3)
        assert prose.strip() == "", text
        assert calls
        assert many or len(calls) == 1
        for name, arguments in calls:
            assert (name == "ping" and arguments == {}) or 0 <= arguments["a"] <= 99


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("{{ tools }} without a form", None),
        (tiny_model.TEMPLATE, TaggedJson),
        ("{{ tools }} [TOOL_CALLS]", Bracketed),
        ("{{ tools }}<tool_call><function=x><parameter=y>arguments", FunctionTags),
        ('{{ tools }} {"name": function name, "parameters": dictionary}', BareJson),
    ],
)
def test_the_template_tells_the_form(template, form):
    found = format_of(template)
    assert (None if found is None else type(found)) is form


def test_names_cannot_leave_their_grammar():
    form = FunctionTags()
    tool = Function(
        name="f",
        parameters={"type": "object", "properties": {'x"\nstart: /.*/': {"type": "string"}}},
    )
    tokenizer = tiny_model.tokenizer()
    codec = Codec(tokenizer, stop_ids=[tokenizer.eos_token_id], vocabulary=512)
    grammar = form.lark([tool], many=False, token=json.dumps)
    matcher = LLMatcher(codec.grammar_tokenizer, grammar)
    assert not matcher.is_error()
    assert matcher.validate_tokens(codec.encode("free text")) == 0
