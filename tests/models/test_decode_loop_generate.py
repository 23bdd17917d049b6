"""``model.generate`` of an attached model: the loop's where it can be, else the host's and told."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import decoders
import pytest
import torch
import zoo
from decoders import host, model, prompt
from test_text_stream import byte_level

from flash_rt import structures


@pytest.fixture
def llama() -> Iterator[tuple[Any, Any]]:
    """A model and its plan."""
    plan = structures.attach(model("llama"))
    yield model("llama"), plan
    plan.detach()


def notes(plan: Any) -> str:
    return "\n".join(structures.explain(plan).notes)


@pytest.mark.parametrize("name", decoders.DECODERS)
def test_greedy_generate_is_the_hosts_and_runs_on_the_loop(name: str) -> None:
    ids, mask = prompt(2, 19, padding=(13, 0))
    wanted = host(name, ids, mask, max_new_tokens=15)
    plan = structures.attach(model(name))
    try:
        assert torch.equal(host(name, ids, mask, max_new_tokens=15), wanted)
        assert (plan.generation.looped, plan.generation.between) == (1, 0)
        assert "requests run on the decode loop (1 requests so far" in notes(plan)
    finally:
        plan.detach()


@pytest.mark.parametrize("name", ["llama", "gemma3", "granite"])
def test_processors_run_between_steps(name: str) -> None:
    ids, mask = prompt(2, 9, padding=(0, 4))
    options: list[dict[str, Any]] = [
        {"no_repeat_ngram_size": 2},
        {"no_repeat_ngram_size": 3, "repetition_penalty": 1.4},
        {"min_new_tokens": 8, "eos_token_id": list(range(3, 50))},
        {"bad_words_ids": [[5], [7, 8]]},
        {"no_repeat_ngram_size": 2, "max_time": 1000.0},
    ]
    wanted = [host(name, ids, mask, max_new_tokens=12, **o) for o in options]
    plan = structures.attach(model(name))
    try:
        for option, tokens in zip(options, wanted, strict=True):
            assert torch.equal(host(name, ids, mask, max_new_tokens=12, **option), tokens)
        assert plan.generation.between == len(options)
    finally:
        plan.detach()


IN_STEPS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"min_new_tokens": 8, "eos_token_id": list(range(3, 11))},
    {"min_length": 14, "eos_token_id": list(range(3, 11)), "repetition_penalty": 1.2},
    {"eos_token_id": list(range(3, 50))},
    {"max_time": 1000.0},
]


@pytest.mark.parametrize("name", ["llama", "gemma3", "granite"])
def test_processors_that_are_settings_run_in_the_steps(name: str) -> None:
    ids, mask = prompt(2, 9, padding=(0, 4))
    wanted = [host(name, ids, mask, max_new_tokens=12, **o) for o in IN_STEPS]
    plan = structures.attach(model(name))
    try:
        for option, tokens in zip(IN_STEPS, wanted, strict=True):
            assert torch.equal(host(name, ids, mask, max_new_tokens=12, **option), tokens)
        assert (plan.generation.looped, plan.generation.between) == (len(IN_STEPS), 0)
    finally:
        plan.detach()


DRAWS: list[dict[str, Any]] = [
    {"top_k": 0},
    {"temperature": 0.7, "top_k": 12},
    {"top_p": 0.8, "min_p": 0.02},
    {"repetition_penalty": 1.3, "temperature": 1.2},
]


@pytest.mark.parametrize("option", DRAWS)
def test_draws_follow_torchs_seed_and_the_hosts_distribution(option: dict[str, Any]) -> None:
    """The first token, drawn often: chi-square against what the host draws from."""
    ids, mask = prompt(1, 7)
    options = {"do_sample": True, **option}
    scores = host(
        "llama", ids, mask, max_new_tokens=1, return_dict_in_generate=True, output_scores=True,
        **options,
    ).scores[0][0]  # fmt: skip
    exact = scores.softmax(-1)
    plan = structures.attach(model("llama"))
    try:
        torch.manual_seed(5)
        drawn = [
            host("llama", ids, mask, max_new_tokens=1, num_return_sequences=8, **options)[:, -1]
            for _ in range(150)
        ]
        torch.manual_seed(5)
        again = host("llama", ids, mask, max_new_tokens=1, num_return_sequences=8, **options)
        assert plan.generation.looped == 151
    finally:
        plan.detach()
    assert torch.equal(again[:, -1], drawn[0])
    counts = torch.bincount(torch.cat(drawn), minlength=exact.numel()).float()
    expected = exact * counts.sum()
    assert counts[exact == 0].sum() == 0
    common = expected >= 5
    pairs = [(counts[common], expected[common])]
    rest = (counts[~common].sum(), expected[~common].sum())
    if rest[1] >= 5:
        pairs.append((rest[0][None], rest[1][None]))
    statistic = float(sum(((c - e) ** 2 / e).sum() for c, e in pairs))
    freedom = sum(c.numel() for c, _ in pairs) - 1
    tail = torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2))
    assert float(tail) > 0.001


def test_draws_behind_processors_of_the_hosts_are_its_own(llama: tuple[Any, Any]) -> None:
    ids, mask = prompt(2, 7)
    options: dict[str, Any] = {"do_sample": True, "no_repeat_ngram_size": 2, "top_k": 20}
    torch.manual_seed(3)
    ours = host("llama", ids, mask, max_new_tokens=9, **options)
    assert llama[1].generation.between == 1
    llama[1].detach()
    torch.manual_seed(3)
    assert torch.equal(ours, host("llama", ids, mask, max_new_tokens=9, **options))


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


class Streamer:
    def __init__(self) -> None:
        self.puts: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.puts.append((tuple(value.shape), value.tolist()))

    def end(self) -> None:
        self.puts.append("end")


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


HOSTED: list[tuple[dict[str, Any], str]] = [
    ({"cache_implementation": "static"}, "cache_implementation='static'"),
    ({"use_cache": False}, "use_cache=False"),
    ({"num_beams": 2}, ""),
    ({"return_dict_in_generate": True}, "return_dict_in_generate=True"),
]


@pytest.mark.parametrize(("option", "reason"), HOSTED)
def test_what_the_loop_does_not_do_is_the_hosts(option: dict[str, Any], reason: str) -> None:
    ids, mask = prompt(1, 7)

    def run() -> torch.Tensor:
        torch.manual_seed(11)
        result: Any = host("llama", ids, mask, max_new_tokens=9, **option)
        tokens: torch.Tensor = getattr(result, "sequences", result)
        return tokens

    wanted = run()
    plan = structures.attach(model("llama"))
    try:
        assert torch.equal(run(), wanted)
        assert plan.generation.looped == 0
        assert reason in notes(plan)
    finally:
        plan.detach()


def test_a_cache_of_the_callers_is_filled_as_by_the_host(llama: tuple[Any, Any]) -> None:
    from transformers import DynamicCache, StaticCache

    attached, plan = llama
    name = "cache" if "cache" in inspect.signature(attached.forward).parameters else None
    ids, mask = prompt(1, 7)
    for make in (
        lambda: DynamicCache(config=attached.config),
        lambda: StaticCache(config=attached.config, max_cache_len=32),
    ):
        cache = make()
        tokens = host("llama", ids, mask, max_new_tokens=5, **{name or "past_key_values": cache})
        assert int(cache.get_seq_length()) == 7 + 4
        assert torch.equal(tokens, host("llama", ids, mask, max_new_tokens=5))
    assert "the caller passed a cache" in notes(plan)


IDS, MASK = prompt(1, 7)
# What transformers lets through to the decoding itself, where the host has its own answer or error.
ODD: list[tuple[dict[str, Any], str]] = [
    ({"inputs": IDS.float()}, "input_ids are not int64"),
    ({"inputs": IDS.to(torch.int16)}, "input_ids are not int64"),
    ({"inputs": IDS[None], "attention_mask": None}, "input_ids are not int64"),
    ({"inputs": IDS + 1000}, "outside the vocabulary"),
    ({"inputs": IDS - 500}, "outside the vocabulary"),
    ({"inputs": IDS[:0], "attention_mask": None}, "a batch of 0"),
    ({"position_ids": torch.arange(5)[None]}, "position_ids do not count"),
    ({"position_ids": torch.arange(8)[None]}, "position_ids do not count"),
    ({"position_ids": torch.arange(21).view(3, 7)}, "position_ids do not count"),
    ({"position_ids": torch.arange(7)[None] + 3}, "position_ids do not count"),
    ({"position_ids": [[0, 1, 2, 3, 4, 5, 6]]}, "position_ids do not count"),
    ({"attention_mask": torch.ones(1, 8)}, "position_ids do not count"),
    ({"attention_mask": torch.zeros(1, 7)}, "the attention mask is not padding on the left"),
    ({"prefill_chunk_size": 0}, "prefill_chunk_size=0"),
]


@pytest.mark.parametrize(("arguments", "reason"), ODD)
def test_odd_requests_get_the_hosts_answer_or_error(arguments: dict[str, Any], reason: str) -> None:
    attached = copy.deepcopy(model("llama"))
    call = {"inputs": IDS, "attention_mask": MASK, "max_new_tokens": 5, "do_sample": False}

    def answer(options: dict[str, Any]) -> Any:
        try:
            return attached.generate(**{**call, "pad_token_id": 0, **options}).tolist()
        except (RuntimeError, IndexError, AttributeError, ValueError):
            return "an error"

    wanted, usual = answer(arguments), answer({})
    plan = structures.attach(attached)
    assert answer(arguments) == wanted
    assert plan.generation.looped == 0
    assert reason in notes(plan)
    assert answer({}) == usual
    assert plan.generation.looped == 1


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


def test_more_than_eight_rows_and_right_padding_are_the_hosts(llama: tuple[Any, Any]) -> None:
    ids, mask = prompt(9, 4)
    assert host("llama", ids, mask, max_new_tokens=3).shape == (9, 7)
    ids, mask = prompt(2, 6)
    mask[0, -2:] = 0
    host("llama", ids, mask, max_new_tokens=3)
    text = notes(llama[1])
    assert "a batch of 9; the loop runs up to 8 rows" in text
    assert "the attention mask is not padding on the left" in text
    assert llama[1].generation.looped == 0


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


def words() -> Any:
    """A tokenizer whose token i is the word w<i>."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(WordLevel({f"w{i}": i for i in range(zoo.VOCAB)}, unk_token="w0"))
    raw.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="w0", eos_token="w2", padding_side="left"
    )


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


def test_pipeline_runs_on_the_loop() -> None:
    from transformers import pipeline

    tokenizer = words()

    def answers() -> list[str]:
        generator = pipeline(
            "text-generation", model=model("llama"), tokenizer=tokenizer, device="cpu"
        )
        options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}
        one = generator("w5 w6 w7", **options)
        two = generator(["w5 w6 w7 w8", "w9"], batch_size=2, **options)
        return [one[0]["generated_text"], *(t[0]["generated_text"] for t in two)]

    wanted = answers()
    plan = structures.attach(model("llama"))
    try:
        assert answers() == wanted
        assert plan.generation.looped >= 2
    finally:
        plan.detach()


def test_training_and_hooks_are_the_hosts(llama: tuple[Any, Any]) -> None:
    attached, plan = llama
    ids, mask = prompt(1, 7)
    wanted = host("llama", ids, mask, max_new_tokens=5)
    calls: list[int] = []
    handle = attached.model.layers[0].mlp.register_forward_hook(lambda *a: calls.append(1))
    assert torch.equal(host("llama", ids, mask, max_new_tokens=5), wanted)
    assert len(calls) == 5
    handle.remove()
    attached.train()
    try:
        assert host("llama", ids, mask, max_new_tokens=5).shape == (1, 12)
    finally:
        attached.eval()
    text = notes(plan)
    assert "a forward hook is registered on model.layers.0.mlp" in text
    assert "the model is in training mode" in text
    assert plan.generation.looped == 1


def test_an_adapter_put_in_after_attach_is_the_hosts_until_it_is_taken_out() -> None:
    class Adapter(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1.5 * self.inner(x)

    mine = copy.deepcopy(model("llama"))
    ids, mask = prompt(1, 7)

    def run() -> torch.Tensor:
        tokens: torch.Tensor = mine.generate(
            ids, attention_mask=mask, max_new_tokens=8, do_sample=False
        )
        return tokens

    plain, attention = run(), mine.model.layers[0].self_attn
    attention.v_proj = Adapter(attention.v_proj).eval()
    adapted = run()
    attention.v_proj = attention.v_proj.inner
    plan = structures.attach(mine)
    assert torch.equal(run(), plain)
    attention.v_proj = Adapter(attention.v_proj).eval()
    assert torch.equal(run(), adapted)
    attention.v_proj = attention.v_proj.inner
    assert torch.equal(run(), plain)
    mine.double()
    assert torch.equal(run(), plain)
    mine.float()
    assert torch.equal(run(), plain)
    assert plan.generation.looped == 3
    text = notes(plan)
    assert "v_proj was a Linear when the loop was proven and is a Adapter" in text
    assert "parameters are torch.float64" in text
    assert not torch.equal(plain, adapted)


def test_detach_restores_generate_and_copies_are_hosts(llama: tuple[Any, Any]) -> None:
    attached, plan = llama
    cls = type(attached).__mro__
    ids, mask = prompt(1, 7)
    wanted = host("llama", ids, mask, max_new_tokens=5)
    twin = copy.deepcopy(attached)
    assert type(twin).generate is type(model("llama")).__mro__[2].generate
    tokens = twin.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert torch.equal(tokens, wanted)
    assert plan.generation.looped == 1
    assert type(attached).__name__ == "LlamaForCausalLM"
    plan.detach()
    assert len(type(attached).__mro__) == len(cls) - 2
    assert torch.equal(host("llama", ids, mask, max_new_tokens=5), wanted)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt2", "gpt_neox", "starcoder2", "falcon"])
def test_other_decoders_generate_on_the_host_and_say_why(name: str) -> None:
    animal: Any = zoo.shared(name)
    ids, mask = prompt(1, 7)
    arguments: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    wanted = animal.generate(ids, **arguments)
    plan = structures.attach(animal)
    try:
        assert torch.equal(animal.generate(ids, **arguments), wanted)
        assert "generate: the host's own code, because " in notes(plan)
        with pytest.raises(ValueError, match="cannot run on the loop: "):
            structures.decode_loop(animal, max_len=64)
    finally:
        plan.detach()
