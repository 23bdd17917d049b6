"""Calls of functions and JSON answers: a random model can only follow them when it is made to."""

from __future__ import annotations

import json

import jsonschema_rs
import openai
import pytest

HELLO = [{"role": "user", "content": "weather?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["UTC", "CET"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "inner": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    },
    "required": ["name", "tags", "inner"],
    "additionalProperties": False,
}


def chat(client, **options):
    options = {"temperature": 0.7, "seed": 11, "max_tokens": 200, **options}
    return client.chat.completions.create(model="tiny", messages=HELLO, **options)


def checked(call) -> dict:
    arguments = json.loads(call.function.arguments)
    schema = {"get_weather": WEATHER, "get_time": TIME}[call.function.name]["function"]
    jsonschema_rs.validate(schema["parameters"], arguments)
    return arguments


def test_required_calls_follow_their_schemas(client):
    answer = chat(client, tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=False)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    checked(call)


def test_a_named_function_is_the_one_called(client):
    for tool in (WEATHER, TIME):
        name = tool["function"]["name"]
        named = {"type": "function", "function": {"name": name}}
        answer = chat(client, tools=[WEATHER, TIME], tool_choice=named)
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == name
        checked(call)


def test_streamed_calls_are_those_of_the_whole(client):
    options = dict(tools=[TIME], tool_choice="required", parallel_tool_calls=False)
    (whole,) = chat(client, **options).choices[0].message.tool_calls
    calls, finish = [], None
    for chunk in chat(client, stream=True, **options):
        (choice,) = chunk.choices
        calls += choice.delta.tool_calls or []
        finish = choice.finish_reason or finish
        assert not choice.delta.content
    assert finish == "tool_calls"
    assert [(c.index, c.function.name) for c in calls] == [(0, whole.function.name)]
    assert calls[0].function.arguments == whole.function.arguments


def test_a_call_and_its_result_in_the_history(client):
    (call,) = (
        chat(client, tools=[TIME], tool_choice="required", parallel_tool_calls=False)
        .choices[0]
        .message.tool_calls
    )
    history = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "noon"},
    ]
    answer = client.chat.completions.create(
        model="tiny", messages=history, tools=[TIME], max_tokens=4, temperature=0
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens > len(call.function.arguments)
    history[1]["tool_calls"][0]["function"]["arguments"] = "no json"
    with pytest.raises(openai.BadRequestError, match="JSON text of an object"):
        client.chat.completions.create(model="tiny", messages=history, tools=[TIME])


def test_strict_tools_leave_prose_free(client):
    strict = {"type": "function", "function": {**TIME["function"], "strict": True}}
    (choice,) = chat(client, tools=[strict], max_tokens=12).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    assert choice.message.content


def test_no_tools_and_choice_none_leave_the_text_alone(client):
    plain = chat(client, max_tokens=12)
    none = chat(client, max_tokens=12, tools=[TIME], tool_choice="none")
    assert none.choices[0].message == plain.choices[0].message
    assert plain.choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [TIME, TIME]}, "tools"),
        (
            {
                "tools": [TIME],
                "tool_choice": {"type": "function", "function": {"name": "no_such"}},
            },
            "tool_choice",
        ),
        ({"tools": [TIME], "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ],
)
def test_tools_that_cannot_be(client, options, param):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **options)
    assert caught.value.body["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_json_schema(client, stream):
    shape = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
    if stream:
        chunks = chat(client, response_format=shape, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        (choice,) = chat(client, response_format=shape).choices
        assert choice.finish_reason == "stop"
        text = choice.message.content
    jsonschema_rs.validate(SCHEMA, json.loads(text))


def test_the_clients_own_parse_with_a_pydantic_model(client):
    from pydantic import BaseModel, Field

    class Point(BaseModel):
        x: int = Field(ge=0, le=9)
        y: int = Field(ge=0, le=9)

    answer = client.chat.completions.parse(
        model="tiny", messages=HELLO, response_format=Point, max_tokens=100, temperature=0
    )
    found = answer.choices[0].message.parsed
    assert 0 <= found.x <= 9
    assert 0 <= found.y <= 9


def test_json_object_with_two_choices(client):
    answer = chat(
        client, response_format={"type": "json_object"}, n=2, max_tokens=400, temperature=0.2
    )
    for choice in answer.choices:
        text = choice.message.content
        assert text.lstrip().startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:1/x.json"}}},
        {"type": "object", "properties": {"a": {"$ref": "file:///etc/passwd"}}},
        {"type": "string", "pattern": "((a+)+)+$(?=b)"},
        {"type": "no_such_type"},
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"type": "array", "minItems": 3, "maxItems": 2, "items": {"type": "integer"}},
    ],
)
def test_schemas_that_cannot_be_followed(client, schema):
    shape = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, response_format=shape)
    assert caught.value.body["param"] == "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"$ref": "#"}, "a text must be able to follow it, got {'$ref': '#'}"),
        (
            {"type": "string", "pattern": "(a"},
            "regex parse error: error: unclosed group, got {'pattern': '(a', 'type': 'string'}",
        ),
    ],
)
def test_what_is_wrong_with_a_schema_is_said_with_the_schema(client, schema, said):
    shape = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, response_format=shape)
    message = "Invalid value for 'response_format.json_schema.schema': " + said
    assert caught.value.body["message"] == message


def test_schemas_out_of_proportion(client):
    deep: dict = {"type": "integer"}
    for _ in range(80):
        deep = {"type": "array", "items": deep}
    wide = {"enum": ["x" * 50 + str(i) for i in range(3000)]}
    for schema in (deep, wide):
        shape = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
        with pytest.raises(openai.BadRequestError, match="must be"):
            chat(client, response_format=shape)
