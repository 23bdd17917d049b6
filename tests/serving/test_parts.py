"""Queue, text and settings, each alone."""

from __future__ import annotations

import json
import random

import pytest
from transformers import GenerationConfig

from flash_rt.flashrt_hf.server.config import ServerConfig
from flash_rt.flashrt_hf.server.errors import ApiError
from flash_rt.flashrt_hf.server.fair_queue import FairQueue, QueueFull
from flash_rt.flashrt_hf.server.gate import Keys
from flash_rt.flashrt_hf.server.sampling import Defaults
from flash_rt.flashrt_hf.server.schema.base import read
from flash_rt.flashrt_hf.server.schema.chat import ChatRequest
from flash_rt.flashrt_hf.server.schema.completions import CompletionRequest
from flash_rt.flashrt_hf.server.stand_in import stand_in_tokenizer
from flash_rt.flashrt_hf.server.text import Codec, Stops, overlap


def drain(queue: FairQueue[str]) -> str:
    found = ""
    while queue:
        found += queue.pop()
    return found


def test_one_client_is_served_in_order():
    queue: FairQueue[str] = FairQueue(10)
    queue.put([("a", item, 1) for item in "12345"])
    assert drain(queue) == "12345"


def test_who_asks_for_much_waits_for_who_asks_for_little():
    queue: FairQueue[str] = FairQueue(20)
    queue.put([("a", "a", 1)] * 6)
    queue.put([("b", "b", 1)] * 2)
    queue.put([("c", "c", 1)])
    assert drain(queue) == "abcabaaaa"


def test_cost_counts():
    queue: FairQueue[str] = FairQueue(20)
    queue.put([("a", "a", 4)] * 2)
    queue.put([("b", "b", 1)] * 5)
    assert drain(queue) == "abbbbab"


def test_newcomers_cannot_starve_who_waits():
    queue: FairQueue[str] = FairQueue(100)
    queue.put([("flood", "f", 1)] * 5)
    order = ""
    for turn in range(40):  # two others always have one in the queue
        queue.put([(("x", turn % 2), "x", 1)])
        order += queue.pop()
    assert order.count("f") == 5
    assert order.rindex("f") < 20


def test_clients_that_are_always_new_cannot_starve_who_waits():
    queue: FairQueue[str] = FairQueue(100)
    queue.put([("flood", "f", 1)] * 5)
    order = ""
    for turn in range(200):
        queue.put([(turn, "x", 1)])
        order += queue.pop()
    assert order.count("f") == 5


def test_being_away_saves_nothing_up():
    queue: FairQueue[str] = FairQueue(100)
    queue.put([("a", "a", 1)] * 10)
    drain(queue)
    queue.put([("b", "b", 1)] * 3 + [("a", "a", 1)] * 3)
    assert drain(queue) == "bababa"


def test_a_full_queue_takes_all_or_nothing():
    queue: FairQueue[str] = FairQueue(3)
    queue.put([("a", "1", 1), ("a", "2", 1)])
    with pytest.raises(QueueFull):
        queue.put([("b", "3", 1), ("b", "4", 1)])
    assert drain(queue) == "12"
    with pytest.raises(IndexError):
        queue.pop()


def test_remove_keeps_the_order_of_the_rest():
    queue: FairQueue[str] = FairQueue(9)
    queue.put([(item, item, 1) for item in "12345"])
    assert queue.remove(lambda item: item in "24") == ["2", "4"]
    assert drain(queue) == "135"


def test_clients_that_are_gone_are_forgotten():
    queue: FairQueue[str] = FairQueue(4)
    for client in range(1000):
        queue.put([(client, "x", 1)])
        queue.pop()
    assert len(queue._finish) <= 9


@pytest.mark.parametrize("seed", range(5))
def test_pieces_are_the_text_of_the_whole(codec, seed):
    draw = random.Random(seed)
    texts = ["héllo wörld", "日本語 🙂🙃", "the and in er", "a\u0301b\u200d", "\n\t  "]
    for tokens in (
        [draw.randrange(509) for _ in range(200)],
        [i for text in texts for i in codec.encode(text)],
        codec.encode("🙂")[:2],
        [],
    ):
        decoder = codec.decoder()
        pieces = [decoder.push(token) for token in tokens]
        assert "".join(pieces) + decoder.flush() == codec.backend.decode(tokens)


def test_characters_are_not_torn(codec):
    decoder = codec.decoder()
    pieces = [decoder.push(token) for token in codec.encode("a🙂b")]
    assert pieces == ["a", "", "", "", "🙂", "b"]


def test_special_tokens_have_no_text_unless_kept(codec):
    end = codec.special_id("<|end|>")
    assert end is not None
    assert codec.special_id("the") is None
    assert codec.decoder().push(end) == ""
    assert codec.decoder(keep=[end]).push(end) == "<|end|>"
    assert codec.decoder().push(10**6) == ""
    assert codec.token_bytes(end) == b"<|end|>"
    assert b"".join(map(codec.token_bytes, codec.encode("🙂 the"))) == "🙂 the".encode()


def test_every_id_of_the_stand_in_has_text():
    tokenizer = stand_in_tokenizer(400)
    codec = Codec(tokenizer, stop_ids=[tokenizer.eos_token_id], vocabulary=400)
    assert len(tokenizer) == 400
    assert [i for i in range(399) if not codec.backend.decode([i])] == []
    with pytest.raises(ValueError, match="above 256, got 256"):
        stand_in_tokenizer(256)


def test_slow_tokenizers_are_refused():
    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="must be a fast one, got Slow"):
        Codec(Slow(), stop_ids=[], vocabulary=8)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_stops_wherever_pieces_end(size):
    cases = [
        (["END"], "some text EN END more", "some text EN "),
        (["END", "xt"], "some text END", "some te"),
        (["aab"], "aaaab", "aa"),
        (["never"], "it is neve", "it is neve"),
        (["\n\n", "\nUser:"], "hi\nUser: x", "hi"),
        ([], "all of it", "all of it"),
    ]
    for stops, text, expected in cases:
        found = Stops(stops)
        out = "".join(found.push(text[i : i + size]) for i in range(0, len(text), size))
        out += found.flush()
        assert out == expected
        assert (found.found is None) == (expected == text)


def test_overlap():
    assert [overlap(text, "abcab") for text in ("xabca", "abcab", "ab", "b", "")] == [4, 2, 2, 0, 0]


def test_keys():
    keys = Keys(["one", "two"])
    assert [keys.find(key) for key in ("one", "two", "on", "onee", "", "\udcff")] == [
        *(0, 1),
        *[None] * 4,
    ]
    assert keys
    assert not Keys([])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": "0.0.0.0"}, "needs an api_key"),
        ({"host": "::"}, "needs an api_key"),
        ({"host": "example.org"}, "needs an api_key"),
        ({"api_keys": ("",)}, "api_key must be printable"),
        ({"api_keys": ("schlüssel",)}, "api_key must be printable"),
        ({"port": 70000}, "port must be 0 to 65535, got 70000"),
        ({"max_queue": 0}, "max_queue must be above 0, got 0"),
        ({"grace_s": -1.0}, "grace_s must be above 0, got -1.0"),
        ({"max_image_pixels": 0}, "max_image_pixels must be above 0, got 0"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        ServerConfig(name="x", **settings)


def test_open_addresses():
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert ServerConfig(name="x", host=host).loopback
    assert not ServerConfig(name="x", host="0.0.0.0", api_keys=("k",)).loopback
    assert not ServerConfig(name="x", host="0.0.0.0", anonymous=True).loopback


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [*range(40_000), "x"]}, "prompt[40000]"),
        ({"prompt": ["x", *range(40_000)]}, "prompt[1]"),
        ({"prompt": [["x"] * 40_000]}, "prompt[0][0]"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": "x", **{f"a{i}": 1 for i in range(40_000)}}, "a0"),
        ({"prompt": "x", "logit_bias": {f"a{i}": "z" for i in range(40_000)}}, "logit_bias"),
        ({"prompt": "x", "stop": [1] * 40_000}, "stop"),
        ({"prompt": "x", "stop": ["a", ""]}, "stop[1]"),
        ({"prompt": "x", "stream_options": {"what": 1}}, "stream_options.what"),
    ],
)
def test_large_wrong_bodies_have_short_answers(fields, param):
    with pytest.raises(ApiError) as caught:
        read(CompletionRequest, json.dumps({"model": "x", **fields}).encode())
    assert caught.value.param == param
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user"}] * 9000}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
    ],
)
def test_wrong_parameters_are_named(fields, param):
    body = {"model": "x", "messages": [{"role": "user", "content": "x"}], **fields}
    with pytest.raises(ApiError) as caught:
        read(ChatRequest, json.dumps(body).encode())
    assert caught.value.param == param


def test_defaults_of_a_checkpoint_are_checked_before_any_request():
    assert Defaults.of(GenerationConfig(do_sample=True, top_k=20)).top_k == 20
    assert Defaults.of(GenerationConfig(do_sample=False, top_k=20)).top_k == 0
    for name, value in {"top_k": -1, "top_p": 0.0, "repetition_penalty": 0.0}.items():
        config = GenerationConfig(do_sample=True)
        setattr(config, name, value)
        with pytest.raises(ValueError, match=f"generation_config of the checkpoint .*{name} must"):
            Defaults.of(config)
