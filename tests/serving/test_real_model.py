"""The small real model behind the server: text that means something, several clients at once."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from serving_support import run_server

from flash_rt.flashrt_hf import real_model
from flash_rt.flashrt_hf.server import source

QUESTIONS = ("Why is the sky blue?", "Name a fruit.", "What is 2 + 2?")


@pytest.fixture(scope="module")
def served():
    try:
        real_model.folder()
    except (FileNotFoundError, ImportError) as error:
        pytest.skip(f"no SmolLM2: {str(error).splitlines()[0]}")
    cpu = torch.device("cpu")
    return source.load(
        "smollm2", name="smollm2", max_len=256, engine={}, pooling=None, device=cpu, dtype=None
    )


@pytest.mark.slow
def test_answers_make_sense_and_do_not_mix(served):
    with run_server(served, prefix_reuse=False) as running:
        client = running.client()

        def ask(question: str, **options):
            answer = client.chat.completions.create(
                model="smollm2",
                messages=[{"role": "user", "content": question}],
                temperature=0,
                max_tokens=14,
                **options,
            )
            return answer.choices[0].message.content

        alone = [ask(question) for question in QUESTIONS]
        assert "light" in alone[0]
        assert "4" in alone[2]
        with ThreadPoolExecutor(len(QUESTIONS)) as pool:
            assert list(pool.map(ask, QUESTIONS)) == alone
        schema = {"type": "object", "properties": {"fruit": {"enum": ["apple", "stone"]}}}
        schema |= {"required": ["fruit"], "additionalProperties": False}
        shape = {"type": "json_schema", "json_schema": {"name": "fruit", "schema": schema}}
        found = ask('Name a fruit as JSON: {"fruit": ...}', response_format=shape)
        assert json.loads(found) == {"fruit": "apple"}
        with pytest.raises(Exception, match="'tools'"):
            ask("x", tools=[{"type": "function", "function": {"name": "f"}}])
