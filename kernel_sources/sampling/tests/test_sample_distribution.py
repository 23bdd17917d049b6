"""Draws follow the exact distribution, knob by knob: chi-square at p > 0.001, fixed seeds."""

import pytest
import torch
from sampling_cases import assert_distribution, draw, probabilities

DRAWS = 10_000
LOGITS = torch.tensor([1.5, -0.3, 0.7, 2.1, 0.0, -1.0, 1.1, 0.4, -0.6, 1.9, -torch.inf, 0.9])


def many(device, logits=LOGITS):
    return logits.expand(DRAWS, -1).contiguous().to(device)


@pytest.mark.parametrize(
    "settings",
    [
        dict(),
        dict(temperature=0.5),
        dict(temperature=1.7),
        dict(top_k=1),
        dict(top_k=5),
        dict(top_k=11),
        dict(top_p=0.3),
        dict(top_p=0.75),
        dict(top_p=0.99),
        dict(min_p=0.2),
        dict(min_p=0.05),
        dict(temperature=0.8, top_k=8, top_p=0.9),
        dict(temperature=1.3, top_k=6, top_p=0.8, min_p=0.35),
    ],
    ids=str,
)
def test_thresholds_and_temperature(sampling, device, settings):
    ids = draw(sampling, many(device), seed=torch.arange(DRAWS), **settings)
    assert_distribution(ids, probabilities(LOGITS, **settings))


def test_positions_are_as_good_as_seeds(sampling, device):
    ids = draw(sampling, many(device), seed=77, lengths=torch.arange(DRAWS))
    assert_distribution(ids, probabilities(LOGITS))


def test_consecutive_draws_of_a_sequence_are_independent(sampling, device):
    logits, seed = many(device), torch.arange(DRAWS)
    first = draw(sampling, logits, seed=seed, lengths=torch.full((DRAWS,), 3), top_k=3)
    second = draw(sampling, logits, seed=seed, lengths=torch.full((DRAWS,), 4), top_k=3)
    one = probabilities(LOGITS, top_k=3)
    pairs = (one[:, None] * one[None, :]).flatten()
    assert_distribution(first * len(LOGITS) + second, pairs)


@pytest.mark.parametrize(
    "settings",
    [
        dict(repetition_penalty=1.5),
        dict(repetition_penalty=0.7),
        dict(presence_penalty=0.8),
        dict(frequency_penalty=-0.4),
        dict(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, top_k=7),
    ],
    ids=str,
)
def test_penalties(sampling, device, settings):
    prompt = torch.tensor([1, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0])
    generated = torch.tensor([0, 2, 0, 3, 0, 0, 1, 0, 0, 0, 0, 0])
    table = (generated * 2 + prompt).int()
    occurrences = many(device, table)
    thresholds = {n: v for n, v in settings.items() if n == "top_k"}
    penalties = {n: v for n, v in settings.items() if n != "top_k"}
    logits = []
    for value, in_prompt, times in zip(
        LOGITS.tolist(), prompt.tolist(), generated.tolist(), strict=True
    ):
        r = penalties.get("repetition_penalty", 1.0)
        if in_prompt or times:
            value = value * r if value < 0 else value / r
        value -= penalties.get("frequency_penalty", 0.0) * times
        value -= penalties.get("presence_penalty", 0.0) * (times > 0)
        logits.append(value)
    ids = draw(
        sampling, many(device), seed=torch.arange(DRAWS), occurrences=occurrences, **settings
    )
    assert_distribution(ids, probabilities(logits, **thresholds))
    drawn = occurrences.cpu() - table
    assert torch.equal(drawn, 2 * torch.nn.functional.one_hot(ids.cpu(), len(LOGITS)).int())


def test_bias_mask_and_first_tokens(sampling, device):
    bias_ids = torch.tensor([3, -1, 2, 4, 2, 99]).expand(DRAWS, -1).contiguous().to(device)
    values = torch.tensor([-torch.inf, 50.0, 0.5, -1.0, 0.25, 70.0])
    bias_values = values.expand(DRAWS, -1).contiguous().to(device)
    allowed = torch.tensor([0b1111_0111_1111]).int().expand(DRAWS, 1).contiguous().to(device)
    ids = draw(
        sampling,
        many(device),
        seed=torch.arange(DRAWS) + 10**12,
        bias_ids=bias_ids,
        bias_values=bias_values,
        allowed=allowed,
        min_new=4,
        counts=torch.full((DRAWS,), 3),
        eos=(9, -1),
    )
    logits = LOGITS.clone()
    logits[2] += 0.75
    logits[4] -= 1.0
    logits[[3, 7, 9]] = -torch.inf  # by bias, by the mask, and as an early end
    assert_distribution(ids, probabilities(logits))


def test_a_wide_row(sampling, device):
    """Gumbel noise where it is large: the drawn token is the largest of thousands."""
    size, bins = 4096, 16
    logits = torch.linspace(0, 3, size)
    rows = 2000
    ids = draw(sampling, logits.expand(rows, -1).contiguous().to(device), seed=torch.arange(rows))
    exact = probabilities(logits).view(bins, -1).sum(-1)
    assert_distribution(ids * bins // size, exact)
