"""accept_drafts: the text without drafts, and the rejection rule for drafts of a model."""

import torch

V, B, CAPACITY, START = 300, 3, 40, 17


def settings_of(device):
    """All settings on, those of row 1 greedy."""

    def floats(*values):
        return torch.tensor(values, dtype=torch.float32, device=device)

    def ints(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    return dict(
        temperature=floats(0.8, 0.0, 1.3),
        seed=torch.tensor([1, 2, -3], device=device),
        top_k=ints(50, 0, 200),
        top_p=floats(0.9, 1.0, 0.95),
        min_p=floats(0.0, 0.0, 0.01),
        min_new=ints(0, 3, 9),
        repetition_penalty=floats(1.1, 1.3, 1.0),
        presence_penalty=floats(0.3, 0.0, 0.5),
        frequency_penalty=floats(0.2, 0.1, 0.0),
        occurrences=torch.zeros(B, V, dtype=torch.int32, device=device),
        bias_ids=torch.tensor([[3, -1], [4, 5], [-1, -1]], device=device),
        bias_values=floats(2.0, 0.0, -torch.inf, 1.0, 0.0, 0.0).view(3, 2),
    )


def state_of(device):
    integers = dict(dtype=torch.int32, device=device)
    return [
        torch.zeros(B, CAPACITY, dtype=torch.int64, device=device),
        torch.zeros(B, **integers),
        torch.full((B,), START, **integers),
        torch.zeros(B, dtype=torch.bool, device=device),
        torch.zeros(B, dtype=torch.int64, device=device),
    ]


def test_drafts_never_change_the_text(sampling, device):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(CAPACITY + 4, B, V, generator=generator) * 2).to(device)
    allowed = torch.randint(-(2**31), 2**31, (CAPACITY + 4, B, 10), generator=generator)
    allowed = allowed.to(torch.int32).to(device)
    eos = torch.tensor([[7], [8], [-1]], device=device)
    max_new = torch.tensor([30, 25, 30], dtype=torch.int32, device=device)

    plain, settings = state_of(device), settings_of(device)
    for step in range(30):
        sampling.sample_step(
            logits[step], *plain, eos, max_new, pad_id=-1, **settings, allowed=allowed[step]
        )

    drafted, again = state_of(device), settings_of(device)
    accepted = torch.zeros(B, dtype=torch.int32, device=device)
    row, lengths = torch.arange(B), []
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
    finishes = [sum(column) for column in zip(*lengths, strict=True)]
    assert finishes == plain[1].tolist()
