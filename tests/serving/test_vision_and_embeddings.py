"""Images in messages and vectors of texts, against the models themselves."""

from __future__ import annotations

import base64
import io
import json

import httpx
import numpy as np
import openai
import pytest
import tiny_folders
import torch
from PIL import Image
from serving_support import run_server

import flash_rt
from flash_rt.flashrt_hf.server import source
from flash_rt.flashrt_hf.server.loading import encoder_model, pooling_of


def load(folder, **options):
    options = {"max_len": None, "engine": {}, "pooling": None, "dtype": None, **options}
    return source.load(str(folder), name="tiny", device=torch.device("cpu"), **options)


def picture(seed: int):
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def message(*images, text: str = "what is it?"):
    parts = []
    for image in images:
        stream = io.BytesIO()
        image.save(stream, "png")
        url = f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return tiny_folders.llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def viewer(llava):
    with run_server(load(llava, max_len=256)) as running:
        yield running.client()


def ask(client, messages, **options):
    options = {"temperature": 0, "max_tokens": 8, **options}
    return client.chat.completions.create(model="tiny", messages=messages, **options)


def test_images_are_seen(llava, viewer):
    handle = flash_rt.load_model(llava, device="cpu", dtype="fp32", progress=False)
    answers = []
    for seed in (1, 2):
        image = picture(seed)
        parts = [{"type": "image", "image": image}, {"type": "text", "text": "what is it?"}]
        expected = handle.predict([{"role": "user", "content": parts}], max_new_tokens=8)
        answer = ask(viewer, message(image))
        assert answer.choices[0].message.content == expected
        answers.append(expected)
        stream = ask(viewer, message(image), stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in stream) == expected
    assert answers[0] != answers[1]
    plain = ask(viewer, [{"role": "user", "content": "what is it?"}])
    assert plain.usage.prompt_tokens == answer.usage.prompt_tokens - 4


def test_sampling_and_grammars_on_the_hosts_generate(viewer):
    messages = message(picture(1))
    options = {"temperature": 1.5, "n": 2, "seed": 4}
    first = [c.message.content for c in ask(viewer, messages, **options).choices]
    assert [c.message.content for c in ask(viewer, messages, **options).choices] == first
    assert first[0] != first[1]
    forced = ask(viewer, messages, max_tokens=3, logit_bias={"65": 100})
    assert forced.choices[0].message.content == chr(ord("!") + 65) * 3
    shape = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"enum": ["red", "blue"]}},
    }
    answer = ask(viewer, messages, response_format=shape, max_tokens=40)
    assert json.loads(answer.choices[0].message.content) in ("red", "blue")
    assert answer.choices[0].finish_reason == "stop"


def test_what_the_host_does_not_have_is_named(viewer):
    for name in ("presence_penalty", "frequency_penalty"):
        with pytest.raises(openai.BadRequestError, match=f"Unsupported parameter: '{name}'"):
            ask(viewer, message(picture(1)), **{name: 1})
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        ask(viewer, message(picture(1)), logprobs=True)
    with pytest.raises(openai.BadRequestError, match="must be data:image"):
        content = [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/x.png"}}]
        ask(viewer, [{"role": "user", "content": content}])


def test_images_for_a_model_without_eyes(client):
    with pytest.raises(openai.BadRequestError, match="does not take images"):
        ask(client, message(picture(1)))


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return tiny_folders.bert(tmp_path_factory.mktemp("bert"))


def vectors(folder, texts, pooling):
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    found = []
    for text in texts:
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        made = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[pooling]
        found.append(torch.nn.functional.normalize(made, dim=0))
    return torch.stack(found)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_embeddings_are_the_models(bert, pooling):
    texts = ["a", "the other text", "🙂" * 12]
    with run_server(load(bert, pooling=pooling)) as running:
        client = running.client()
        for options in ({}, {"encoding_format": "float"}):  # the client asks for base64 by itself
            answer = client.embeddings.create(model="tiny", input=texts, **options)
            found = torch.tensor([each.embedding for each in answer.data])
            torch.testing.assert_close(found, vectors(bert, texts, pooling), rtol=1e-5, atol=1e-5)
        again = client.embeddings.create(model="tiny", input=texts[1], encoding_format="float")
        assert again.data[0].embedding == answer.data[1].embedding  # whatever came beside it
        ids = client.embeddings.create(model="tiny", input=[[65], [66, 67]])
        assert ids.usage.prompt_tokens == 3
        assert [each.index for each in ids.data] == [0, 1]
        assert running.server.model.abilities == ["embeddings"]
        metrics = httpx.get(f"{running.url}/metrics").text
        assert "flashrt_graph_captures_total 2.0" in metrics  # up to 32 tokens, and up to 64
        assert "flashrt_fallbacks_total 0.0" in metrics


def test_embeddings_that_cannot_be(bert):
    with run_server(load(bert)) as running:
        client = running.client()
        for wrong, message in (
            ("x" * 65, "maximum context length is 64 tokens, got 65"),
            ("", "at least one token"),
            ([[512]], "0 to 511"),
            (["x"] * 3000, "at most 2048 items"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                client.embeddings.create(model="tiny", input=wrong)
        with pytest.raises(openai.BadRequestError, match="'dimensions'"):
            client.embeddings.create(model="tiny", input="x", dimensions=8)
        with pytest.raises(openai.BadRequestError, match="does not chat"):
            ask(client, [{"role": "user", "content": "x"}])
        with pytest.raises(openai.BadRequestError, match="writes no text"):
            client.completions.create(model="tiny", prompt="x")


def test_the_checkpoint_names_its_pooling(tmp_path):
    path = tmp_path / "config.json"
    assert pooling_of(path) == "mean"
    modes = {"word_embedding_dimension": 8, "pooling_mode_cls_token": True}
    path.write_text(json.dumps(modes | {"pooling_mode_mean_tokens": False}))
    assert pooling_of(path) == "cls"
    path.write_text(json.dumps(modes | {"pooling_mode_mean_tokens": True}))
    with pytest.raises(ValueError, match="must be one of"):
        pooling_of(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_len": 16}, "max_len is for models that generate text, got 16"),
        ({"engine": {"slots": 8, "draft": "lookup"}}, "draft is for .* text, got 'lookup'"),
        ({"engine": {"kv_cache": "fp8"}}, "kv_cache is for .* text, got 'fp8'"),
    ],
)
def test_options_of_text_are_refused_for_an_encoder(bert, options, message):
    with pytest.raises(ValueError, match=f"serve: {message}"):
        load(bert, **options)


def test_models_that_are_no_encoders_are_refused(bert):
    from transformers import AutoConfig, AutoTokenizer, BertForSequenceClassification

    classifier = BertForSequenceClassification(AutoConfig.from_pretrained(bert)).eval()
    tokenizer = AutoTokenizer.from_pretrained(bert)
    with pytest.raises(ValueError, match="must return last_hidden_state, BertForSequence"):
        encoder_model(classifier, tokenizer, name="x", pooling="mean")
    with pytest.raises(ValueError, match="has no tokenizer"):
        encoder_model(classifier, None, name="x", pooling="mean")
    with pytest.raises(ValueError, match="pooling must be one of"):
        encoder_model(classifier, tokenizer, name="x", pooling="max")
