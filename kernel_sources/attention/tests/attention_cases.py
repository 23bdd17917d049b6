"""Inputs of attention calls, and the same computation written out naively in any precision."""

from __future__ import annotations

import dataclasses
import math

import torch
from _common.tolerance import assert_accurate, assert_bitwise


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: B = len(lengths)."""

    lengths: tuple[int, ...] = (100,)
    tokens: int = 1
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    slots: int = 192
    rotary: str | None = "half"
    rotary_dim: int | None = None  # None: the whole head
    by_slot: bool = True  # cos and sin as a table
    table_dtype: torch.dtype = torch.float32
    norm: str | None = None
    zero_centered: bool = False
    window: int | None = None
    soft_cap: float | None = None
    scales: str | None = None  # of an FP8 cache: "head" or "one"
    seed: int = 0

    def __str__(self) -> str:
        shown = (
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        )
        return ",".join(shown).replace(" ", "") or "plain"


SCALING_FACTOR = 1.2  # against D ** -0.5, so that a kernel that guesses is wrong
EPS = 1e-3


def rows(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def inputs(case: Case, dtype: torch.dtype, device: str = "cpu") -> dict[str, object]:
    """Keyword arguments of ``attend``; cache rows that no token sees hold NaN."""
    batch, tokens, dim = len(case.lengths), case.tokens, case.dim
    new = (batch, tokens, case.kv_heads, dim)
    cache = (batch, case.kv_heads, case.slots, dim)
    arguments: dict[str, object] = {
        "q": rows(batch, tokens, case.heads, dim, dtype=dtype, seed=case.seed),
        "k": rows(*new, dtype=dtype, seed=case.seed + 1),
        "v": rows(*new, dtype=dtype, seed=case.seed + 2),
        "k_cache": rows(*cache, dtype=dtype, seed=case.seed + 3),
        "v_cache": rows(*cache, dtype=dtype, seed=case.seed + 4),
        "lengths": torch.tensor(case.lengths, dtype=torch.int32),
        "scaling": SCALING_FACTOR * dim**-0.5,
        "window": case.window,
        "soft_cap": case.soft_cap,
    }
    for name in ("k_cache", "v_cache"):
        for b, length in enumerate(case.lengths):
            oldest = 0 if case.window is None else max(0, length - case.window + 1)
            arguments[name][b, :, :oldest] = float("nan")
            arguments[name][b, :, length:] = float("nan")
    arguments |= _tables(case, dtype) | _norms(case, dtype) | _scales(case, arguments)
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


def _tables(case: Case, dtype: torch.dtype) -> dict[str, object]:
    if case.rotary is None:
        return {}
    width = case.rotary_dim or case.dim
    frequencies = 100.0 ** -(torch.arange(width // 2) * 2 / width)
    angles = torch.arange(case.slots)[:, None] * frequencies
    if case.rotary == "half":
        angles = torch.cat((angles, angles), dim=-1)
    else:
        angles = angles.repeat_interleave(2, dim=-1)
    if not case.by_slot:
        positions = torch.tensor(case.lengths)[:, None] + torch.arange(case.tokens)
        angles = angles[positions]
    table_dtype = dtype if case.table_dtype != torch.float32 else torch.float32
    cos, sin = angles.cos().to(table_dtype), angles.sin().to(table_dtype)
    return {"rotary": case.rotary, "cos": cos, "sin": sin}


def _norms(case: Case, dtype: torch.dtype) -> dict[str, object]:
    if case.norm is None:
        return {}
    weights = {}
    for name, heads in (("q_norm_weight", case.heads), ("k_norm_weight", case.kv_heads)):
        size = case.dim if case.norm == "head" else case.dim * heads
        centre = 0.0 if case.zero_centered else 1.0
        weights[name] = (centre + 0.3 * rows(size, dtype=torch.float32, seed=size + heads)).to(
            dtype
        )
    settings = dict(norm_scope=case.norm, norm_eps=EPS, norm_zero_centered=case.zero_centered)
    return weights | settings


def _scales(case: Case, arguments: dict[str, object]) -> dict[str, object]:
    """Scales that differ by head, and the caches in FP8; large values saturate."""
    if case.scales is None:
        return {}
    changed: dict[str, object] = {}
    for name, largest in (("k", 2.0), ("v", 3.0)):
        heads = torch.arange(case.kv_heads if case.scales == "head" else 1)
        scale = (largest + 0.7 * heads) / 448
        cache = arguments[f"{name}_cache"].float() / scale[:, None, None]
        changed[f"{name}_scale"] = scale
        changed[f"{name}_cache"] = cache.clamp(-448, 448).to(torch.float8_e4m3fn)
    return changed


def stored(arguments: dict[str, object], name: str, to: torch.dtype) -> torch.Tensor:
    """What the cache ``k_cache`` or ``v_cache`` stands for."""
    cache, scale = arguments[name].to(to), arguments.get(f"{name[0]}_scale")
    return cache if scale is None else cache * scale.to(to)[:, None, None]


def norm_and_rotate(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    arguments: dict[str, object],
    position: int,
    at: tuple[int, int],
    to: torch.dtype,
) -> torch.Tensor:
    """One token's heads ``[heads, D]`` at ``position``, token ``at = (b, t)`` of the call."""
    x = x.to(to)
    heads, dim = x.shape
    if weight is not None:
        weight = weight.to(to) + (1 if arguments["norm_zero_centered"] else 0)
        spans = [x.reshape(-1)] if arguments["norm_scope"] == "all" else list(x)
        normed = [
            span / (span.square().mean() + arguments["norm_eps"]).sqrt() * weight for span in spans
        ]
        x = torch.cat(normed).view(heads, dim)
    if "cos" not in arguments:
        return x
    cos, sin = arguments["cos"], arguments["sin"]
    cos = (cos[position] if cos.dim() == 2 else cos[at]).to(to)
    sin = (sin[position] if sin.dim() == 2 else sin[at]).to(to)
    width = cos.shape[-1]
    if arguments["rotary"] == "half":
        pairs = [(i, i + width // 2) for i in range(width // 2)]
    else:
        pairs = [(2 * i, 2 * i + 1) for i in range(width // 2)]
    first, second = (list(side) for side in zip(*pairs, strict=True))
    turned = x.clone()
    turned[:, first] = x[:, first] * cos[first] - x[:, second] * sin[first]
    turned[:, second] = x[:, second] * cos[second] + x[:, first] * sin[second]
    return turned


def naive(arguments: dict[str, object], to: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out [B, T, H, D], new keys [B, T, G, D])``, every step in ``to``, token by token.

    FP8 caches are those after the call: new rows are read from them, as the cache rounds them.
    """
    a = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    q, k, v = a["q"], a["k"], a["v"]
    batch, tokens, heads, _ = q.shape
    group, is_fp8 = heads // k.shape[2], a.get("k_scale") is not None
    k_cache, v_cache = stored(a, "k_cache", to), stored(a, "v_cache", to)
    out, new_keys = torch.zeros(q.shape, dtype=to), torch.zeros(k.shape, dtype=to)
    for b in range(batch):
        length = int(a["lengths"][b])
        keys = list(k_cache[b, :, :length].unbind(1))
        values = list(v_cache[b, :, :length].unbind(1))
        for t in range(tokens):
            position, at = length + t, (b if a.get("cos") is None else min(b, batch - 1), t)
            turned = norm_and_rotate(k[b, t], a.get("k_norm_weight"), a, position, at, to)
            query = norm_and_rotate(q[b, t], a.get("q_norm_weight"), a, position, at, to)
            new_keys[b, t] = turned
            keys.append(k_cache[b, :, position] if is_fp8 else turned)
            values.append(v_cache[b, :, position] if is_fp8 else v[b, t].to(to))
            oldest = 0 if a["window"] is None else max(0, position - a["window"] + 1)
            for head in range(heads):
                seen_keys = torch.stack([row[head // group] for row in keys[oldest:]])
                seen_values = torch.stack([row[head // group] for row in values[oldest:]])
                scores = seen_keys @ query[head] * a["scaling"]
                if a["soft_cap"] is not None:
                    scores = a["soft_cap"] * torch.tanh(scores / a["soft_cap"])
                out[b, t, head] = torch.softmax(scores, 0) @ seen_values
    return out, new_keys


CASES = (
    Case(),
    Case(lengths=(0,), tokens=1),
    Case(lengths=(191,), tokens=1),  # the last slot
    Case(lengths=(127, 128, 0), tokens=2, slots=130),
    Case(lengths=(5,), tokens=8, heads=4, kv_heads=1, dim=128),  # 32 rows a key head
    Case(lengths=(1022,), tokens=4, slots=1100),  # over the edge of 8 splits
    Case(lengths=(30,), heads=2, kv_heads=2, dim=80),
    Case(lengths=(40,), heads=5, kv_heads=1, dim=96),
    Case(lengths=(250, 3), heads=6, kv_heads=2, dim=192, slots=256),
    Case(lengths=(130,), tokens=2, heads=16, kv_heads=1, dim=256),
    Case(lengths=(90,), rotary="interleaved"),
    Case(lengths=(90,), rotary="interleaved", rotary_dim=24, dim=80),
    Case(lengths=(90,), rotary_dim=20),
    Case(lengths=(90,), rotary=None),
    Case(lengths=(90, 7), tokens=2, by_slot=False),
    Case(lengths=(90,), table_dtype=torch.bfloat16),
    Case(lengths=(90,), norm="head", dim=128, heads=8),
    Case(lengths=(90,), norm="head", zero_centered=True),
    Case(lengths=(90,), tokens=2, norm="all"),
    Case(lengths=(170,), window=1),
    Case(lengths=(170,), tokens=3, window=40),
    Case(lengths=(1090,), tokens=2, window=70, slots=1100),
    Case(lengths=(170,), tokens=2, window=1000, soft_cap=2.0),
    Case(lengths=(170,), soft_cap=30.0, dim=256, heads=2, kv_heads=1),
)


def exact_and_eager(
    arguments: dict[str, object], dtype: torch.dtype
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """``(out, new keys)`` exactly (fp64), and as eager torch computes them in ``dtype``."""
    return naive(arguments, torch.float64), naive(arguments, dtype)


def assert_near(actual: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor) -> None:
    """``assert_accurate`` of 16-bit results; fp32 ones only go through the same steps."""
    if actual.dtype == torch.float32:
        torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-5)
    else:
        assert_accurate(actual, exact, eager)


def call(attention, arguments: dict[str, object], **more: object) -> torch.Tensor:
    """``attend`` on copies of the caches, so that ``arguments`` can be used again."""
    caches = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    return attention.attend(**(arguments | caches | more))


def assert_no_nan(tensor: torch.Tensor) -> None:
    assert not math.isnan(float(tensor.float().sum())), "poison reached the result"


def one_row(attention, arguments, b, t, slots=None):
    """Token t of sequence b as a call of its own, the tokens before it already cached."""
    alone = {name: arguments[name][b : b + 1, t : t + 1] for name in "qkv"}
    for name in ("k_cache", "v_cache"):
        cache = arguments[name][b : b + 1]
        if slots is not None:
            longer = torch.full_like(cache, float("nan")).repeat(
                1, 1, 1 + slots // cache.shape[2], 1
            )
            longer[:, :, : cache.shape[2]] = cache
            cache = longer[:, :, :slots]
        alone[name] = cache
    if slots is not None and "cos" in arguments:
        rows = arguments["cos"].shape[0]
        for name in ("cos", "sin"):
            table = arguments[name].repeat(1 + slots // rows, 1)
            alone[name] = table[:slots]
    alone["lengths"] = arguments["lengths"][b : b + 1] + t
    return attention.attend(**(arguments | alone))


# lengths, tokens, slots: rows on both sides of the borders of splits and of their supers
ROWS_OF_MANY_LENGTHS = [
    ((5, 127, 126, 128), 2, 2100),
    ((1022,), 8, 2100),
    ((2040, 900), 4, 2100),
    ((0,) * 8, 1, 130),
]


def assert_rows_alone(attention, arguments):
    """Every row of a call has the bits of a call of its own, in a longer cache too: all rows."""
    together = attention.attend(**arguments)
    assert_no_nan(together)
    batch, tokens = arguments["q"].shape[:2]
    for b in range(batch):
        for t in range(tokens):
            alone = one_row(attention, arguments, b, t)
            assert_bitwise(alone, together[b : b + 1, t : t + 1])
    last = tokens - 1
    longer = one_row(attention, arguments, 0, last, slots=32768)
    assert_bitwise(longer, together[:1, last:])
    return together
