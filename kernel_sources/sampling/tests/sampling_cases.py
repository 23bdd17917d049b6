"""Sequences, settings and exact distributions for the tests of draws."""

from __future__ import annotations

import math

import torch

NEUTRAL = dict(
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    min_new=0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
)
INTEGERS = ("top_k", "min_new")


def settings_of(rows, device, **values):
    """One tensor for each value: a number for all ``rows``, or one for each."""
    tensors = {}
    for name, value in values.items():
        dtype = torch.int32 if name in INTEGERS else torch.float32
        dtype = torch.int64 if name == "seed" else dtype
        each = torch.as_tensor(value, dtype=dtype).expand(rows)
        tensors[name] = each.contiguous().to(device)
    return tensors


def state_of(rows, device, capacity=8, length=10):
    integers = dict(dtype=torch.int32, device=device)
    return [
        torch.zeros(rows, capacity, dtype=torch.int64, device=device),
        torch.zeros(rows, **integers),
        torch.full((rows,), length, **integers),
        torch.zeros(rows, dtype=torch.bool, device=device),
        torch.full((rows,), -5, device=device),
    ]


def stops_of(rows, device, eos=(), max_new=1000):
    limits = torch.full((rows,), max_new, dtype=torch.int32, device=device)
    return torch.tensor(eos, dtype=torch.int64, device=device), limits


def draw(sampling, logits, *, seed=0, lengths=None, eos=(), max_new=1000, counts=None, **settings):
    """The ids that one sample_step draws; settings are numbers, lists or tensors."""
    rows, device = logits.shape[0], logits.device
    state = state_of(rows, device)
    if lengths is not None:
        state[2].copy_(torch.as_tensor(lengths, dtype=torch.int32))
    if counts is not None:
        state[1].copy_(torch.as_tensor(counts, dtype=torch.int32))
    numbers = {n: v for n, v in settings.items() if n in NEUTRAL}
    others = {n: v for n, v in settings.items() if n not in NEUTRAL}
    numbers = settings_of(rows, device, **({"temperature": 1.0, "seed": seed} | numbers))
    sampling.sample_step(
        logits, *state, *stops_of(rows, device, eos, max_new), pad_id=-1, **numbers, **others
    )
    return state[4]


def probabilities(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution of one row of fp64 numbers after its thresholds, by sorting a list."""
    scores = [float(x) / temperature for x in logits]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    order = [i for i in order if scores[i] > -math.inf]
    weights = {i: math.exp(scores[i] - scores[order[0]]) for i in order}
    if 0 < top_k < len(order):
        order = [i for i in order if scores[i] >= scores[order[top_k - 1]]]
    if top_p < 1:
        total, above, kept = sum(weights[i] for i in order), 0.0, []
        for i in order:
            same = bool(kept) and scores[i] == scores[kept[-1]]
            if kept and above >= top_p * total and not same:
                break
            kept.append(i)
            above += weights[i]
        order = kept
    if min_p > 0:
        order = [i for i in order if weights[i] >= min(min_p, 1.0)]
    total = sum(weights[i] for i in order)
    exact = torch.zeros(len(scores), dtype=torch.float64)
    for i in order:
        exact[i] = weights[i] / total
    return exact


def assert_distribution(ids, exact):
    """Pearson's chi-square test of drawn ids at p > 0.001; what cannot be drawn was not."""
    ids = ids.cpu()
    counts = torch.bincount(ids, minlength=len(exact)).double()
    possible = exact > 0
    assert counts[~possible].sum() == 0, f"drawn: {counts.tolist()}, of {exact.tolist()}"
    expected = exact[possible] * len(ids)
    assert expected.min() >= 5, "too few draws for the test"
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = int(possible.sum()) - 1
    p = torch.special.gammaincc(torch.tensor(freedom / 2).double(), statistic / 2)
    assert freedom == 0 or p > 0.001, f"p = {p:.2e}: {counts.tolist()}, of {exact.tolist()}"
