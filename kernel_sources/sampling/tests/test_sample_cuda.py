"""Draws on a GPU: the tokens of the CPU, graph replay with changing settings, launch order."""

import pytest
import torch
from _common.family import replayed, write_late
from sampling_cases import settings_of, state_of, stops_of
from test_sample_step import random_settings
from test_sampling_dispatch import arguments_of, drafts_of, everything_of


def mixture(rows, size, seed, places=None):
    """CPU arguments with everything on, other for each row."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, size) if places is None else (rows, places, size)
    scale = (0.001, 0.3, 2.0, 6.0)[seed % 4]
    logits = torch.randn(shape, generator=generator) * scale
    if seed % 3 == 0:
        logits = logits.round(decimals=1)
    if seed % 5 == 0:
        logits[torch.rand(shape, generator=generator) < 0.5] = -torch.inf
    settings = settings_of(rows, "cpu", **random_settings(rows, generator))
    settings |= settings_of(
        rows, "cpu", repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.3, min_new=2
    )
    table = torch.randint(0, 5, (rows, size), generator=generator, dtype=torch.int32)
    words = (*shape[:-1], (size + 31) // 32)
    mask = torch.randint(-(2**31), 2**31, words, generator=generator).int()
    settings |= dict(
        occurrences=table,
        bias_ids=torch.randint(-1, size, (rows, 40), generator=generator),
        bias_values=torch.randn(rows, 40, generator=generator),
        allowed=mask if seed % 2 else torch.full_like(mask, -1),
    )
    state = state_of(rows, "cpu", length=seed)
    return logits, state, stops_of(rows, "cpu", eos=(1, 2)), settings


def moved(value, device):
    """A copy on ``device`` of a tensor, or of all in a dict or sequence."""
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if isinstance(value, dict):
        return {name: moved(tensor, device) for name, tensor in value.items()}
    return [moved(tensor, device) for tensor in value]


@pytest.mark.parametrize("size", [1, 33, 5003, 151936, 300_001])
@pytest.mark.parametrize("seed", range(12))
def test_the_tokens_of_the_cpu(sampling, cuda, size, seed):
    on_cpu = mixture(4, size, seed)
    results = []
    for device in ("cpu", cuda):
        logits, state, stops, settings = (moved(part, device) for part in on_cpu)
        for _ in range(2):
            sampling.sample_step(logits, *state, *stops, pad_id=-1, **settings)
        results.append([*state, settings["occurrences"]])
    for ours, reference in zip(results[1], results[0], strict=True):
        assert torch.equal(ours.cpu(), reference)


@pytest.mark.parametrize("size", [33, 5003, 151936])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("with_probs", [False, True])
def test_the_acceptance_of_the_cpu(sampling, cuda, size, seed, with_probs):
    logits, state, stops, settings = mixture(3, size, seed, places=4)
    probs = (logits[:, :3] * 0.7).softmax(-1).contiguous()
    drafts = torch.multinomial(probs.view(-1, size), 1).view(3, 3)
    probs = probs if with_probs else torch.zeros(0)
    results = []
    for device in ("cpu", cuda):
        parts = (logits, state, stops, settings, drafts, probs)
        x, after, ends, knobs, guess, q = (moved(part, device) for part in parts)
        accepted = torch.zeros(3, dtype=torch.int32, device=device)
        sampling.accept_drafts(
            *(x, guess, *after, accepted, *ends),
            draft_probs=q if with_probs else None,
            pad_id=-1,
            **knobs,
        )
        results.append([*after, accepted, knobs["occurrences"]])
    for ours, reference in zip(results[1], results[0], strict=True):
        assert torch.equal(ours.cpu(), reference)


def test_one_recording_serves_any_settings(sampling, cuda):
    size = 151936
    scratch = sampling.sample_workspace(2, size, cuda)
    recorded, settings = arguments_of(cuda, size=size), everything_of(cuda, size=size)
    out = sampling.logprobs(recorded[0], recorded[5], top_n=3)

    def step():
        sampling.sample_step(*recorded, **settings, pad_id=5, workspace=scratch)
        sampling.logprobs(recorded[0], recorded[5], top_n=3, workspace=scratch, out=out)

    graph = torch.cuda.CUDAGraph()
    step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    changes = [
        dict(temperature=0.0),
        dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
        dict(top_k=7),
        dict(top_p=0.3, repetition_penalty=1.0),
        dict(min_p=0.2, seed=99),
    ]
    for change in changes:
        for name, tensor in settings_of(2, cuda, **change).items():
            settings[name].copy_(tensor)
        for tensor in (*recorded[1:6], settings["occurrences"]):
            tensor.zero_()
        before = {name: tensor.clone() for name, tensor in settings.items()}
        eager = arguments_of(cuda, size=size)
        sampling.sample_step(*eager, **before, pad_id=5)
        expected = sampling.logprobs(eager[0], eager[5], top_n=3)
        graph.replay()
        torch.cuda.synchronize()
        pairs = [*zip(recorded, eager, strict=True), *zip(out, expected, strict=True)]
        for ours, other in (*pairs, (settings["occurrences"], before["occurrences"])):
            assert torch.equal(ours, other)
        assert recorded[2].tolist() == [1, 1]


def test_replayed_acceptance_equals_eager(sampling, cuda):
    scratch = sampling.sample_workspace(6, 3000, cuda)
    (expected, probs), (actual, _) = drafts_of(cuda), drafts_of(cuda)
    numbers = dict(pad_id=5, draft_probs=probs, workspace=scratch)
    numbers |= settings_of(2, cuda, seed=3, temperature=0.7, top_p=0.9)
    sampling.accept_drafts(*expected, **numbers)

    def from_zero():
        for tensor in actual[2:8]:
            tensor.zero_()
        sampling.accept_drafts(*actual, **numbers)

    replayed(from_zero)
    for ours, other in zip(actual, expected, strict=True):
        assert torch.equal(ours, other)
    assert min(expected[7].tolist()) >= 1


def test_everything_may_have_a_producer_in_flight(sampling, cuda):
    size = 151936
    scratch = sampling.sample_workspace(2, size, cuda)
    expected, settings = arguments_of(cuda, size=size), everything_of(cuda, size=size)
    right = {name: tensor.clone() for name, tensor in settings.items()}
    sampling.sample_step(*expected, **right, pad_id=5, workspace=scratch)
    for name in ("logits", *(n for n in settings if n != "occurrences")):
        actual, late = arguments_of(cuda, size=size), dict(settings)
        late["occurrences"] = settings["occurrences"].clone()
        target = actual[0] if name == "logits" else torch.zeros_like(settings[name])
        values = actual[0].clone() if name == "logits" else settings[name]
        late |= {} if name == "logits" else {name: target}
        target.zero_()
        torch.cuda.synchronize()
        write_late(target, values)
        sampling.sample_step(*actual, **late, pad_id=5, workspace=scratch)
        for ours, other in zip(actual, expected, strict=True):
            assert torch.equal(ours, other), name


def test_a_workspace_serves_smaller_calls_of_every_kind(sampling, cuda):
    scratch = sampling.sample_workspace(8, 100_000, cuda)
    wrong = torch.zeros((), dtype=torch.int64, device=cuda)
    cases = []
    for index, (rows, size) in enumerate(((8, 100_000), (1, 33), (3, 70_001), (2, 4096))):
        cases.append([moved(part, cuda) for part in mixture(rows, size, index + 1)])
    expected = []
    for logits, state, stops, settings in cases:
        once = [tensor.clone() for tensor in state]
        table = settings["occurrences"].clone()
        sampling.sample_step(
            logits, *once, *stops, pad_id=-1, **(settings | dict(occurrences=table))
        )
        expected.append((once[4], sampling.logprobs(logits, once[4], top_n=2)[1]))
    for turn in range(400):
        (logits, state, stops, settings), (ids, top) = (
            both[turn % len(cases)] for both in (cases, expected)
        )
        once = [tensor.clone() for tensor in state]
        table = settings["occurrences"].clone()
        given = settings | dict(occurrences=table, workspace=scratch)
        sampling.sample_step(logits, *once, *stops, pad_id=-1, **given)
        best = sampling.logprobs(logits, ids, top_n=2, workspace=scratch)[1]
        wrong += (sampling.argmax(logits, workspace=scratch) != best[:, 0]).sum()
        wrong += (once[4] != ids).sum() + (best != top).sum()
    assert wrong.item() == 0
