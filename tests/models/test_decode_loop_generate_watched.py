"""``model.generate`` under streamers and stopping criteria: they see what the host shows them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoders import host, model, prompt
from generating import Streamer
from test_text_stream import byte_level

from flash_rt import structures


def test_a_stopping_criterion_sees_every_step(llama: tuple[Any, Any]) -> None:
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Counts(StoppingCriteria):
        def __init__(self) -> None:
            self.widths: list[int] = []

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            self.widths.append(input_ids.shape[1])
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 12)

    criterion = Counts()
    ids, mask = prompt(1, 7)
    tokens = host(
        "llama",
        *(ids, mask),
        max_new_tokens=30,
        eos_token_id=None,
        stopping_criteria=StoppingCriteriaList([criterion]),
    )
    assert tokens.shape == (1, 12)
    assert criterion.widths == [8, 9, 10, 11, 12]
    assert llama[1].generation.looped == 1


@pytest.mark.parametrize("option", [{}, {"no_repeat_ngram_size": 2}, {"max_time": 1e3}])
def test_a_streamer_gets_what_the_host_streams(option: dict[str, Any]) -> None:
    ids, mask = prompt(1, 7)
    theirs, ours = Streamer(), Streamer()
    host("llama", ids, mask, max_new_tokens=9, streamer=theirs, **option)
    plan = structures.attach(model("llama"))
    host("llama", ids, mask, max_new_tokens=9, streamer=ours, **option)
    assert plan.generation.looped + plan.generation.between == 1
    plan.detach()
    assert ours.puts == theirs.puts


@pytest.mark.parametrize("option", [{}, {"no_repeat_ngram_size": 2}, {"max_time": 1e3}])
def test_a_streamer_gets_its_end_when_the_request_fails(
    llama: tuple[Any, Any], option: dict[str, Any]
) -> None:
    class Failing(Streamer):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.puts) == 4:
                raise KeyError("streamer")

    ids, mask = prompt(1, 7)
    wanted, streamer = host("llama", ids, mask, max_new_tokens=9), Failing()
    with pytest.raises(KeyError, match="streamer"):
        host("llama", ids, mask, max_new_tokens=9, streamer=streamer, **option)
    assert len(streamer.puts) == 5 and streamer.puts[-1] == "end"
    assert torch.equal(host("llama", ids, mask, max_new_tokens=9), wanted)


@pytest.mark.parametrize("eos", [None, [5, 6]])
def test_rows_that_a_foreign_criterion_stops_are_padded_as_by_the_host(eos: Any) -> None:
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Sevens(StoppingCriteria):
        eos_token_id = torch.tensor([7])

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return input_ids[:, -1] % 7 == 0

    ids, mask = prompt(2, 7, padding=(3, 0))
    options: dict[str, Any] = {
        "max_new_tokens": 12,
        "eos_token_id": eos,
        "stopping_criteria": StoppingCriteriaList([Sevens()]),
    }
    wanted = host("llama", ids, mask, **options)
    assert (wanted[:, -1] == 0).any()
    plan = structures.attach(model("llama"))
    try:
        assert torch.equal(host("llama", ids, mask, **options), wanted)
        assert plan.generation.looped == 1
        options["no_repeat_ngram_size"] = 2
        assert host("llama", ids, mask, **options).shape[0] == 2
        assert plan.generation.between == 1
    finally:
        plan.detach()


def test_generate_inside_a_streamer_disturbs_neither(llama: tuple[Any, Any]) -> None:
    ids, mask = prompt(1, 9)
    other, other_mask = prompt(1, 4)
    alone = host("llama", ids, mask, max_new_tokens=8)
    inner = host("llama", other, other_mask, max_new_tokens=8)
    found: list[torch.Tensor] = []

    class Nested(Streamer):
        def put(self, value: torch.Tensor) -> None:
            if len(found) < 2:
                found.append(host("llama", other, other_mask, max_new_tokens=8))

    assert torch.equal(host("llama", ids, mask, max_new_tokens=8, streamer=Nested()), alone)
    assert all(torch.equal(tokens, inner) for tokens in found)


def test_stop_strings_are_the_hosts_and_run_in_the_steps(llama: tuple[Any, Any]) -> None:
    ids, mask = prompt(2, 6)
    free = host("llama", ids, mask, max_new_tokens=20, eos_token_id=None)
    llama[1].detach()
    tokenizer = byte_level()
    texts = [tokenizer.decode(free[0, 10:12]), tokenizer.decode(free[1, 8:10])]
    stop = {"stop_strings": texts, "tokenizer": tokenizer}
    wanted = host("llama", ids, mask, max_new_tokens=20, **stop)
    assert wanted.shape[1] < 26
    plan = structures.attach(model("llama"))
    try:
        assert torch.equal(host("llama", ids, mask, max_new_tokens=20, **stop), wanted)
        assert plan.generation.looped == 1
    finally:
        plan.detach()
