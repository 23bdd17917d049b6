"""argmax: values, ties, NaN, layouts."""

import pytest
import torch
from _common.buffers import Guarded, gapped_copy, offset_copy
from _common.family import DTYPES
from _common.tolerance import assert_bitwise

# One logit, less than a chunk, one slot and just past it, odd, real vocabularies, all slots, more.
SIZES = (1, 5, 1000, 2048, 2049, 50257, 151936, 262144, 262145, 700_001)


def logits_of(*shape, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def first_largest(logits):
    """By definition, a row at a time."""
    rows = logits.double().cpu().reshape(-1, logits.shape[-1])
    answers = []
    for row in rows:
        largest = row.isnan() if bool(row.isnan().any()) else row == row.max()
        answers.append(int(largest.nonzero()[0]))
    return torch.tensor(answers).reshape(logits.shape[:-1]).to(logits.device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_values(sampling, device, dtype, size):
    # bf16 and fp16 have many ties at the top of a long row
    logits = logits_of(2, size, dtype=dtype, device=device)
    actual = sampling.argmax(logits)
    assert actual.dtype == torch.int64
    assert torch.equal(actual, first_largest(logits))


@pytest.mark.parametrize("size", [1, 2049, 151936])
@pytest.mark.parametrize("shape", [(), (1,), (9,), (2, 3), (0,), (2, 0)])
def test_leading_dims(sampling, device, size, shape):
    logits = logits_of(*shape, size, device=device)
    actual = sampling.argmax(logits)
    assert actual.shape == shape
    assert torch.equal(actual, first_largest(logits))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "places", [(0,), (7, 8), (255, 256, 2047), (2047, 2048), (4999, 5000), (5002,)]
)
def test_lowest_index_of_equals(sampling, device, dtype, places):
    logits = torch.zeros(2, 5003, dtype=dtype, device=device)
    logits[1, list(places)] = 1.0
    assert sampling.argmax(logits).tolist() == [0, places[0]]
    logits[0] = float("-inf")
    logits[1, list(places)] = float("inf")
    assert sampling.argmax(logits).tolist() == [0, places[0]]


def test_zeros_of_both_signs_are_equal(sampling, device):
    logits = torch.full((1, 3000), -1.0, device=device)
    logits[0, 100], logits[0, 2500] = -0.0, 0.0
    assert sampling.argmax(logits).tolist() == [100]


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_the_largest(sampling, device, dtype):
    logits = torch.zeros(3, 5003, dtype=dtype, device=device)
    logits[:, 17] = float("inf")
    logits[1, [3000, 4000]] = float("nan")
    logits[2, 5002] = -torch.tensor(float("nan"))
    assert sampling.argmax(logits).tolist() == [17, 3000, 5002]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_exponent_and_sign_orders_right(sampling, device, dtype):
    bits = torch.arange(2**16, dtype=torch.int32)
    if dtype is torch.float32:
        values = (bits << 16).view(torch.float32)
    else:
        values = bits.to(torch.int16).view(dtype)
    values = values[~values.isnan()]
    generator = torch.Generator().manual_seed(0)
    one = values[torch.randperm(len(values), generator=generator)][:8000]
    other = values[torch.randperm(len(values), generator=generator)][:8000]
    pairs = torch.stack([one, other], dim=1).to(device)
    assert torch.equal(sampling.argmax(pairs), (pairs[:, 1] > pairs[:, 0]).long())


@pytest.mark.parametrize("size", [2048, 50257])
def test_layouts(sampling, device, size):
    logits = logits_of(4, 2, size, dtype=torch.bfloat16, device=device)
    expected = first_largest(logits)
    assert torch.equal(sampling.argmax(offset_copy(logits)), expected)
    assert torch.equal(sampling.argmax(gapped_copy(logits, 3)), expected)
    assert torch.equal(sampling.argmax(gapped_copy(logits, 8)), expected)
    assert torch.equal(sampling.argmax(logits.transpose(0, 1)), expected.T)
    assert torch.equal(sampling.argmax(logits[:, -1]), expected[:, -1])


def test_out_and_workspace(sampling, device):
    scratch = sampling.workspace(8, 151936, device)
    for rows, size in [(8, 151936), (2, 1000), (8, 5003), (1, 262144), (3, 151936), (8, 151936)]:
        logits = logits_of(rows, size, device=device, seed=rows)
        buffer = Guarded((rows,), torch.int64, device)
        assert sampling.argmax(logits, workspace=scratch, out=buffer.view) is buffer.view
        buffer.assert_written()
        assert_bitwise(buffer.view, first_largest(logits))


def test_many_rows(sampling, device):
    logits = logits_of(70_001, 3, device=device)
    assert torch.equal(sampling.argmax(logits), first_largest(logits))
