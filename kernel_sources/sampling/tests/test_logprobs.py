"""logprobs: against log-softmax in fp64, for each id and for the highest."""

import pytest
import torch
from _common.tolerance import assert_bitwise

SIZES = [1, 3, 33, 2048, 2049, 5003, 151936, 300_001]


def exact_of(logits):
    return logits.double().cpu().log_softmax(-1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("top_n", [0, 1, 5, 20])
def test_values_and_order(sampling, device, size, top_n):
    top_n = min(top_n, size)
    generator = torch.Generator().manual_seed(size)
    logits = (torch.randn(3, size, generator=generator) * 4).to(device)
    ids = torch.tensor([0, size - 1, size // 2], device=device)
    chosen, top_ids, top = sampling.logprobs(logits, ids, top_n=top_n)
    exact = exact_of(logits)
    best = logits.cpu().sort(dim=-1, descending=True, stable=True).indices[:, :top_n]
    assert torch.equal(top_ids.cpu(), best)
    close = dict(rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(chosen.double().cpu(), exact[range(3), ids.cpu()], **close)
    torch.testing.assert_close(top.double().cpu(), exact.gather(-1, best), **close)
    assert top.shape == top_ids.shape == (3, top_n)


def test_equal_values_by_rising_id(sampling, device):
    logits = torch.zeros(1, 5000, device=device)
    logits[0, [4999, 17, 2100]] = 2.0
    logits[0, 40] = -0.0
    top_ids = sampling.logprobs(logits, logits.argmax(-1), top_n=6)[1]
    assert top_ids.tolist() == [[17, 2100, 4999, 0, 1, 2]]


def test_many_highest_in_one_place(sampling, device):
    """All of the highest lie in one warp's part of one block's part of the row."""
    logits = torch.linspace(-1, 0, 6000).expand(2, -1).clone()
    logits[0, 2100:2120] = torch.arange(20) + 1.0
    logits[1, 5980:] = torch.arange(20, 0, -1).float()
    top_ids = sampling.logprobs(logits.to(device), torch.tensor([0, 0], device=device), top_n=20)[1]
    assert top_ids.tolist() == [list(range(2119, 2099, -1)), list(range(5980, 6000))]


def test_banned_infinite_and_absent(sampling, device):
    logits = torch.randn(4, 2500, generator=torch.Generator().manual_seed(0))
    logits[0, 30:2400] = -torch.inf
    logits[1] = -torch.inf
    logits[2, 9] = torch.nan
    ids = torch.tensor([31, 0, 1, -1])
    chosen, top_ids, top = sampling.logprobs(logits.to(device), ids.to(device), top_n=2)
    assert chosen[0] == -torch.inf and chosen[3] == -torch.inf
    assert chosen[1].isnan() and chosen[2].isnan() and top[1].isnan().all()
    assert top_ids[1].tolist() == [0, 1] and top_ids[2, 0] == 9
    exact = exact_of(logits)
    torch.testing.assert_close(
        top[0].double().cpu(), exact[0, top_ids[0].cpu()], rtol=1e-6, atol=4e-6
    )


@pytest.mark.parametrize("size", [33, 5003, 151936])
def test_a_row_is_the_same_in_every_batch(sampling, device, size):
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(8, size, generator=generator).to(device)
    ids = torch.randint(size, (8,), generator=generator).to(device)
    together = sampling.logprobs(logits, ids, top_n=5)
    for row in range(8):
        alone = sampling.logprobs(logits[row : row + 1], ids[row : row + 1], top_n=5)
        for one, all_rows in zip(alone, together, strict=True):
            assert_bitwise(one[0], all_rows[row])


def test_places_strides_and_out(sampling, device):
    logits = torch.randn(2, 3, 700, generator=torch.Generator().manual_seed(1)).to(device)
    wide = torch.full((2, 3, 705), 99.0, device=device)
    wide[..., 2:702] = logits
    ids = torch.arange(6, device=device).view(2, 3)
    expected = sampling.logprobs(logits, ids, top_n=4)
    out = tuple(torch.full_like(tensor, -1) for tensor in expected)
    scratch = sampling.sample_workspace(6, 700, device)
    result = sampling.logprobs(wide[..., 2:702], ids, top_n=4, workspace=scratch, out=out)
    for ours, given, same in zip(result, out, expected, strict=True):
        assert ours is given
        assert_bitwise(given, same)
    empty = sampling.logprobs(logits[:0], ids[:0], top_n=4)
    assert [tuple(tensor.shape) for tensor in empty] == [(0, 3), (0, 3, 4), (0, 3, 4)]
