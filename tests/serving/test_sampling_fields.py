"""Seeds, choices, logprobs, bias and penalties through the OpenAI client."""

from __future__ import annotations

import math

import openai
import pytest
import tiny_model

HELLO = [{"role": "user", "content": "hello"}]


def texts(answer) -> list[str]:
    return [choice.message.content for choice in answer.choices]


def test_a_seed_repeats_whatever_else_is_asked(client):
    def ask(**options):
        return texts(
            client.chat.completions.create(
                model="tiny", messages=HELLO, max_tokens=12, temperature=1.2, top_p=0.9, **options
            )
        )

    first = ask(seed=7)
    assert ask(seed=7) == first
    assert ask(seed=8) != first
    assert ask(seed=-7) == ask(seed=2**63 - 7)
    assert ask(seed=7, n=3)[:1] == first
    assert len({*ask(), *ask(), *ask()}) > 1  # no seed: another each time


def test_choices_differ_and_stream_apart(client):
    options = {"model": "tiny", "messages": HELLO, "max_tokens": 10, "seed": 3, "n": 4}
    whole = client.chat.completions.create(**options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert len(set(texts(whole))) == 4
    assert whole.usage.completion_tokens == 40
    found = ["", "", "", ""]
    for chunk in client.chat.completions.create(stream=True, **options):
        (choice,) = chunk.choices
        found[choice.index] += choice.delta.content or ""
    assert found == texts(whole)


def test_chat_logprobs(client):
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=6, temperature=0, logprobs=True, top_logprobs=4
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 6
    for entry in entries:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 4
        assert values == sorted(values, reverse=True)
        assert entry.logprob == pytest.approx(values[0], abs=1e-4)  # greedy takes the likeliest
        assert sum(map(math.exp, values)) <= 1 + 1e-5
    joined = b"".join(bytes(e.bytes) for e in entries).decode(errors="replace")
    plain = "".join(c for c in answer.choices[0].message.content if c != "\ufffd")
    assert [c for c in plain if c not in joined] == []


def test_streamed_logprobs_are_those_of_the_whole(client):
    options = {
        "model": "tiny",
        "messages": HELLO,
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**options).choices[0].logprobs.content
    streamed = []
    for chunk in client.chat.completions.create(stream=True, **options):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content
    assert streamed == whole


def test_completion_logprobs(client):
    answer = client.completions.create(
        model="tiny", prompt="abc", max_tokens=5, temperature=0, logprobs=3
    )
    found = answer.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 5
    assert found.text_offset[0] == 0
    assert all(len(top) <= 3 for top in found.top_logprobs)
    best = max(found.top_logprobs[0].values())
    assert found.token_logprobs[0] == pytest.approx(best, abs=1e-4)


def test_logit_bias_forces_and_forbids(client):
    letter = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=3, temperature=0, logit_bias={"65": 100}
    )
    assert texts(letter) == [chr(ord("!") + 65) * 3]  # printable bytes come first
    plain = client.completions.create(
        model="tiny", prompt="abc", max_tokens=1, temperature=0, logprobs=1
    )
    (banned,) = plain.choices[0].logprobs.tokens
    banned_id = tiny_model.tokenizer().convert_tokens_to_ids(banned)
    other = client.completions.create(
        model="tiny",
        prompt="abc",
        max_tokens=1,
        temperature=0,
        logprobs=1,
        logit_bias={str(banned_id): -100},
    )
    assert other.choices[0].logprobs.tokens != [banned]


def test_penalties_stop_a_loop(client):
    def ask(**options):
        return client.completions.create(
            model="tiny", prompt="abc", max_tokens=12, temperature=0, logprobs=0, **options
        ).choices[0].logprobs.tokens  # fmt: skip

    forced = {"logit_bias": {str(i): 30 for i in range(65, 75)}}
    plain = len(set(ask(**forced)))
    assert len(set(ask(frequency_penalty=2, **forced))) > plain
    assert len(set(ask(presence_penalty=2, **forced))) > plain
    assert len(set(ask(extra_body={"repetition_penalty": 3.0}, **forced))) > plain


def test_top_k_one_and_temperature_zero_are_greedy(client, alone, text_of):
    expected = text_of(alone("hello", 8))
    for options in ({"temperature": 0}, {"extra_body": {"top_k": 1}}, {"top_p": 1e-9}):
        answer = client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=8, seed=1, **options
        )
        assert texts(answer) == [expected]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        (
            {"logit_bias": {str(i): 1 for i in range(513)}},
            "logit_bias",
            "Invalid value for 'logit_bias': at most 512 entries are allowed, got 513 entries",
        ),
        (
            {"extra_body": {"min_tokens": 2, "stop_token_ids": [*range(60, 68)]}},
            "stop_token_ids",
            "Invalid value for 'stop_token_ids': with 'min_tokens' and the model's 1 own at most 7 "
            "ids are allowed, got 8",
        ),
        (
            {"extra_body": {"min_tokens": 4}},
            "min_tokens",
            "Invalid value for 'min_tokens': must be at most the 3 tokens that the answer may "
            "have, got 4",
        ),
    ],
)
def test_what_a_row_has_no_room_for_is_named(client, fields, param, said):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=3, **fields)
    assert (caught.value.body["param"], caught.value.body["message"]) == (param, said)


def test_as_many_biases_as_a_row_has_room_for(client):
    bias = {str(i): 100 if i == 65 else -100 for i in range(512)}
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=3, temperature=0, logit_bias=bias
    )
    assert texts(answer) == ["bbb"]


def test_min_tokens_and_ignore_eos(client):
    ends = {"logit_bias": {"511": 100}, "max_tokens": 6, "temperature": 0}

    def count(**extra):
        answer = client.chat.completions.create(
            model="tiny", messages=HELLO, extra_body=extra or None, **ends
        )
        return answer.usage.completion_tokens, answer.choices[0].finish_reason

    assert count() == (1, "stop")
    assert count(min_tokens=4) == (5, "stop")
    assert count(ignore_eos=True) == (6, "length")
