"""What torch needs to know about the ops: schemas, fakes, torch.compile."""

import sys

import pytest
import torch
from sampling_cases import NEUTRAL, settings_of


def arguments_of(device, rows=2, size=3000):
    generator = torch.Generator().manual_seed(0)
    integers = dict(dtype=torch.int32, device=device)
    return (
        torch.randn(rows, size, generator=generator).to(device),
        torch.zeros(rows, 4, dtype=torch.int64, device=device),
        torch.zeros(rows, **integers),
        torch.zeros(rows, **integers),
        torch.zeros(rows, dtype=torch.bool, device=device),
        torch.zeros(rows, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.full((rows,), 3, **integers),
    )


def test_opcheck(sampling, device):
    ops = sys.modules[f"{sampling.__name__}.ops"].ops
    arguments = arguments_of(device)
    scratch = sampling.workspace(2, 3000, device)
    out = torch.zeros(2, dtype=torch.int64, device=device)
    torch.library.opcheck(ops.argmax, (arguments[0], scratch, out))
    torch.library.opcheck(ops.greedy_step, (*arguments, 5, scratch))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(sampling, device, dynamic):
    def block(logits, *rest):
        scratch = sampling.workspace(logits.shape[0], logits.shape[1], logits.device)
        sampling.greedy_step(logits, *rest, pad_id=5, workspace=scratch)
        return sampling.argmax(logits.neg())

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (2, 5):
        expected, actual = arguments_of(device, rows), arguments_of(device, rows)
        assert torch.equal(compiled(*actual), block(*expected))
        for one, other in zip(actual, expected, strict=True):
            assert torch.equal(one, other)
        assert expected[2].tolist() == [1] * rows


def everything_of(device, rows=2, size=3000):
    """All settings of a step, on."""
    numbers = dict(top_k=20, top_p=0.9, min_p=0.01, min_new=1, repetition_penalty=1.1)
    generator = torch.Generator().manual_seed(1)
    settings = settings_of(rows, device, seed=torch.arange(rows), **(NEUTRAL | numbers))
    table = torch.randint(0, 4, (rows, size), generator=generator, dtype=torch.int32)
    return settings | dict(
        occurrences=table.to(device),
        bias_ids=torch.arange(6, device=device).expand(rows, -1).contiguous(),
        bias_values=torch.ones(rows, 6, device=device),
        allowed=torch.full((rows, (size + 31) // 32), -2, dtype=torch.int32, device=device),
    )


def drafts_of(device, rows=2, places=3, size=3000):
    """Arguments of accept_drafts up to max_new, and the probabilities of its drafts."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(rows, places, size, generator=generator).to(device)
    drafts = torch.randint(size, (rows, places - 1), generator=generator).to(device)
    _, *state, eos, max_new = arguments_of(device, rows, size)
    accepted = torch.zeros(rows, dtype=torch.int32, device=device)
    probs = torch.rand(rows, places - 1, size, generator=generator).to(device)
    return (logits, drafts, *state, accepted, eos, max_new), probs / probs.sum(-1, keepdim=True)


def test_opcheck_of_draws(sampling, device):
    ops = sys.modules[f"{sampling.__name__}.ops"].ops
    scratch = sampling.sample_workspace(6, 3000, device)
    settings = everything_of(device)
    torch.library.opcheck(
        ops.sample_step, (*arguments_of(device), *settings_in_order(settings), 5, scratch)
    )
    least = dict.fromkeys(settings) | {name: settings[name] for name in ("temperature", "seed")}
    torch.library.opcheck(
        ops.sample_step, (*arguments_of(device), *settings_in_order(least), 5, scratch)
    )
    arguments, probs = drafts_of(device)
    settings["allowed"] = settings["allowed"][:, None].repeat(1, 3, 1)
    torch.library.opcheck(
        ops.accept_drafts, (*arguments, probs, *settings_in_order(settings), 5, scratch)
    )
    ids = torch.zeros(2, dtype=torch.int64, device=device)
    out = torch.empty(2, device=device), torch.empty(2, 4, device=device).long()
    top = torch.empty(2, 4, device=device)
    torch.library.opcheck(ops.logprobs, (arguments_of(device)[0], ids, scratch, *out, top))


def settings_in_order(settings):
    names = ("temperature", "seed", "top_k", "top_p", "min_p", "min_new", "repetition_penalty")
    more = ("presence_penalty", "frequency_penalty", "occurrences", "bias_ids", "bias_values")
    return [settings[name] for name in (*names, *more, "allowed")]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_draws(sampling, device, dynamic):
    def step(arguments, settings):
        sampling.sample_step(*arguments, **settings, pad_id=5)
        return sampling.logprobs(arguments[0], arguments[5], top_n=2)

    def verify(arguments, probs, seed, temperature):
        sampling.accept_drafts(
            *arguments, draft_probs=probs, seed=seed, temperature=temperature, pad_id=5
        )

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    verified = torch.compile(verify, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (2, 5):
        expected, actual = arguments_of(device, rows), arguments_of(device, rows)
        more, same = everything_of(device, rows), everything_of(device, rows)
        for one, other in zip(compiled(actual, same), step(expected, more), strict=True):
            assert torch.equal(one, other)
        assert expected[2].tolist() == [1] * rows
        expected, actual = (*expected, *more.values()), (*actual, *same.values())
        for one, other in zip(actual, expected, strict=True):
            assert torch.equal(one, other)
        (expected, probs), (actual, _) = drafts_of(device, rows), drafts_of(device, rows)
        numbers = settings_of(rows, device, seed=3, temperature=0.7)
        verify(expected, probs, **numbers)
        verified(actual, probs, **numbers)
        for one, other in zip(actual, expected, strict=True):
            assert torch.equal(one, other)
        assert min(expected[7].tolist()) >= 1
