"""The benchmark's own parts: models, peers, timing, rule, records."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from flash_rt.flashrt_hf.bench import models, peers, record, rule, text, timing
from flash_rt.flashrt_hf.bench.quantised_peers import is_quantised

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny():
    return models.build("tiny-llama", device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama-3.2-1b", 1_235_814_400), ("qwen3-0.6b", 596_049_920), ("qwen3-8b", 8_190_735_360)],
)
def test_configurations_have_the_published_size(name, parameters):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(models.config(name))
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_weights_are_drawn_as_documented(tiny):
    weight = tiny.model.layers[0].mlp.down_proj.weight
    assert weight.std().item() == pytest.approx(weight.shape[1] ** -0.5, rel=0.05)
    norm = tiny.model.norm.weight
    assert norm.mean().item() == pytest.approx(1.0, abs=0.05)
    assert norm.std().item() == pytest.approx(0.1, rel=0.4)
    again = models.build("tiny-llama", device=CPU, dtype=torch.float32)
    for mine, other in zip(tiny.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_rotary_frequencies_are_the_configurations(tiny):
    from transformers import AutoModelForCausalLM

    expected = AutoModelForCausalLM.from_config(models.config("tiny-llama")).model.rotary_emb
    assert torch.equal(tiny.model.rotary_emb.inv_freq, expected.inv_freq)


def test_twin_shares_parameters_and_nothing_else(tiny):
    other = models.twin(tiny)
    for mine, theirs in zip(tiny.parameters(), other.parameters(), strict=True):
        assert mine is theirs
    assert other.lm_head.weight is other.model.embed_tokens.weight
    for mine, theirs in zip(tiny.modules(), other.modules(), strict=True):
        assert mine is not theirs
    assert tiny.model.rotary_emb.inv_freq is not other.model.rotary_emb.inv_freq


def test_traffic_counts_tied_and_untied_embeddings(tiny):
    everything = sum(p.numel() for p in tiny.parameters())
    found = models.traffic(tiny)
    assert found.weight_bytes == 4 * everything
    assert found.cache_bytes_per_position == 2 * 2 * 2 * 64 * 4
    assert found.step_bytes(10) == 4 * everything + 10 * 2048
    untied = models.build("tiny-qwen3", device=CPU, dtype=torch.bfloat16)
    rest = sum(p.numel() for p in untied.parameters()) - 512 * 64
    assert models.traffic(untied).weight_bytes == 2 * rest


def test_unknown_names_are_refused(tiny):
    with pytest.raises(ValueError, match=r"bench: model must be one of .*, got 'qwen9'"):
        models.config("qwen9")
    with pytest.raises(ValueError, match=r"bench: peer must be one of .*, got 'vllm'"):
        peers.make_peer("vllm", tiny, cache_tokens=64)


def _greedy_without_cache(model, ids, new_tokens):
    for _ in range(new_tokens):
        token = model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, token], dim=1)
    return ids[:, -new_tokens:]


@pytest.mark.parametrize("name", [n for n in peers.PEERS if not is_quantised(n)])
def test_peers_continue_like_the_host_without_a_cache(tiny, name):
    runner = peers.make_peer(name, tiny, cache_tokens=64, backend="aot_eager")
    ids = models.prompt_ids(512, 9, device=CPU)
    expected = _greedy_without_cache(tiny, ids, 12)
    assert torch.equal(runner.generate(ids, 12), expected)
    assert torch.equal(runner.generate(ids, 12), expected), "a second call starts over"
    assert torch.equal(runner.generate(ids[:, :5], 1), _greedy_without_cache(tiny, ids[:, :5], 1))


def test_a_quantised_peer_continues_like_its_own_weights(tiny):
    pytest.importorskip("torchao")
    kept = {name: p.detach().clone() for name, p in tiny.named_parameters()}
    runner = peers.make_peer("torchao-fp8", tiny, cache_tokens=64, backend="aot_eager")
    assert all(torch.equal(p, kept[name]) for name, p in tiny.named_parameters())
    rounded = models.alias(tiny)
    elements = scales = 0
    for module in rounded.modules():
        if isinstance(module, torch.nn.Linear):
            scale = module.weight.abs().amax(1, keepdim=True) / 448
            values = (module.weight / scale).to(torch.float8_e4m3fn).float() * scale
            module.weight = torch.nn.Parameter(values, requires_grad=False)
            elements, scales = elements + values.numel(), scales + values.shape[0]
    ids = models.prompt_ids(512, 9, device=CPU)
    assert torch.equal(runner.generate(ids, 12), _greedy_without_cache(rounded, ids, 12))
    assert tiny.config.tie_word_embeddings  # the head is quantised, the table only gathered from
    norms = sum(p.numel() for name, p in tiny.named_parameters() if "norm" in name)
    read = models.traffic(runner.model).weight_bytes
    assert read == elements + 4 * scales + 4 * norms


def test_a_quantised_peer_says_where_it_runs(tiny, monkeypatch):
    pytest.importorskip("torchao")
    with pytest.raises(ValueError, match=r"peer 'torchao-int4' must run in bfloat16 on CUDA, got"):
        peers.make_peer("torchao-int4", tiny, cache_tokens=64)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ValueError, match="peer 'torchao-fp8' needs the package torchao"):
        peers.make_peer("torchao-fp8", tiny, cache_tokens=64)


def test_forced_steps_give_the_logits_of_a_whole_forward(tiny):
    ids, forced = models.prompt_ids(512, 14, rows=2, device=CPU).split([6, 8], dim=1)
    runner = peers.make_peer("eager", tiny, cache_tokens=32)
    steps = torch.stack(list(runner.forced_steps(ids, forced)), dim=1)
    whole = tiny(input_ids=torch.cat([ids, forced], 1), use_cache=False).logits[:, 5:]
    torch.testing.assert_close(steps, whole, rtol=1e-4, atol=1e-4)


def test_interleave_goes_round_and_lets_slow_ones_leave():
    order = []

    def candidate(name, value):
        def measure():
            order.append(name)
            return value

        return measure

    found = timing.interleave({"a": candidate("a", 1.0), "b": candidate("b", 3.0)}, rounds=3)
    assert order == ["a", "b"] * 3
    assert found["b"].values_ms == (3.0, 3.0, 3.0)
    order.clear()
    found = timing.interleave({"a": candidate("a", 1.0)}, rounds=5, budget_s=0.0, least_rounds=2)
    assert order == ["a", "a"]
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        timing.interleave({}, rounds=0)


def test_samples_report_median_and_spread():
    samples = timing.Samples((2.0, 1.0, 4.0))
    assert samples.median_ms == 2.0
    assert samples.spread == 1.5


def test_logit_error_is_that_of_the_formula():
    reference = torch.tensor([[0.0, 1.0, 2.0], [5.0, 1.0, 0.0]])
    logits = torch.tensor([[0.0, 1.5, 2.0], [5.0, 6.0, 0.0]])
    error = rule.LogitError()
    error.add(logits[:1], reference[:1])
    error.add(logits[1:], reference[1:])
    assert error.rms == pytest.approx(math.sqrt((0.25 + 25.0) / 6))
    assert error.largest == 5.0
    assert error.top1 == 0.5
    assert error.positions == 2
    near = reference[:1].double() + 2.0**-30  # below what fp32 tells from 1
    error = rule.LogitError()
    error.add(reference[:1], near)
    assert error.rms == error.largest == 2.0**-30
    with pytest.raises(ValueError, match="must be finite"):
        error.add(torch.full((1, 3), math.nan), reference[:1])
    with pytest.raises(ValueError, match=r"must be \[N, V\]"):
        error.add(logits, reference[:1])


@pytest.mark.parametrize(
    ("rms", "largest", "agreeing", "passed"),
    [(1.24, 1.9, 986, True), (1.26, 1.0, 1000, False), (1.0, 2.1, 1000, False), (1, 1, 984, False)],
)
def test_the_greedy_fidelity_rule(rms, largest, agreeing, passed):
    host = rule.LogitError(1.0, 1.0, 1, 1000, 1000)
    ours = rule.LogitError(rms**2, largest, 1, 1000, agreeing)
    verdict = rule.judge(ours, host, with_top1=True)
    assert verdict.passed is passed
    assert len(verdict.broken) == (0 if passed else 1)


def test_top1_counts_only_on_real_text():
    host = rule.LogitError(1.0, 1.0, 1, 1000, 1000)
    assert rule.judge(rule.LogitError(1.0, 1.0, 1, 1000, 0), host, with_top1=False).passed


def test_records_are_written_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "records" / "one.json"
    begun = record.start("decode", CPU, commit_id="abc", settings=dict(model="tiny-llama"))
    record.write(begun, path)
    before = path.read_text()
    with pytest.raises(ValueError, match="Out of range float values"):
        record.write(begun | dict(parts=dict(time=math.nan)), path)
    assert path.read_text() == before
    assert [p.name for p in path.parent.iterdir()] == ["one.json"]
    found = record.read(path)
    assert found["environment"]["commit"] == "abc"
    assert found["environment"]["packages"]["torch"] == torch.__version__
    assert found["settings"] == dict(model="tiny-llama")
    path.write_text(json.dumps(found | dict(schema=0)))
    with pytest.raises(ValueError, match="must have schema 1, got 0"):
        record.read(path)


def test_read_bandwidth_is_a_rate():
    assert record.read_bandwidth(CPU, size_bytes=1 << 20, rounds=1) > 0


def test_reference_text_is_long_and_stable():
    body = text.reference_text()
    assert len(body) > 300_000
    assert text.digest(body) == text.digest(text.reference_text())


def test_a_record_keeps_the_command_without_the_folder_of_the_record():
    from flash_rt.flashrt_hf.bench.command import recorded_command

    arguments = ["decode", "--model", "tiny-llama", "--json", "/some/where/x.json"]
    kept = ["flash-rt", "bench", "decode", "--model", "tiny-llama", "--json", "x.json"]
    assert recorded_command(arguments, "/some/where/x.json") == kept
    assert recorded_command(arguments[:3], None) == kept[:5]
