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


NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def write(codec: Codec, form, how: str, seed: int, forced: str = "") -> str | None:
    """What a random model writes under a form's grammar behind ``forced``; None: it goes on."""
    grammar = form.lark([ADD, Function(name="ping", parameters=NO_ARGUMENTS)], how=how, token=none)
    draw, mask = random.Random(seed), mask_factory(codec, grammar, "tools", given=[])()
    tokens, decoder = codec.encode(forced), codec.decoder()
    assert not any(mask.accept(token) for token in tokens)
    while len(tokens) < 600:
        words = mask.allowed()
        bits = ((words[:, None] >> torch.arange(32)) & 1).flatten().nonzero().flatten()
        token = draw.choice(bits.tolist())
        done = mask.accept(token)
        tokens.append(token)
        if done or token in codec.stop_ids:
            return "".join(map(decoder.push, tokens)) + decoder.flush()
    return None


def none(text: str) -> None:
    """No marker is a token of its own here."""


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: type(form).__name__)
@pytest.mark.parametrize("how", ["one", "some"])
def test_whatever_the_grammar_allows_is_parsed(codec, form, how):
    for seed in range(6):
        text = write(codec, form, how, seed)
        prose, calls = parse(form, text, 3)
        assert prose.strip() == "", text
        assert calls
        assert how == "some" or len(calls) == 1
        for name, arguments in calls:
            assert (name == "ping" and arguments == {}) or 0 <= arguments["a"] <= 99


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: type(form).__name__)
def test_prose_is_free_until_a_call_begins(codec, form):
    if form.lark([ADD], how="free", token=none) is None:
        assert isinstance(form, BareJson)
        return
    begin = form.markers[0]
    ended = 0
    for seed in range(8):
        text = write(codec, form, "free", seed, f"Well, [TOOL] <tool> {begin}")
        if text is None:
            continue  # prose behind the call that has not ended yet
        ended += 1
        prose, calls = parse(form, text, 3)
        assert prose.startswith("Well, [TOOL] <tool> ")
        assert begin not in prose
        assert calls
    assert ended >= 2
    matcher = mask_factory(
        codec, form.lark([ADD], how="free", token=none), "tools", given=[]
    )()._matcher
    wrong = codec.encode(f"Well {begin} nonsense")
    assert matcher.validate_tokens(wrong) < len(wrong)
    assert matcher.validate_tokens(codec.encode("only prose")) == len(codec.encode("only prose"))


@pytest.mark.parametrize("form", [TaggedJson(), Bracketed(), FunctionTags()])
@pytest.mark.parametrize("how", ["one", "some", "free"])
def test_markers_that_are_tokens(codec, form, how):
    marker = codec.special_id("<|end|>")
    grammar = form.lark(
        [Function(name="ping", parameters=NO_ARGUMENTS)],
        how=how,
        token=lambda text: f"<[{marker}]>" if text == form.markers[0] else None,
    )
    (begin, *_), end = form.markers, "</tool_call>" if len(form.markers) > 1 else ""
    body = {
        TaggedJson: f'\n{{"name": "ping", "arguments": {{}}}}\n{end}',
        Bracketed: ' [{"name": "ping", "arguments": {}}]',
        FunctionTags: f"\n<function=ping>\n</function>\n{end}",
    }[type(form)]
    matcher = mask_factory(codec, grammar, "tools", given=[])()._matcher
    prose = codec.encode("so ") if how == "free" else []
    tokens = [*prose, marker, *codec.encode(body)]
    assert matcher.validate_tokens(tokens) == len(tokens)
    plain = codec.encode(begin)  # the text of the marker is not the marker
    if how != "free":
        assert matcher.validate_tokens(plain) == 0


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


def test_names_cannot_leave_their_grammar(codec):
    form = FunctionTags()
    tool = Function(
        name="f",
        parameters={"type": "object", "properties": {'x"\nstart: /.*/': {"type": "string"}}},
    )
    grammar = form.lark([tool], how="one", token=none)
    matcher = LLMatcher(codec.grammar_tokenizer, grammar)
    assert not matcher.is_error()
    assert matcher.validate_tokens(codec.encode("free text")) == 0
