"""Random bits, logarithm and exponential that have the same bits on every processor.

A draw must be the same token on a CPU and on every GPU, so nothing here leaves a rounding open:
Philox works in integers, and ``log`` and ``exp`` are polynomials in which every product and every
sum is one IEEE operation rounded to nearest, in the order written (csrc/noise.cuh has the same).

Sources: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox
4x32-10); Moshier's Cephes library, ``logf`` and ``expf`` (the coefficients).
"""

from __future__ import annotations

import torch

# What the third word of the counter says the bits are for.
DRAW, ACCEPT, RESIDUAL = 0, 1, 2

_WORD = 0xFFFFFFFF
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # their sum is ln 2; the first has 9 bits
_LOG2_E = 1.44269504088896341
_LOG = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
    *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)
_EXP = (
    *(1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3),
    *(4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1),
)
_SQRT_HALF_BITS = 0x3F3504F3
# Below it (74/256), 1 - w stays above sqrt(1/2) and the polynomial of log takes -w as it is.
_SMALL = 0.2890625
_MASS_BITS = 40


def philox(counter: tuple[torch.Tensor, ...], key: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10: four words of 32 random bits for each counter.

    Args:
        counter: four int64 tensors of words in [0, 2**32), broadcast against each other.
        key: int64, its 64 bits are the key; broadcast against the counter.

    Returns:
        Four int64 tensors of words in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & _WORD, (key >> 32) & _WORD
    for _ in range(10):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def _multiply(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    product = word * factor  # wraps modulo 2**64, which leaves all 64 bits right
    return (product >> 32) & _WORD, product & _WORD


def random_bits(
    seed: torch.Tensor, position: torch.Tensor, size: int, purpose: int
) -> torch.Tensor:
    """``[R, size]`` words: word ``i`` of row r is word ``i % 4`` of the Philox counter
    ``(i // 4, position[r], purpose, 0)`` under the key ``seed[r]``; both int64 ``[R]``."""
    group = torch.arange((size + 3) // 4, device=seed.device)
    nothing = torch.zeros_like(group)
    counter = (group[None], position[:, None] & _WORD, nothing + purpose, nothing)
    words = torch.broadcast_tensors(*philox(counter, seed[:, None]))
    return torch.stack(words, -1).flatten(1)[:, :size]


def words_at(
    seed: torch.Tensor, position: torch.Tensor, index: torch.Tensor, purpose: int
) -> torch.Tensor:
    """Word ``index`` of a row with this seed and position, as in :func:`random_bits`; ``[N]``."""
    nothing = torch.zeros_like(index)
    words = philox((index // 4, position & _WORD, nothing + purpose, nothing), seed)
    return torch.stack(words).gather(0, (index % 4)[None])[0]


def uniform(bits: torch.Tensor) -> torch.Tensor:
    """fp32 in (0, 1): ``(bits + 1/2) / 2**32``, at most ``1 - 2**-24``; fine-grained near 0."""
    value = (bits.float() + 0.5) * 2.0**-32
    return value.clamp(max=1 - 2.0**-24)


def gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise ``-log(-log(1 - w))`` of ``w = uniform(bits)``, from -2.82 to 22.9.

    The uniform number is fine-grained where the noise is large, which is where it decides: the
    largest of V such numbers has V/2**32 of its probability on one value, no more.
    """
    w = uniform(bits)
    exponent, fraction = _split(1 - w)
    small = w < _SMALL
    exponential = -_log_of(torch.where(small, 0.0, exponent), torch.where(small, -w, fraction))
    return -log(exponential)


def log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of a positive normal fp32 number, to about one unit in the last place."""
    return _log_of(*_split(x))


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``e`` and ``f`` with ``x = 2**e * (1 + f)`` and ``1 + f`` in [sqrt(1/2), sqrt(2))."""
    bits = x.view(torch.int32)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    return exponent.float(), (bits - (exponent << 23)).view(torch.float32) - 1


def _log_of(exponent: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    square = f * f
    y = _polynomial(_LOG, f) * f * square
    y = y + exponent * _LN2_LOW - square * 0.5
    return f + y + exponent * _LN2_HIGH


def _exp_parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``n`` and ``y`` with ``exp(x) = 2**n * y`` and ``y`` about in [sqrt(1/2), sqrt(2)]."""
    n = (x * _LOG2_E + 0.5).floor()
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    return n, _polynomial(_EXP, r) * (r * r) + r + 1


def mass(x: torch.Tensor) -> torch.Tensor:
    """``floor(exp(x) * 2**40)`` as int64, for fp32 ``x <= 0`` (or -inf: 0).

    Sums of it are exact in any order: up to 2**22 terms stay below 2**62.
    """
    inside = x > -28.5  # exp(-28.5) * 2**40 < 1/2
    n, y = _exp_parts(torch.where(inside, x, 0.0))
    scale = ((n.to(torch.int32) + (_MASS_BITS + 127)) << 23).view(torch.float32)  # 2**(n + 40)
    return torch.where(inside, (y * scale).to(torch.int64), 0)


def _polynomial(coefficients: tuple[float, ...], x: torch.Tensor) -> torch.Tensor:
    value = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value
