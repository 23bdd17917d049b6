"""What a bad call with quantised weights gets: operator, argument, rule and value."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16


class Make:
    """Good arguments beside which one is bad."""

    def __init__(self, family: ModuleType, device: str) -> None:
        self.weight_type, self.device = family.PackedWeight, device

    def ones(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.ones(shape, device=self.device).to(dtype)

    def packed(
        self,
        *,
        shape: Any = (48, 64),
        data: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> Any:
        data = self.ones(48, 64, dtype=FP8) if data is None else data
        scale = self.ones(48, dtype=torch.float32) if scale is None else scale
        return self.weight_type(data, scale, shape)

    def int8(self, **changes: Any) -> Any:
        return self.packed(**{"data": self.ones(48, 64, dtype=torch.int8), **changes})

    def nvfp4(self, *tiles: int) -> Any:
        return self.packed(data=self.ones(*(tiles or (3, 1, 2304)), dtype=torch.uint8))


Case = tuple[str, Callable[[Make], Any]]

# Instead of the weight [48, 64] beside x [2, 64].
WEIGHT: list[Case] = [
    (
        "must have shape (N, 64), got (48, 63)",
        lambda m: m.int8(shape=(48, 63), data=m.ones(48, 63, dtype=torch.int8)),
    ),
    (".shape must be (N, K), both at least 1, got (0, 64)", lambda m: m.packed(shape=(0, 64))),
    (".shape must be (N, K), both at least 1, got (48,)", lambda m: m.packed(shape=(48,))),
    (
        ".data must be float8_e4m3fn or int8 or uint8, got bfloat16",
        lambda m: m.packed(data=m.ones(48, 64)),
    ),
    (
        ".data must have shape (48, 64), got (47, 64)",
        lambda m: m.packed(data=m.ones(47, 64, dtype=FP8)),
    ),
    (
        ".data must have unit stride in dim 1, got strides (1, 48)",
        lambda m: m.packed(data=m.ones(64, 48, dtype=FP8).t()),
    ),
    (".data must have shape (3, 1, 2304), got (3, 2304)", lambda m: m.nvfp4(3, 2304)),
    (
        ".data must be contiguous, got strides (4608, 2304, 1)",
        lambda m: m.packed(data=m.ones(3, 2, 2304, dtype=torch.uint8)[:, :1]),
    ),
    (".scale must be float32, got bfloat16", lambda m: m.packed(scale=m.ones(48))),
    (
        ".scale must have shape (48,), got (1,)",
        lambda m: m.packed(scale=m.ones(1, dtype=torch.float32)),
    ),
    (
        ".scale must have shape (48,), got (1, 1)",
        lambda m: m.int8(scale=m.ones(1, 1, dtype=torch.float32)),
    ),
    (
        ".scale must be contiguous, got strides (2,)",
        lambda m: m.packed(scale=m.ones(96, dtype=torch.float32)[::2]),
    ),
    (
        ".data must be on {device}, got meta",
        lambda m: m.packed(data=torch.ones(48, 64, device="meta").to(FP8)),
    ),
    (
        ".scale must be on {device}, got meta",
        lambda m: m.packed(scale=torch.ones(48, device="meta")),
    ),
    (" must be a tensor or PackedWeight, got tuple", lambda m: tuple(m.packed())),
]
# The second of two weights, beside a first of fp8.
SECOND: list[Case] = [
    ("must be a PackedWeight, as weights[0] is, got Tensor", lambda m: m.ones(48, 64)),
    ("must be fp8, as weights[0] is, got int8", lambda m: m.int8()),
    ("must be fp8, as weights[0] is, got nvfp4", lambda m: m.nvfp4()),
    (
        "must have a scale of 1 dims, as weights[0] has, got 2",
        lambda m: m.packed(scale=m.ones(1, 1, dtype=torch.float32)),
    ),
]
# Beside x [12, 64] (E4M3 where "x" says so) and a weight of fp8.
INPUT: list[Case] = [
    ("input_scale must be given with an x of float8_e4m3fn, got None", lambda m: {"x": FP8}),
    (
        "input_scale must have shape (1,), got (11,)",
        lambda m: {"x": FP8, "input_scale": m.ones(11, dtype=torch.float32)},
    ),
    (
        "input_scale must have shape (1,), got (12,)",
        lambda m: {"input_scale": m.ones(12, dtype=torch.float32)},
    ),
    ("input_scale must be float32, got bfloat16", lambda m: {"input_scale": m.ones(1)}),
    (
        "input_scale must not be given unless all weights are PackedWeight of fp8, got others",
        lambda m: {"input_scale": m.ones(1, dtype=torch.float32), "weight": m.int8()},
    ),
    (
        "x must not be float8_e4m3fn unless all weights are PackedWeight of fp8, got others",
        lambda m: {"x": FP8, "input_scale": m.ones(1, dtype=torch.float32), "weight": m.nvfp4()},
    ),
    (
        "x must not be quantised before a norm or branch, got float8_e4m3fn",
        lambda m: {
            "x": FP8,
            "input_scale": m.ones(1, dtype=torch.float32),
            "norm_weight": m.ones(64),
            "norm_eps": 1e-6,
        },
    ),
    (
        "residual must be float16, got bfloat16",
        lambda m: {
            "x": FP8,
            "input_scale": m.ones(1, dtype=torch.float32),
            "residual": m.ones(12, 48),
            "out_dtype": torch.float16,
        },
    ),
]


def expect(function: str, message: str, device: str) -> Any:
    where = "cuda:0" if device == "cuda" else device
    message = message.format(device=where) if "{device}" in message else message
    return pytest.raises(ValueError, match=f"^{re.escape(f'{function}: {message}')}$")


@pytest.mark.parametrize(("rule", "make"), WEIGHT, ids=[rule for rule, _ in WEIGHT])
def test_weight(family: ModuleType, device: str, rule: str, make: Callable[[Make], Any]) -> None:
    """The same for every number of rows, in every function and for a table."""
    m = Make(family, device)
    weight = make(m)
    for rows in (0, 2, 12):
        with expect("linear", f"weight{rule}" if rule[0] in ". " else f"weight {rule}", device):
            family.linear(m.ones(rows, 64), weight)


@pytest.mark.parametrize(("rule", "make"), SECOND, ids=[rule for rule, _ in SECOND])
def test_second_weight(
    family: ModuleType, device: str, rule: str, make: Callable[[Make], Any]
) -> None:
    m = Make(family, device)
    with expect("linear_split", f"weights[1] {rule}", device):
        family.linear_split(m.ones(2, 64), [m.packed(), make(m)])


@pytest.mark.parametrize(("message", "make"), INPUT, ids=[message for message, _ in INPUT])
def test_input(family: ModuleType, device: str, message: str, make: Callable[[Make], Any]) -> None:
    m = Make(family, device)
    arguments = {"weight": m.packed(), **make(m)}
    arguments["x"] = m.ones(12, 64, dtype=arguments.get("x", BF16))
    with expect("linear", message, device):
        family.linear(**arguments)


def test_other_arguments(family: ModuleType, device: str) -> None:
    """What plain weights ask of the rest of a call, quantised ones do too."""
    m = Make(family, device)
    x, packed = m.ones(2, 64), m.packed()
    with expect("linear_split", "weights must be a list of weights, got one PackedWeight", device):
        family.linear_split(x, packed)
    with expect(
        "linear_split", "weights[1] must be a tensor, as weights[0] is, got PackedWeight", device
    ):
        family.linear_split(x, [m.ones(48, 64), packed])
    with expect("gated_linear", "up must have shape (48, 64), got (40, 64)", device):
        family.gated_linear(x, packed, packed._replace(shape=(40, 64)))
    with expect("linear", "bias must have shape (48,), got (47,)", device):
        family.linear(x, packed, m.ones(47))
    with expect("linear", "out must have shape (2, 48), got (2, 47)", device):
        family.linear(x, packed, out=m.ones(2, 47))


def test_table(family: ModuleType, device: str) -> None:
    m = Make(family, device)
    ids = torch.zeros(2, dtype=torch.int64, device=device)
    with expect("embedding", "table.scale must be float32, got bfloat16", device):
        family.embedding(ids, m.packed(scale=m.ones(48)))
    with expect("embedding", "out must have shape (2, 64), got (2, 63)", device):
        family.embedding(ids, m.packed(), out=m.ones(2, 63))
    rule = "must be bfloat16 or float16 or float32, got int32"
    with expect("embedding", f"out {rule}", device):
        family.embedding(ids, m.packed(), out=m.ones(2, 64, dtype=torch.int32))
    with expect("embedding", f"out_dtype {rule}", device):
        family.embedding(ids, m.packed(), out_dtype=torch.int32)
    with expect("embedding", "out must be float16, got bfloat16", device):
        family.embedding(ids, m.packed(), out_dtype=torch.float16, out=m.ones(2, 64))
    with expect("embedding", "out_dtype must be bfloat16, got float16", device):
        family.embedding(ids, m.ones(48, 64), out_dtype=torch.float16)


def test_tiles_off_their_alignment(family: ModuleType, cuda: str) -> None:
    """Tiles are read 16 bytes at a time."""
    m = Make(family, cuda)
    data = m.ones(3 * 2304 + 1, dtype=torch.uint8)[1:].view(3, 1, 2304)
    rule = "nvfp4 data must start on a multiple of 16 bytes"
    with pytest.raises(RuntimeError, match=f"linear: {rule}"):
        family.linear(m.ones(2, 64), m.packed(data=data))
    with pytest.raises(RuntimeError, match=f"embedding: {rule}"):
        family.embedding(torch.zeros(2, dtype=torch.int64, device=cuda), m.packed(data=data))
