"""Every call of the real OpenAI client, streaming and not, against what the bare loop writes."""

from __future__ import annotations

import json

import openai
import pytest

HELLO = [{"role": "user", "content": "hello"}]
GREEDY = {"model": "tiny", "temperature": 0}


def joined(stream) -> tuple[str, str | None]:
    """Text and finish reason of a stream of chat chunks."""
    text, finish = "", None
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return text, finish


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.max_model_len) == ("tiny", "model", 2048)
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        client.models.retrieve("other")


def test_chat_is_what_the_bare_loop_writes(client, alone, text_of):
    ids = alone("hello", 24)
    answer = client.chat.completions.create(messages=HELLO, max_tokens=24, **GREEDY)
    (choice,) = answer.choices
    assert choice.message.content == text_of(ids)
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
    assert answer.object == "chat.completion"


def test_chat_stream_adds_up_to_the_whole(client, alone, text_of):
    stream = client.chat.completions.create(
        messages=HELLO,
        max_completion_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    )
    chunks = list(stream)
    assert joined(chunks) == (text_of(alone("hello", 24)), "length")
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_completion_and_its_stream(client, alone, text_of):
    expected = text_of(alone("once upon", 16, chat=False))
    answer = client.completions.create(prompt="once upon", **GREEDY)
    assert answer.choices[0].text == expected
    assert answer.usage.completion_tokens == 16
    stream = client.completions.create(prompt="once upon", stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected


def test_several_prompts_in_one_completion(client, alone, text_of):
    prompts = ["once", "upon", "a time"]
    answer = client.completions.create(prompt=prompts, max_tokens=9, **GREEDY)
    assert [c.index for c in answer.choices] == [0, 1, 2]
    expected = [text_of(alone(prompt, 9, chat=False)) for prompt in prompts]
    assert [c.text for c in answer.choices] == expected
    assert answer.usage.completion_tokens == 27
    ids = [[65, 66, 67], [68]]
    of_ids = client.completions.create(prompt=ids, max_tokens=3, **GREEDY)
    assert of_ids.usage.prompt_tokens == 4


def test_stop_string_across_tokens(client, alone, text_of):
    text = text_of(alone("hello", 40))
    middle = len(text) // 2
    stop = text[middle : middle + 3]
    expected = text[: text.index(stop)]
    answer = client.chat.completions.create(
        messages=HELLO, max_tokens=40, stop=[stop, "never there"], **GREEDY
    )
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        messages=HELLO, max_tokens=40, stop=stop, stream=True, **GREEDY
    )
    assert joined(stream) == (expected, "stop")


def test_stop_token_ends_without_its_text(client, alone, text_of):
    ids = alone("hello", 12)
    place = next(i for i in range(1, 12) if ids[i] not in ids[:i])
    answer = client.chat.completions.create(
        messages=HELLO, max_tokens=12, extra_body={"stop_token_ids": [ids[place]]}, **GREEDY
    )
    assert answer.choices[0].message.content == text_of(ids[:place])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == place + 1


def test_parts_of_a_message_are_joined(client):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    answer = client.chat.completions.create(
        messages=[{"role": "user", "content": parts}], max_tokens=4, **GREEDY
    )
    whole = client.chat.completions.create(
        messages=[{"role": "user", "content": "hel\nlo"}], max_tokens=4, **GREEDY
    )
    assert answer.choices[0].message.content == whole.choices[0].message.content


def test_template_variables(client):
    plain = client.chat.completions.create(messages=HELLO, max_tokens=1, **GREEDY)
    told = client.chat.completions.create(
        messages=HELLO,
        max_tokens=1,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        **GREEDY,
    )
    assert told.usage.prompt_tokens > plain.usage.prompt_tokens
    for name in ("chat_template", "tokenize", "no_such"):
        with pytest.raises(openai.BadRequestError, match=f"chat_template_kwargs.{name}"):
            client.chat.completions.create(
                messages=HELLO, extra_body={"chat_template_kwargs": {name: "x"}}, **GREEDY
            )


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("best_of", 3, "best_of"),
        ("no_such_thing", 1, "no_such_thing"),
        ("store", True, "store"),
        ("audio", {"voice": "x"}, "audio"),
        ("temperature", 3, "temperature"),
        ("temperature", "0.5", "temperature"),
        ("n", 9, "n"),
        ("top_logprobs", 3, "top_logprobs"),
        ("logit_bias", {"999999": 1}, "logit_bias"),
        ("logit_bias", {"x": 1}, "logit_bias"),
        ("max_tokens", 100_000, "max_completion_tokens"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        ("messages", [], "messages"),
        ("messages", [{"role": "robot", "content": "x"}], "messages[0]"),
        ("tool_choice", "required", "tool_choice"),
    ],
)
def test_what_is_not_supported_is_named(client, field, value, param):
    body = {"messages": HELLO, **GREEDY, field: value}
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/chat/completions", body=body, cast_to=dict)
    error = caught.value.body
    assert error["param"] == param
    assert field in error["message"].replace("context length", "max_tokens")
    assert error["type"] == "invalid_request_error"


def test_wrong_model(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt", messages=HELLO)
    assert caught.value.body["code"] == "model_not_found"


def test_embeddings_of_a_decoder_are_refused(client):
    with pytest.raises(openai.BadRequestError, match="makes no embeddings"):
        client.embeddings.create(model="tiny", input="x")


def test_metrics_of_the_engine(running, client):
    import httpx

    client.chat.completions.create(messages=HELLO, max_tokens=3, **GREEDY)
    lines = httpx.get(f"{running.url}/metrics").text.splitlines()
    found = {line.split()[0]: float(line.split()[1]) for line in lines if line[0] != "#"}
    assert found["flashrt_graph_captures_total"] >= 1
    assert found["flashrt_fallbacks_total"] == 0


def test_plan_is_explain_as_json(running):
    import httpx

    found = json.loads(httpx.get(f"{running.url}/v1/plan").text)
    bound = [row for row in found["rows"] if row["decision"] == "Bound"]
    assert [row["path"] for row in bound if row["structure"] == "decoder_layer"] == [
        "model.layers.0",
        "model.layers.1",
    ]
    assert any("generate" in note for note in found["notes"])
