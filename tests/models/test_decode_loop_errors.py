"""What bad input gets: a message with rule and value, and a loop that still works afterwards."""

from __future__ import annotations

import copy
from typing import Any

import decoders
import numpy as np
import pytest
import torch
import zoo
from decoders import model, prompt

from flash_rt import structures
from flash_rt.structures.catalogue.spec import NotThisForm
from flash_rt.structures.loops.rotary import rotary_table


@pytest.fixture(scope="module")
def loop() -> Any:
    return structures.decode_loop(copy.deepcopy(model("llama")), max_len=20, batch_size=2)


IDS = prompt(1, 4)[0]
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, ValueError, "at least one token, got 0"),
    ({"input_ids": prompt(1, 20)[0]}, ValueError, "must fit max_len = 20, got 20 tokens"),
    ({"input_ids": prompt(1, 33)[0]}, ValueError, "must fit max_len = 20, got 33 tokens"),
    ({"input_ids": prompt(3, 4)[0]}, ValueError, "1 to 2 rows, got 3"),
    ({"input_ids": IDS[0]}, ValueError, "int64 .B, P., got torch.int64 of shape .4,."),
    ({"input_ids": IDS.float()}, ValueError, "int64 .B, P., got torch.float32"),
    ({"input_ids": IDS + 1000}, ValueError, "from 0 to 127, got 1"),
    ({"input_ids": IDS - 200}, ValueError, "from 0 to 127, got -"),
    ({"max_new_tokens": 17}, ValueError, "fit max_len = 20, got 4 . 17"),
    ({"max_new_tokens": 0}, ValueError, "at least 1, got 0"),
    ({"attention_mask": torch.ones(1, 5)}, ValueError, "shape .1, 4. of input_ids, got .1, 5."),
    ({"attention_mask": torch.tensor([[1, 1, 0, 0]])}, ValueError, "zeros on the left"),
    ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, ValueError, "zeros on the left"),
    ({"attention_mask": torch.zeros(1, 4)}, ValueError, "zeros on the left"),
    ({"eos_token_id": list(range(9))}, ValueError, "at most 8 ids, got 9"),
    ({"input_ids": IDS.tolist()}, TypeError, "input_ids must be a tensor, got list"),
    ({"input_ids": IDS.numpy()}, TypeError, "input_ids must be a tensor, got ndarray"),
    ({"input_ids": None}, TypeError, "input_ids must be a tensor, got NoneType"),
    ({"input_ids": IDS[:0]}, ValueError, "1 to 2 rows, got 0"),
    ({"input_ids": IDS.short()}, ValueError, "int64 .B, P., got torch.int16"),
    ({"attention_mask": [[1] * 4]}, TypeError, "attention_mask must be a tensor, got list"),
    ({"max_new_tokens": "3"}, TypeError, "max_new_tokens must be an integer, got '3'"),
    ({"max_new_tokens": 2.5}, TypeError, "max_new_tokens must be an integer, got 2.5"),
    ({"max_new_tokens": -1}, ValueError, "at least 1, got -1"),
    ({"eos_token_id": "5"}, TypeError, "eos_token_id must be an integer, got '5'"),
    ({"eos_token_id": [5.0]}, TypeError, "eos_token_id must be an integer, got 5.0"),
    ({"eos_token_id": [None]}, TypeError, "eos_token_id must be an integer, got None"),
    ({"pad_token_id": "x"}, TypeError, "pad_token_id must be an integer, got 'x'"),
    ({"do_sample": 1}, TypeError, "generate: do_sample must be True or False, got 1"),
    ({"num_beams": 4}, TypeError, "num_beams is not an option, got 4"),
    ({"temperature": 0.7}, ValueError, "temperature needs do_sample=True, got temperature=0.7"),
    ({"do_sample": True, "temperature": 0}, ValueError, "temperature must be above 0"),
    ({"do_sample": True, "top_p": 2}, ValueError, "generate: top_p must be above 0 and at most 1"),
    ({"logit_bias": {128: 1.0}}, ValueError, "logit_bias must have ids from 0 to 127, got 128"),
    ({"num_return_sequences": 3}, ValueError, "got 1 times num_return_sequences = 3"),
    ({"num_return_sequences": 0}, ValueError, "num_return_sequences must be at least 1, got 0"),
    ({"stop_strings": ["x"]}, ValueError, "stop_strings need the tokenizer, got tokenizer=None"),
    ({"stop_strings": [""]}, ValueError, "stop_strings must be texts that are not empty"),
]


@pytest.mark.parametrize(("arguments", "error", "text"), BAD)
def test_a_bad_request_is_named_and_leaves_the_loop_working(
    loop: Any, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    wanted = loop.generate(IDS, max_new_tokens=5)
    with pytest.raises(error, match=text):
        loop.generate(**{"input_ids": IDS, **arguments})
    assert torch.equal(loop.generate(IDS, max_new_tokens=5), wanted)


@pytest.mark.parametrize("make", [int, np.int64, np.int32, torch.tensor])
def test_integers_of_numpy_and_torch_are_integers(loop: Any, make: Any) -> None:
    wanted = loop.generate(IDS, max_new_tokens=9, eos_token_id=())
    stop = int(wanted[0, 6])
    short = loop.generate(
        IDS, max_new_tokens=make(9), eos_token_id=make(stop), pad_token_id=make(3)
    )
    assert torch.equal(short, wanted[:, : short.shape[1]])
    assert int(short[0, -1]) == stop
    assert torch.equal(loop.generate(IDS, max_new_tokens=9, eos_token_id=[make(stop)]), short)
    for ids in (IDS.int(), torch.stack([IDS, IDS], -1)[..., 0]):
        assert torch.equal(loop.generate(ids, max_new_tokens=9, eos_token_id=()), wanted)


def test_a_refused_request_streams_nothing(loop: Any) -> None:
    puts: list[Any] = []

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            puts.append(value)

        def end(self) -> None:
            puts.append("end")

    loop._model.train()
    with pytest.raises(RuntimeError, match="training mode"):
        loop.generate(IDS, max_new_tokens=3, streamer=Streamer())
    loop._model.eval()
    assert puts == []


def test_without_max_new_tokens_the_cache_is_filled(loop: Any) -> None:
    assert loop.generate(IDS, eos_token_id=()).shape == (1, 20)
    assert loop.generate(prompt(1, 19)[0], eos_token_id=()).shape == (1, 20)


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"max_len": 1}, "max_len must be at least 2, got 1"),
        ({"max_len": 64, "batch_size": 9}, "batch_size must be 1 to 8, got 9"),
        ({"max_len": 64, "batch_size": 0}, "batch_size must be 1 to 8, got 0"),
    ],
)
def test_bad_sizes(sizes: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        structures.decode_loop(model("llama"), **sizes)
    assert "_flashrt_plan" not in vars(model("llama"))


@pytest.mark.parametrize("sizes", [{"max_len": "64"}, {"max_len": 64.5}, {"max_len": None}])
def test_sizes_that_are_no_integers(sizes: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="max_len must be an integer, got "):
        structures.decode_loop(model("llama"), **sizes)
    with pytest.raises(TypeError, match="batch_size must be an integer, got 1.5"):
        structures.decode_loop(model("llama"), max_len=64, batch_size=1.5)  # type: ignore[arg-type]
    assert "_flashrt_plan" not in vars(model("llama"))


def test_explain_wants_a_plan() -> None:
    with pytest.raises(TypeError, match="plan must be what attach returned, got LlamaForCausalLM"):
        structures.explain(model("llama"))


@pytest.mark.parametrize("name", ["bert", "gpt2", "qwen3_moe", "mamba2", "t5", "vit", "whisper"])
def test_what_is_no_dense_decoder_is_refused_with_reasons(name: str) -> None:
    with pytest.raises(ValueError, match="cannot run on the loop: ") as refused:
        structures.decode_loop(zoo.shared(name), max_len=64)
    assert "_flashrt_plan" not in vars(zoo.shared(name))
    plan = structures.attach(zoo.shared(name))
    with pytest.raises(ValueError, match="cannot run on the loop: "):
        structures.decode_loop(zoo.shared(name), max_len=64)
    assert plan.attached
    plan.detach()
    if name == "qwen3_moe":
        assert "2 of 2 decoder layers are not bound" in str(refused.value)
        assert "model.layers.1: one gated MLP is wanted" in str(refused.value)


def test_training_mode_and_hooks_stop_the_loop_and_not_for_good() -> None:
    mine = copy.deepcopy(model("llama"))
    loop = structures.decode_loop(mine, max_len=32)
    wanted = loop.generate(IDS, max_new_tokens=5)
    handle = mine.model.norm.register_forward_hook(lambda *a: None)
    with pytest.raises(RuntimeError, match="a forward hook is registered on model.norm"):
        loop.generate(IDS, max_new_tokens=5)
    handle.remove()
    mine.train()
    with pytest.raises(RuntimeError, match="training mode"):
        loop.generate(IDS, max_new_tokens=5)
    mine.eval()
    assert torch.equal(loop.generate(IDS, max_new_tokens=5), wanted)


def test_a_failing_streamer_leaves_the_loop_working() -> None:
    loop = structures.decode_loop(copy.deepcopy(model("llama")), max_len=32)
    wanted = loop.generate(IDS, max_new_tokens=9)

    class Failing:
        steps = ends = 0

        def put(self, value: torch.Tensor) -> None:
            self.steps += 1
            if self.steps == 4:
                raise KeyError("streamer")

        def end(self) -> None:
            self.ends += 1

    streamer = Failing()
    with pytest.raises(KeyError, match="streamer"):
        loop.generate(IDS, max_new_tokens=9, streamer=streamer)
    assert (streamer.steps, streamer.ends) == (4, 1)
    assert torch.equal(loop.generate(IDS, max_new_tokens=9), wanted)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}


def test_a_rotary_that_depends_on_the_length_of_a_call_is_refused() -> None:
    animal = zoo.redraw(
        zoo.causal("Phi3", rope_parameters=LONG, original_max_position_embeddings=64)()
    ).eval()
    short = structures.decode_loop(animal, max_len=64)
    assert short.generate(IDS, max_new_tokens=3).shape == (1, 7)
    with pytest.raises(ValueError, match="depends on the length of its call"):
        structures.decode_loop(animal, max_len=65)


def test_the_hosts_rotary_is_left_as_it_was() -> None:
    animal: Any = zoo.causal("Llama", rope_parameters=DYNAMIC)()
    rotary = animal.model.rotary_emb
    before = rotary.inv_freq.clone()
    with pytest.raises(NotThisForm, match="depends on the length of its call"):
        rotary_table(rotary, None, 1000, torch.zeros(1))
    assert torch.equal(rotary.inv_freq, before)
    assert rotary.max_seq_len_cached == animal.config.max_position_embeddings
    assert decoders.model("llama").model.rotary_emb is not rotary
