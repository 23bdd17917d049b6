"""accept_drafts: the text without drafts, and the rejection rule for drafts of a model."""

import pytest
import torch
from sampling_cases import (
    assert_distribution,
    draw,
    probabilities,
    settings_of,
    state_of,
    stops_of,
)

V, B, CAPACITY = 300, 3, 40


def mixed_settings(device):
    """All settings on; row 1 is greedy."""
    settings = settings_of(
        B,
        device,
        temperature=[0.8, 0.0, 1.3],
        seed=[1, 2, -3],
        top_k=[50, 0, 200],
        top_p=[0.9, 1.0, 0.95],
        min_p=[0.0, 0.0, 0.01],
        min_new=[0, 3, 9],
        repetition_penalty=[1.1, 1.3, 1.0],
        presence_penalty=[0.3, 0.0, 0.5],
        frequency_penalty=[0.2, 0.1, 0.0],
    )
    values = torch.tensor([[2.0, 0.0], [-torch.inf, 1.0], [0.0, 0.0]], device=device)
    return settings | dict(
        occurrences=torch.zeros(B, V, dtype=torch.int32, device=device),
        bias_ids=torch.tensor([[3, -1], [4, 5], [-1, -1]], device=device),
        bias_values=values,
    )


def test_drafts_never_change_the_text(sampling, device):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(CAPACITY + 4, B, V, generator=generator) * 2).to(device)
    allowed = torch.randint(-(2**31), 2**31, (CAPACITY + 4, B, 10), generator=generator)
    allowed = allowed.to(torch.int32).to(device)
    eos = torch.tensor([[7], [8], [-1]], device=device)
    max_new = torch.tensor([30, 25, 30], dtype=torch.int32, device=device)

    plain, settings = state_of(B, device, CAPACITY), mixed_settings(device)
    for step in range(30):
        sampling.sample_step(
            logits[step], *plain, eos, max_new, pad_id=-1, **settings, allowed=allowed[step]
        )

    drafted, again = state_of(B, device, CAPACITY), mixed_settings(device)
    accepted = torch.zeros(B, dtype=torch.int32, device=device)
    row, lengths = torch.arange(B, device=device), []
    while not bool(drafted[3].all()):
        place = drafted[1].long()[:, None] + torch.arange(4, device=device)
        guess = plain[0][row[:, None], place[:, :3]].clone()
        guess[0, len(lengths) % 3] = 299 - guess[0, len(lengths) % 3]
        guess[2, 2] = -1
        here = (place.clamp(max=CAPACITY + 3).t(), row)
        sampling.accept_drafts(
            *(logits[here].transpose(0, 1), guess, *drafted, accepted, eos, max_new),
            **(dict(pad_id=-1, allowed=allowed[here].transpose(0, 1).contiguous()) | again),
        )
        lengths.append(accepted.tolist())
    for one, other in zip(drafted[:4], plain[:4], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(again["occurrences"], settings["occurrences"])
    assert {row[0] for row in lengths[:3]} == {1, 2, 3}
    assert lengths[0][1:] == [4, 3]
    assert [sum(column) for column in zip(*lengths, strict=True)] == plain[1].tolist()


def accept(sampling, logits, drafts, *, state=None, eos=(), max_new=1000, probs=None, **numbers):
    rows, device = logits.shape[0], logits.device
    state = state or state_of(rows, device)
    accepted = torch.full((rows,), -7, dtype=torch.int32, device=device)
    settings = settings_of(rows, device, **({"temperature": 1.0, "seed": 0} | numbers))
    sampling.accept_drafts(
        *(logits, drafts.to(device), *state, accepted, *stops_of(rows, device, eos, max_new)),
        pad_id=-1,
        draft_probs=probs,
        **settings,
    )
    return accepted, state


@pytest.mark.parametrize(
    "drafts,eos,max_new,emitted",
    [
        ([5, 6, 7], (), 9, [5, 6, 7, 8]),
        ([5, 0, 7], (), 9, [5, 6]),
        ([0, 6, 7], (), 9, [5]),
        ([5, -1, 7], (), 9, [5, 6]),
        ([5, 6, 7], (6,), 9, [5, 6]),
        ([5, 6, 7], (8,), 9, [5, 6, 7, 8]),
        ([5, 6, 7], (), 3, [5, 6, 7]),
        ([5, 6, 7], (), 1, [5]),
        ([5, 6, 7], (), 0, []),
    ],
)
def test_greedy(sampling, device, drafts, eos, max_new, emitted):
    logits = torch.nn.functional.one_hot(torch.tensor([[5, 6, 7, 8]]), 4100).float().to(device)
    accepted, state = accept(
        sampling, logits, torch.tensor([drafts]), eos=eos, max_new=max_new, temperature=0.0
    )
    tokens, counts, lengths, finished, next_ids = state
    count = len(emitted)
    assert accepted.tolist() == [count]
    assert tokens.tolist() == [emitted + [0] * (8 - count)]
    assert (counts.item(), lengths.item()) == (count, 10 + count)
    stops = count >= max_new or emitted[-1] in eos
    assert finished.item() == stops
    assert next_ids.item() == (emitted[-1] if emitted else -1)


def test_finished_sequences_and_one_place(sampling, device):
    logits = torch.randn(3, 1, 50, generator=torch.Generator().manual_seed(0)).to(device)
    state = state_of(3, device)
    state[3][1] = True
    none = torch.empty(3, 0, dtype=torch.int64)
    accepted, state = accept(sampling, logits, none, state=state, seed=[4, 5, 6], top_k=9)
    assert accepted.tolist() == [1, 0, 1]
    ids = draw(sampling, logits[:, 0], seed=[4, 5, 6], top_k=9)
    assert state[4].tolist() == [ids[0].item(), -1, ids[2].item()]
    assert state[3].tolist() == [False, True, False]


DRAWS = 10_000
MODEL = torch.tensor([1.2, 0.1, -0.4, 0.9, 0.0, -1.0])
DRAFT = torch.tensor([0.2, 0.8, -0.9, 0.9, -0.7, 0.3])


def rejections(sampling, device, **settings):
    """First tokens of sequences whose drafts come from DRAFT, and whether these were accepted."""
    logits = MODEL.expand(DRAWS, 2, -1).contiguous().to(device)
    q = probabilities(DRAFT).float().to(device)
    seed = torch.arange(DRAWS)
    drafts = draw(sampling, DRAFT.expand(DRAWS, -1).contiguous().to(device), seed=seed)
    probs = q.expand(DRAWS, 1, -1).contiguous()
    accepted, state = accept(sampling, logits, drafts[:, None], probs=probs, seed=seed, **settings)
    return state[0][:, 0], accepted == 2, drafts


@pytest.mark.parametrize(
    "settings", [{}, dict(temperature=0.6), dict(top_k=4), dict(top_p=0.7), dict(min_p=0.4)]
)
def test_the_rejection_rule_keeps_the_distribution(sampling, device, settings):
    first, accepted, drafts = rejections(sampling, device, **settings)
    p, q = probabilities(MODEL, **settings), probabilities(DRAFT)
    assert_distribution(first, p)
    assert torch.equal(first == drafts, accepted)
    rate = torch.minimum(p, q).sum().item()
    assert abs(accepted.double().mean().item() - rate) < 4 * (rate * (1 - rate) / DRAWS) ** 0.5


def test_the_token_after_the_drafts_has_its_distribution(sampling, device):
    logits = torch.stack([DRAFT, MODEL]).expand(DRAWS, 2, -1).contiguous().to(device)
    q = probabilities(DRAFT).float().expand(DRAWS, 1, -1).contiguous().to(device)
    seed = torch.arange(DRAWS)
    drafts = draw(sampling, logits[:, 0], seed=seed)
    accepted, state = accept(sampling, logits, drafts[:, None], probs=q, seed=seed)
    # p and q are equal but for rounding, so next to all drafts are accepted.
    assert (accepted == 2).double().mean() > 0.999
    second = state[0][accepted == 2, 1]
    assert_distribution(second, probabilities(MODEL))


def test_certain_drafts_are_accepted_as_often_as_the_model_says(sampling, device):
    logits = MODEL.expand(DRAWS, 2, -1).contiguous().to(device)
    drafts = torch.zeros(DRAWS, 1, dtype=torch.int64)
    accepted, state = accept(sampling, logits, drafts, seed=torch.arange(DRAWS), top_p=0.9)
    exact = probabilities(MODEL, top_p=0.9)
    assert_distribution(state[0][:, 0], exact)
    assert_distribution((accepted == 2).long(), torch.stack([1 - exact[0], exact[0]]))


def test_drafts_of_an_equal_seed_are_accepted_more_often(sampling, device):
    logits = torch.stack([MODEL, MODEL]).expand(DRAWS, 2, -1).contiguous().to(device)
    draft = DRAFT.expand(DRAWS, -1).contiguous().to(device)
    seed = torch.arange(DRAWS)
    same = accept(sampling, logits, draw(sampling, draft, seed=seed)[:, None], seed=seed)[0]
    other = accept(sampling, logits, draw(sampling, draft, seed=~seed)[:, None], seed=seed)[0]
    p, q = probabilities(MODEL), probabilities(DRAFT)
    distance = (p - q).abs().sum().item() / 2
    assert (same == 2).double().mean() > (1 - distance) / (1 + distance) - 0.02
    assert (other == 2).double().mean() < (p * q).sum() + 0.02


def test_places_without_a_draft_are_drawn(sampling, device):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 3, 700, generator=generator).to(device)
    drafts = torch.tensor([[-1, 2], [700, 2], [-9, -1], [-1, -1], [2**40, 0]])
    probs = torch.full((5, 2, 700), 1 / 700, device=device)
    accepted, state = accept(sampling, logits, drafts, probs=probs, seed=torch.arange(5))
    assert accepted.tolist() == [1] * 5
    assert torch.equal(state[4], draw(sampling, logits[:, 0], seed=torch.arange(5)))
