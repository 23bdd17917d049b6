"""Random words against the published answers; log, exp and Gumbel against fp64."""

import sys

import pytest
import torch


@pytest.fixture(scope="module")
def noise(sampling):
    return sys.modules[f"{sampling.__name__}.noise"]


def words(*values):
    return tuple(torch.tensor([value]) for value in values)


ONES = 0xFFFFFFFF
# Random123 1.14, tests/kat_vectors: philox4x32 10, counter, key, answer.
ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter,key,answer", ANSWERS)
def test_philox_gives_the_published_words(noise, counter, key, answer):
    packed = key[1] << 32 | key[0]
    seed = torch.tensor([packed - 2**64 if packed >= 2**63 else packed])
    assert tuple(int(word) for word in noise.philox(words(*counter), seed)) == answer


def test_words_of_a_row_are_those_of_its_counters(noise):
    seeds, positions = torch.tensor([-5, 7]), torch.tensor([3, 2**31 - 1])
    bits = noise.random_bits(seeds, positions, 7, noise.RESIDUAL)
    for row in range(2):
        for index in range(7):
            counter = words(index // 4, int(positions[row]), noise.RESIDUAL, 0)
            assert noise.philox(counter, seeds[row : row + 1])[index % 4] == bits[row, index]


def test_log(noise):
    x = torch.logspace(-37, 38, 200_001, dtype=torch.float64).float()
    exact = x.double().log()
    error = (noise.log(x).double() - exact).abs()
    assert (error <= 1.5 * 2**-24 * exact.abs().clamp(min=2**-20)).all()


def test_gumbel(noise):
    bits = torch.cat([torch.arange(4096), torch.randint(2**32, (1_000_000,))])
    exact = -torch.log(-torch.log1p(-(bits.double() + 0.5) / 2**32))
    error = (noise.gumbel(bits).double() - exact).abs()
    # Below -1.5 (one draw in 90) the uniform number is as coarse as fp32 is next to 1.
    assert (error[exact > -1.5] <= 4e-6).all()
    ends = noise.gumbel(torch.tensor([0, 2**32 - 1]))
    torch.testing.assert_close(ends, torch.tensor([22.8739, -2.8115]), rtol=1e-4, atol=0)


def test_mass_is_exp_in_fixed_point(noise):
    x = -torch.linspace(0, 30, 300_001)
    exact = x.double().exp() * 2**40
    error = (noise.mass(x).double() - exact).abs()
    assert (error <= 1 + 1.5 * 2**-23 * exact).all()
    special = torch.tensor([0.0, -0.0, -torch.inf, torch.nan, -1e30])
    assert noise.mass(special).tolist() == [2**40, 2**40, 0, 0, 0]
