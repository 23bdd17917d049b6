"""load_model of text models: predict, stream and generate, their requests and their options."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch

import flash_rt


def test_a_text_is_a_message_of_the_user(handle: Any) -> None:
    wanted = checkpoints.host_text("[user]Why?[assistant]", 9)
    assert handle.predict("Why?", max_new_tokens=9) == wanted
    chat = [{"role": "user", "content": "Why?"}]
    assert handle.predict(chat, max_new_tokens=9) == wanted
    assert handle.predict("Why?", max_new_tokens=9, raw=True) == checkpoints.host_text("Why?", 9)
    moody = handle.predict("Why?", max_new_tokens=9, template={"mood": "(glum)"})
    assert moody == checkpoints.host_text("[user]Why?[assistant](glum)", 9)


def test_without_a_template_a_text_is_continued(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, checkpoints.text_model(), chat=False)
    with flash_rt.load_model(tmp_path, device="cpu", progress=False) as plain:
        assert plain.predict("Why?", max_new_tokens=9) == checkpoints.host_text("Why?", 9)
        with pytest.raises(ValueError, match="messages need a chat template, got 1 messages"):
            plain.predict([{"role": "user", "content": "Why?"}])
        with pytest.raises(ValueError, match="template needs a chat template"):
            plain.predict("Why?", template={"mood": "glum"})


def test_requests_run_on_the_loop(handle: Any) -> None:
    handle.predict("Why?", max_new_tokens=3)
    assert list(handle._shelf._loops) == [1]
    assert handle._shelf._loops[1].memory_bytes > 0


def test_stream_gives_the_answer_in_pieces(handle: Any) -> None:
    pieces = list(handle.stream("Why?", max_new_tokens=40))
    assert len(pieces) > 5
    assert "".join(pieces) == handle.predict("Why?", max_new_tokens=40)


def test_a_closed_stream_ends_the_request(handle: Any) -> None:
    answer = handle.predict("Why?", max_new_tokens=200)
    stream = handle.stream("Why?", max_new_tokens=200)
    first = next(stream)
    stream.close()
    assert answer.startswith(first)
    assert handle.predict("Why?", max_new_tokens=200) == answer


def test_errors_of_a_stream_come_where_it_is_read(handle: Any) -> None:
    stream = handle.stream("Why?", max_new_tokens=10_000)
    with pytest.raises(ValueError, match=r"stream: prompt and max_new_tokens must fit .* = 256"):
        next(stream)


@pytest.mark.parametrize("where", ["predict", "stream"])
def test_stop_strings_end_the_answer_and_are_left_out(handle: Any, where: str) -> None:
    answer = handle.predict("Why?", max_new_tokens=60)
    stop = answer[7:10]
    found = getattr(handle, where)("Why?", max_new_tokens=60, stop=["\0never", stop])
    assert "".join(found) == answer[: answer.index(stop)]


def test_the_next_turn_goes_on_from_the_last(chat_folder: Path) -> None:
    """Also where the last answer was cut at a stop string, or its stream was closed."""
    with flash_rt.load_model(chat_folder, device="cpu", progress=False) as fresh:
        answer = fresh.predict("Why?", max_new_tokens=30)
    stop = answer[9:11]

    def turn(handle: Any, said: str) -> str:
        chat = [
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "content": said},
            {"role": "user", "content": "How?"},
        ]
        return str(handle.predict(chat, max_new_tokens=12))

    with flash_rt.load_model(chat_folder, device="cpu", progress=False) as handle:
        said = handle.predict("Why?", max_new_tokens=30, stop=stop)
        with flash_rt.load_model(chat_folder, device="cpu", progress=False) as cold:
            wanted = turn(cold, said)
        assert turn(handle, said) == wanted
        assert turn(handle, said) == wanted
        stream = handle.stream("Why?", max_new_tokens=30)
        next(stream)
        stream.close()
        assert turn(handle, said) == wanted


def test_drafts_change_no_answer(chat_folder: Path) -> None:
    text = "abcabcabcabc"
    with flash_rt.load_model(chat_folder, device="cpu", progress=False) as plain:
        wanted = plain.predict(text, max_new_tokens=40, raw=True)
        drawn = plain.predict(text, max_new_tokens=40, raw=True, top_k=3, seed=4)
    with flash_rt.load_model(chat_folder, device="cpu", draft="lookup", progress=False) as handle:
        assert handle.predict(text, max_new_tokens=40, raw=True) == wanted
        assert handle.predict(text, max_new_tokens=40, raw=True, top_k=3, seed=4) == drawn
        assert handle._shelf._loops[1].speculation.steps > 0


def test_generate_continues_token_ids(handle: Any) -> None:
    ids = torch.tensor([[72, 105, 33], [0, 80, 81]])
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    out = handle.generate(ids, mask, max_new_tokens=7, eos_token_id=(), pad_token_id=0)
    wanted = checkpoints.text_model().generate(
        ids,
        attention_mask=mask,
        max_new_tokens=7,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert torch.equal(out, wanted)
    pairs = handle.generate(
        ids, mask, max_new_tokens=7, eos_token_id=(), num_return_sequences=2, seed=3, top_k=5
    )
    assert pairs.shape == (4, 10)
    again = handle.generate(
        ids, mask, max_new_tokens=7, eos_token_id=(), num_return_sequences=2, seed=3, top_k=5
    )
    assert torch.equal(pairs, again)
    ended = handle.generate(
        ids[:1], max_new_tokens=7, stop_strings=handle.tokenizer.decode(out[0, 4:6])
    )
    assert torch.equal(ended, out[:1, :6])
    stop = int(out[0, 5])
    assert handle.generate(ids[:1], max_new_tokens=7, eos_token_id=stop).shape[1] <= 6


def test_more_rows_than_the_loop_has_run_on_the_host(handle: Any) -> None:
    ids = torch.tensor([[72, 105]] * 9)
    out = handle.generate(ids, max_new_tokens=4, eos_token_id=())
    one = handle.generate(ids[:1], max_new_tokens=4, eos_token_id=())
    assert torch.equal(out, one.expand(9, -1))


def test_sampling_follows_the_seed_and_the_options(handle: Any) -> None:
    def drawn(**options: Any) -> str:
        return str(handle.predict("Why?", max_new_tokens=24, **options))

    assert drawn(temperature=1.0, seed=5) == drawn(temperature=1.0, seed=5)
    assert len({drawn(temperature=1.5, seed=seed) for seed in range(4)}) > 1
    greedy = drawn()
    assert drawn(temperature=0) == greedy
    assert drawn(top_k=1) == greedy
    assert drawn(top_p=1e-6, seed=1) == greedy
    assert drawn(min_p=1.0, seed=1) == greedy
    assert drawn(temperature=0, top_p=0.5, seed=1) == drawn(do_sample=False) == greedy
    assert drawn(do_sample=True, seed=5) == drawn(temperature=1.0, seed=5)
    forbidden = checkpoints.tokenizer()(greedy[0]).input_ids[0]
    assert drawn(logit_bias={forbidden: -math.inf})[0] != greedy[0]
    assert drawn(frequency_penalty=100.0) != greedy
    assert drawn(temperature=0, repetition_penalty=1.8) == checkpoints.host_text(
        "[user]Why?[assistant]", 24, repetition_penalty=1.8
    )


def test_a_seed_leaves_the_callers_generator_alone(handle: Any) -> None:
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    handle.predict("Why?", max_new_tokens=3, temperature=1.0, seed=5)
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize("attached", [True, False])
def test_settings_of_the_checkpoint_change_no_answer(
    tmp_path: Path, attached: bool, handle: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Greedy is greedy and a temperature is one, on the loop and on the host."""
    model = checkpoints.text_model()
    model.generation_config.update(
        do_sample=True,
        temperature=0.1,
        top_k=2,
        top_p=0.3,
        repetition_penalty=3.0,
        no_repeat_ngram_size=2,
    )
    checkpoints.save(tmp_path, model)
    wanted = handle.predict("Why?", max_new_tokens=30)
    with flash_rt.load_model(tmp_path, device="cpu", attach=attached, progress=False) as loaded:
        assert loaded.predict("Why?", max_new_tokens=30) == wanted
        drawn = {
            loaded.predict("Why?", max_new_tokens=1, temperature=9.0, seed=s) for s in range(12)
        }
        assert len(drawn) > 2  # more than the checkpoint's top_k
    assert "not valid" not in caplog.text


def test_options_that_are_none_are_named(handle: Any) -> None:
    for call in (handle.predict, handle.stream):
        with pytest.raises(TypeError, match=r"options must be of .*, got 'tempo', 'beams'"):
            call("Why?", tempo=1, beams=2)
    with pytest.raises(TypeError, match=r"generate: options must be of .*, got 'tempo'"):
        handle.generate(torch.tensor([[5]]), tempo=1)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "text"),
    [
        (5, {}, TypeError, "prompt must be a text or a list of messages, got 5"),
        ([], {}, TypeError, r"prompt must be a text or a list of messages, got \[\]"),
        ([{"content": "x"}], {}, ValueError, "every message must have a role"),
        ([{"role": "user", "content": "x"}], {"raw": True}, ValueError, "raw must be left out"),
        ("", {"raw": True}, ValueError, "prompt must have at least one token"),
        ("x", {"top_p": 1.5}, ValueError, "top_p must be above 0 and at most 1, got 1.5"),
        ("x", {"temperature": -1}, ValueError, "temperature must be at least 0, got -1"),
        ("x", {"seed": 1, "top_k": "a"}, TypeError, "top_k must be an integer, got 'a'"),
        (
            *("x", {"do_sample": False, "temperature": 1.0}, ValueError),
            "do_sample must be True with temperature=1.0, got False",
        ),
        ("x", {"stop": ""}, ValueError, "stop must be strings that are not empty"),
        ("x", {"stop": [7]}, ValueError, "stop must be strings that are not empty, got 7"),
        ("x", {"stop": 7}, TypeError, "stop must be a string or a list of them, got 7"),
        ("a\ud800", {}, ValueError, r"prompt must be valid Unicode, got '\\ud800' in it"),
        (
            *([{"role": "user", "content": "\udfff"}], {}, ValueError),
            r"prompt must be valid Unicode, got '\\udfff' in it",
        ),
        ("x", {"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1, got 0"),
        ("x", {"max_new_tokens": 1.5}, TypeError, "max_new_tokens must be an integer, got 1.5"),
        ("x" * 300, {}, ValueError, r"must fit the model's limit = 256, got 317 \+ 1"),
        ("x", {"images": "cat.png"}, ValueError, "images need a vision-language model"),
    ],
)
def test_bad_requests(handle: Any, prompt: Any, options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=f"predict: .*{text}|decode_loop.generate: {text}"):
        handle.predict(prompt, **options)


def test_token_ids_must_be_a_table(handle: Any) -> None:
    with pytest.raises(TypeError, match="generate: input_ids must be a tensor, got list"):
        handle.generate([1, 2, 3])
    with pytest.raises(ValueError, match=r"generate: input_ids must be \[B, P\], got shape \(3,\)"):
        handle.generate(torch.tensor([1, 2, 3]))


def test_max_len_bounds_every_request(chat_folder: Path) -> None:
    with flash_rt.load_model(chat_folder, device="cpu", max_len=40, progress=False) as short:
        assert len(short.generate(torch.tensor([[72] * 10]), eos_token_id=())[0]) == 40
        with pytest.raises(ValueError, match=r"must fit max_len = 40, got 10 \+ 31"):
            short.generate(torch.tensor([[72] * 10]), max_new_tokens=31)


def test_the_cache_grows_with_the_requests(handle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flash_rt.flashrt_hf.load.loop_shelf.DEFAULT_LEN", 32)
    handle._shelf._loops.clear()
    handle.predict("Why?", max_new_tokens=5)
    first = handle._shelf._loops[1]
    assert first.max_len == 32
    wanted = checkpoints.host_text("[user]Why?[assistant]", 100)
    assert handle.predict("Why?", max_new_tokens=100) == wanted
    assert handle._shelf._loops[1].max_len == 128
    handle.predict("Why?", max_new_tokens=5)
    assert handle._shelf._loops[1].max_len == 128
