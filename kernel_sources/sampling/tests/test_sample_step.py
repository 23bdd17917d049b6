"""sample_step: which token, for whom, and on what it depends."""

import sys

import pytest
import torch
from _common.tolerance import assert_bitwise
from sampling_cases import NEUTRAL, draw, probabilities, settings_of, state_of, stops_of

SIZES = [1, 2, 31, 33, 2048, 2049, 5003, 151936]


def random_settings(rows, generator):
    """A mix of everything, other for each row; numbers of plain Python."""

    def pick(*values):
        chosen = torch.randint(len(values), (rows,), generator=generator)
        return [values[i] for i in chosen.tolist()]

    return dict(
        temperature=pick(0.0, 0.7, 1.0, 1.6),
        top_k=pick(0, 1, 4, 50),
        top_p=pick(1.0, 0.9, 0.5),
        min_p=pick(0.0, 0.05),
        seed=torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator).tolist(),
    )


@pytest.mark.parametrize("size", SIZES)
def test_is_the_largest_of_score_and_noise(sampling, device, size):
    """Against sorting and logarithms in fp64; only the random words are the family's own."""
    noise = sys.modules[f"{sampling.__name__}.noise"]
    generator = torch.Generator().manual_seed(size)
    rows = 8 if size < 10_000 else 2
    logits = torch.randn(rows, size, generator=generator) * 2
    settings = random_settings(rows, generator)
    lengths = torch.randint(2**31, (rows,), generator=generator)
    ids = draw(sampling, logits.to(device), lengths=lengths, **settings).cpu()
    bits = noise.random_bits(torch.tensor(settings["seed"]), lengths, size, noise.DRAW)
    uniform = (bits.double() + 0.5) / 2**32
    for row in range(rows):
        numbers = {n: v[row] for n, v in settings.items() if n != "seed"}
        if numbers["temperature"] == 0:
            assert ids[row] == logits[row].argmax()
            continue
        exact = probabilities(logits[row], **numbers)
        noisy = exact.log() - torch.log(-torch.log1p(-uniform[row]))
        assert exact[ids[row]] > 0
        assert noisy.max() - noisy[ids[row]] < 1e-5


def test_temperature_zero_is_argmax_in_every_bit(sampling, device):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 5003, generator=generator).round(decimals=1).to(device)
    logits[1, 77] = torch.nan
    logits[2, 99] = torch.inf
    logits[3] = -torch.inf
    logits[4] = 0.0
    expected = sampling.argmax(logits)
    for temperature in (0.0, -1.0, 1e-6, torch.nan):
        ids = draw(sampling, logits, temperature=temperature, top_k=3, top_p=0.5)
        assert torch.equal(ids, expected)


@pytest.mark.parametrize(
    "only", [dict(top_k=1), dict(top_p=0.0), dict(top_p=-1.0), dict(min_p=1.0), dict(min_p=7.0)]
)
def test_the_most_likely_token_stays(sampling, device, only):
    logits = torch.randn(32, 700, generator=torch.Generator().manual_seed(2)).to(device)
    ids = draw(sampling, logits, seed=torch.arange(32), temperature=2.0, **only)
    assert torch.equal(ids, logits.argmax(-1))


@pytest.mark.parametrize("settings", [{}, dict(top_k=3), dict(top_p=0.5), dict(min_p=0.1)])
def test_nan_infinity_and_nothing_left(sampling, device, settings):
    logits = torch.randn(4, 4100, generator=torch.Generator().manual_seed(3)).to(device)
    logits[0, [9, 4000]] = torch.nan
    logits[1, [4099, 50]] = torch.inf
    logits[2] = -torch.inf
    logits[3] = -torch.inf
    logits[3, 4098] = -80.0
    ids = draw(sampling, logits, seed=torch.arange(4), **settings)
    assert ids.tolist() == [9, 50, 0, 4098]


@pytest.mark.parametrize("settings", [dict(top_k=2), dict(top_p=0.3), dict(min_p=0.9)])
def test_equal_scores_share_their_fate(sampling, device, settings):
    logits = torch.full((400, 40), -3.0)
    logits[:, [3, 8, 21]] = 1.0
    ids = draw(sampling, logits.to(device), seed=torch.arange(400), **settings)
    assert set(ids.tolist()) == {3, 8, 21}


def test_extreme_temperatures(sampling, device):
    logits = torch.tensor([3.0, 1.0, 2.999, -30.0]).expand(2000, -1).contiguous().to(device)
    seed = torch.arange(2000)
    assert (draw(sampling, logits, seed=seed, temperature=1e-5) == 0).all()
    for temperature in (1e30, torch.inf):
        for thresholds in ({}, dict(top_k=3), dict(top_p=0.999), dict(min_p=0.999)):
            ids = draw(sampling, logits, seed=seed, temperature=temperature, **thresholds)
            # Divided by infinity all are equal, so top-k leaves all.
            left = 3 if "top_k" in thresholds and temperature == 1e30 else 4
            counts = torch.bincount(ids, minlength=4)
            assert (counts[:left] > 1600 / left).all() and counts[left:].sum() == 0


def test_neutral_settings_change_nothing(sampling, device):
    logits = torch.randn(8, 3000, generator=torch.Generator().manual_seed(4)).to(device)
    plain = draw(sampling, logits, seed=torch.arange(8))
    others = dict(
        occurrences=torch.randint(0, 9, (8, 3000), dtype=torch.int32, device=device),
        bias_ids=torch.full((8, 3), -1, device=device),
        bias_values=torch.full((8, 3), 9.0, device=device),
        allowed=torch.full((8, 94), -1, dtype=torch.int32, device=device),
    )
    assert torch.equal(draw(sampling, logits, seed=torch.arange(8), **NEUTRAL, **others), plain)
    huge = dict(top_k=3000, top_p=1.5, min_p=-1.0)
    assert torch.equal(draw(sampling, logits, seed=torch.arange(8), **huge), plain)


@pytest.mark.parametrize("size", [33, 5003, 151936])
def test_a_row_is_the_same_in_every_batch(sampling, device, size):
    generator = torch.Generator().manual_seed(size)
    logits = (torch.randn(8, size, generator=generator) * 3).to(device)
    settings = random_settings(8, generator)
    lengths = torch.arange(8) * 1000
    alone = [
        draw(
            sampling,
            logits[row : row + 1],
            lengths=lengths[row : row + 1],
            **{name: value[row : row + 1] for name, value in settings.items()},
        )
        for row in range(8)
    ]
    alone = torch.cat(alone)
    for rows in range(1, 9):
        order = torch.randperm(8, generator=generator)[:rows]
        mixed = {name: torch.tensor(value)[order] for name, value in settings.items()}
        ids = draw(sampling, logits[order.to(device)], lengths=lengths[order], **mixed)
        assert torch.equal(ids, alone[order.to(device)])


def test_all_bits_of_the_seed_and_the_position_count(sampling, device):
    logits = torch.zeros(65, 100_000, device=device)
    seeds = torch.tensor([0, *(1 << bit for bit in range(63)), -(2**63)])
    assert len(set(draw(sampling, logits, seed=seeds).tolist())) == 65
    lengths = torch.tensor([0, *(1 << bit for bit in range(31))])
    ids = draw(sampling, logits[:32], seed=5, lengths=lengths)
    assert len(set(ids.tolist())) == 32
    assert torch.equal(ids, draw(sampling, logits[:32], seed=5, lengths=lengths))


def test_strided_logits_and_an_offset_table(sampling, device):
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(3, 2500, generator=generator).to(device)
    table = torch.randint(0, 6, (3, 2500), generator=generator, dtype=torch.int32).to(device)
    settings = dict(seed=[1, 2, 3], top_k=40, repetition_penalty=1.3, frequency_penalty=0.2)
    expected = draw(sampling, logits, occurrences=table.clone(), **settings)
    wide = torch.full((3, 2503), torch.nan, device=device)
    wide[:, 1:2501] = logits
    around = torch.full((3, 2503), 77, dtype=torch.int32, device=device)
    around[:, 2:2502] = table
    ids = draw(sampling, wide[:, 1:2501], occurrences=around[:, 2:2502], **settings)
    assert_bitwise(ids, expected)
    assert (around[:, [0, 1, 2502]] == 77).all()
    assert int((around[:, 2:2502] - table).sum()) == 6


def test_a_loop_of_steps_counts_what_it_writes(sampling, device):
    rows, size = 2, 50
    state = state_of(rows, device, capacity=12)
    occurrences = torch.empty(rows, size, dtype=torch.int32, device=device)
    prompts = torch.tensor([[3, 3, 7, 50], [9, -1, 4, 4]], device=device)
    sampling.record_prompt(occurrences, prompts, torch.tensor([4, 3], device=device))
    started = [row.nonzero().flatten().tolist() for row in occurrences]
    assert started == [[3, 7], [4, 9]]
    eos, max_new = stops_of(rows, device, eos=(49,), max_new=10)
    settings = settings_of(rows, device, temperature=1.0, seed=[1, 2], presence_penalty=0.5)
    scratch = sampling.sample_workspace(rows, size, device)
    logits = torch.zeros(rows, size, device=device)
    logits[:, 49] = -torch.inf
    for _ in range(12):
        sampling.sample_step(
            *(logits, *state, eos, max_new),
            **settings,
            occurrences=occurrences,
            pad_id=-1,
            workspace=scratch,
        )
    tokens, counts, lengths, finished, next_ids = (tensor.cpu() for tensor in state)
    assert counts.tolist() == [10, 10] and lengths.tolist() == [20, 20]
    assert finished.tolist() == [True, True] and next_ids.tolist() == [-1, -1]
    for row in range(rows):
        times = torch.bincount(tokens[row, :10], minlength=size)
        prompt = torch.zeros(size, dtype=torch.int32)
        prompt[started[row]] = 1
        assert torch.equal(occurrences[row].cpu(), (times * 2).int() + prompt)


def test_ends_of_each_row(sampling, device):
    logits = torch.full((3, 20), -9.0, device=device)
    logits[:, 5] = 9.0
    state = state_of(3, device)
    eos = torch.tensor([[4, 5], [6, -1], [5, 5]], device=device)
    _, max_new = stops_of(3, device)
    settings = settings_of(3, device, temperature=[1.0, 1.0, 0.0], seed=0, min_new=[1, 1, 0])
    sampling.sample_step(logits, *state, eos, max_new, pad_id=-1, **settings)
    chosen = state[4].tolist()
    assert chosen[0] not in (4, 5) and chosen[1:] == [5, 5]
    assert state[3].tolist() == [False, False, True]
