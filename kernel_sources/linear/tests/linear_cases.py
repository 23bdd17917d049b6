"""Operands for the tests, and the computation written out a second time, for any dtype.

``linear`` and ``gated_linear`` here give the exact result for operands in fp64; for bf16 or fp16
they give what eager torch does, the baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

EPS = 1e-5

# What precedes the product, see ``make_prologue``.
PROLOGUES = (
    "none",
    "norm",
    "norm_zero_centered",
    "add",
    "add_norm",
    "add_normed",
    "add_normed_norm",
    "add_normed_norm_zero_centered",
)
EPILOGUES: dict[str, dict[str, Any]] = {
    "none": {},
    "bias": {"bias": True},
    "residual": {"residual": True},
    "bias_residual": {"bias": True, "residual": True},
    "scale": {"scale": 0.375},
    "soft_cap": {"soft_cap": 1.5},
    "all": {
        "bias": True,
        "residual": True,
        "activation": "silu",
        "scale": -2.5,
        "soft_cap": 0.75,
    },
}
ACTIVATIONS = {
    "identity": lambda y: y,
    "silu": lambda y: y * torch.sigmoid(y),
    "gelu": lambda y: 0.5 * y * (1 + torch.erf(y * 0.5**0.5)),
    "gelu_tanh": lambda y: 0.5 * y * (1 + torch.tanh(0.79788456080286536 * (y + 0.044715 * y**3))),
    "quick_gelu": lambda y: y * torch.sigmoid(1.702 * y),
    "relu": lambda y: y.clamp(min=0),
    "relu2": lambda y: y.clamp(min=0) ** 2,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def generator(device: str, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def normal(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, *, seed: int, std: float = 1.0
) -> torch.Tensor:
    values = torch.randn(shape, generator=generator(device, seed), device=device)
    return (values * std).to(dtype)


def make_weight(n: int, k: int, dtype: torch.dtype, device: str, *, seed: int = 1) -> torch.Tensor:
    """``[N, K]`` of variance 1/K, so that the product has the variance of x."""
    return normal((n, k), dtype, device, seed=seed, std=k**-0.5)


def make_prologue(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, *, seed: int = 20
) -> dict[str, Any]:
    """Keyword arguments of the public functions, without ``residual_out``."""
    k = shape[-1]
    arguments: dict[str, Any] = {}
    if name.startswith("add"):
        arguments["branch"] = normal(shape, dtype, device, seed=seed, std=2.0)
    if name.startswith("add_normed"):
        arguments["branch_norm_weight"] = normal((k,), dtype, device, seed=seed + 1, std=0.5)
        arguments["branch_norm_eps"] = 2 * EPS
    if name.endswith(("norm", "norm_zero_centered")):
        arguments["norm_weight"] = normal((k,), dtype, device, seed=seed + 2, std=0.5)
        arguments["norm_eps"] = EPS
    if name.endswith("zero_centered"):
        arguments["norm_zero_centered"] = True
    return arguments


def make_epilogue(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, *, seed: int = 30
) -> dict[str, Any]:
    """Keyword arguments of ``linear`` for an output of ``shape``."""
    arguments = dict(EPILOGUES[name])
    if "bias" in arguments:
        arguments["bias"] = normal(shape[-1:], dtype, device, seed=seed)
    if "residual" in arguments:
        arguments["residual"] = normal(shape, dtype, device, seed=seed + 1)
    return arguments


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool) -> torch.Tensor:
    """RMS norm as transformers writes it: fp32 inside (fp64 for fp64), then the dtype of x."""
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    if zero_centered:
        return (wide * (1 + weight.to(wide.dtype))).to(x.dtype)
    return weight * wide.to(x.dtype)


def add_branch(
    x: torch.Tensor,
    *,
    branch: torch.Tensor | None = None,
    branch_norm_weight: torch.Tensor | None = None,
    branch_norm_eps: float = 0.0,
    norm_zero_centered: bool = False,
    **_: Any,
) -> torch.Tensor:
    """The new residual."""
    if branch is None:
        return x
    if branch_norm_weight is not None:
        branch = norm(branch, branch_norm_weight, branch_norm_eps, norm_zero_centered)
    return x + branch


def prologue(x: torch.Tensor, **before: Any) -> torch.Tensor:
    """What is multiplied."""
    x = add_branch(x, **before)
    if "norm_weight" not in before:
        return x
    zero_centered = before.get("norm_zero_centered", False)
    return norm(x, before["norm_weight"], before["norm_eps"], zero_centered)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias``; fp32 row by row, as eager decodes (and sums less precisely)."""
    if x.dtype == torch.float32 and 0 < x.shape[0] <= 8:
        return torch.stack([F.linear(row, weight, bias) for row in x])
    return F.linear(x, weight, bias)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
    **before: Any,
) -> torch.Tensor:
    """The family's ``linear`` in the dtype of the operands."""
    y = product(prologue(x, **before), weight, bias)
    y = ACTIVATIONS[activation or "identity"](y) * scale
    if soft_cap is not None:
        y = soft_cap * torch.tanh(y / soft_cap)
    return y if residual is None else residual + y


def gated_linear(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    **before: Any,
) -> torch.Tensor:
    """The family's ``gated_linear`` in the dtype of the operands."""
    x = prologue(x, **before)
    return ACTIVATIONS[activation](product(x, gate, gate_bias)) * product(x, up, up_bias)


def double(operands: dict[str, Any]) -> dict[str, Any]:
    """Tensors in fp64, anything else as it is."""
    return {
        name: value.double() if isinstance(value, torch.Tensor) else value
        for name, value in operands.items()
    }


def with_residual_out(operands: dict[str, Any]) -> dict[str, Any]:
    """The same, with a poisoned ``residual_out`` where a branch needs one."""
    if "branch" not in operands:
        return operands
    return {**operands, "residual_out": torch.full_like(operands["x"], float("nan"))}


def replays_of(
    step: Callable[[], tuple[torch.Tensor, ...]], ids: torch.Tensor, *, count: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Capture ``step``, which reads ``ids``, and replay it for ``count`` other ids.

    Yields:
        Each result of a replay, poisoned before it, beside the same result of eager.
    """
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(count):
        drawn = torch.randint(512, ids.shape, generator=generator("cuda", seed), device="cuda")
        ids.copy_(drawn)
        expected = step()
        for result in captured:
            result.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        yield from zip(captured, expected, strict=True)


def assert_neither_waits_nor_allocates(call: Callable[[], None]) -> None:
    """``call`` does not synchronise with the GPU and leaves its allocator alone."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
