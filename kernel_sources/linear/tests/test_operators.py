"""The operators as torch sees them: schemas, fakes, mutation, torch.compile without breaks."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import linear_cases as cases
import pytest
import torch
from _common.tolerance import assert_accurate, assert_bitwise

BF16 = torch.bfloat16


def operators(family: ModuleType) -> Any:
    return importlib.import_module(f"{family.__name__}.schema").ops


def linear_operands(
    device: str, *, count: int, rows: int = 3, residual: bool = False, bias: bool = False
) -> tuple[Any, ...]:
    """Operands of the operator ``linear`` up to ``weights_static``."""
    x = cases.normal((rows, 40), BF16, device, seed=0)
    weights = [cases.make_weight(24, 40, BF16, device, seed=i) for i in range(count)]
    biases = [cases.normal((24,), BF16, device, seed=i) if bias else None for i in range(count)]
    nothing = [None] * (3 - count)
    addend = cases.normal((rows, 24 * count), BF16, device, seed=5) if residual else None
    norm = (cases.normal((40,), BF16, device, seed=6), 1e-6, 1)
    plain = [None] * 3  # scales
    end = (addend, 1, False, 0.5, 3.0, False)
    return (x, *weights, *nothing, *plain, *biases, *nothing, *norm, *end)


@pytest.mark.parametrize("fp32_out", [False, True])
@pytest.mark.parametrize(
    ("count", "residual", "bias"), [(1, True, True), (2, False, False), (3, False, True)]
)
def test_opcheck_linear(
    family: ModuleType, device: str, count: int, residual: bool, bias: bool, fp32_out: bool
) -> None:
    operands = linear_operands(device, count=count, residual=residual, bias=bias)
    torch.library.opcheck(operators(family).linear, (*operands, fp32_out))


@pytest.mark.parametrize("branch", [False, True])
def test_opcheck_linear_out(family: ModuleType, device: str, branch: bool) -> None:
    operands = linear_operands(device, count=1, residual=True, bias=True)
    out = torch.empty(3, 24, dtype=BF16, device=device)
    before: tuple[Any, ...] = (None, None, None, 0.0, 0)
    if branch:
        x = operands[0]
        before = (torch.empty_like(x), torch.ones_like(x), torch.ones_like(x[0]), 1e-6, 1)
    torch.library.opcheck(operators(family).linear_out, (out, *before, *operands))


def test_opcheck_embedding(family: ModuleType, device: str) -> None:
    table = cases.normal((20, 72), BF16, device, seed=0)
    ids = torch.tensor([3, 0, 19], device=device)
    torch.library.opcheck(operators(family).embedding, (ids, table, 2.0, False))
    out = torch.empty(3, 72, dtype=BF16, device=device)
    torch.library.opcheck(operators(family).embedding_out, (out, ids, table, None, 2.0, False))


def test_meta_tensors(family: ModuleType) -> None:
    """Shapes and dtypes without data."""
    x = torch.empty(2, 3, 40, dtype=BF16, device="meta")
    weight = torch.empty(24, 40, dtype=BF16, device="meta")
    assert family.linear(x, weight).shape == (2, 3, 24)
    assert family.linear(x, weight, out_dtype=torch.float32).dtype == torch.float32
    assert [q.shape for q in family.linear_split(x, [weight, weight])] == [(2, 3, 24)] * 2
    assert family.gated_linear(x, weight, weight).shape == (2, 3, 24)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("rows", [2, 12])
def test_compile(family: ModuleType, device: str, rows: int, backend: str) -> None:
    """A decoder layer's calls in one graph, in few and in many rows, give the same bits."""
    x = cases.normal((1, rows, 64), BF16, device, seed=0)
    branch = cases.normal((1, rows, 64), BF16, device, seed=1)
    weight = cases.make_weight(64, 64, BF16, device)
    up = cases.make_weight(96, 64, BF16, device, seed=2)
    down = cases.make_weight(64, 96, BF16, device, seed=3)
    norm = cases.normal((64,), BF16, device, seed=4)

    def layer(x: torch.Tensor, branch: torch.Tensor) -> tuple[torch.Tensor, ...]:
        stream = torch.empty_like(x)
        q, k = family.linear_split(
            x,
            [weight, up],
            norm_weight=norm,
            norm_eps=1e-6,
            branch=branch,
            branch_norm_weight=norm,
            branch_norm_eps=1e-6,
            residual_out=stream,
        )
        out = torch.empty_like(x)
        family.linear(q, weight, residual=stream, out=out)
        hidden = family.gated_linear(out, up, up, activation="gelu_tanh")
        return stream, q, k, family.linear(hidden, down, residual=out, soft_cap=5.0), out

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for result, expected in zip(compiled(x, branch), layer(x, branch), strict=True):
        assert_bitwise(result, expected)


@pytest.mark.parametrize("rows", [2, 12])
def test_compile_writes_into_arguments(family: ModuleType, device: str, rows: int) -> None:
    """The residual stream of the caller is updated in place inside a compiled function."""
    x = cases.normal((rows, 64), BF16, device, seed=0)
    weight = cases.make_weight(64, 64, BF16, device)
    expected = cases.normal((rows, 64), BF16, device, seed=5)
    stream = expected.clone()

    def update(x: torch.Tensor, stream: torch.Tensor) -> None:
        family.linear(x, weight, residual=stream, out=stream)

    torch._dynamo.reset()
    torch.compile(update, fullgraph=True, backend="aot_eager")(x, stream)
    update(x, expected)
    assert_bitwise(stream, expected)


def test_compile_dynamic_rows(family: ModuleType, device: str) -> None:
    """One function serves any number of rows, across the limit of one launch."""
    weight = cases.make_weight(24, 64, BF16, device)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: family.linear(x, weight, activation="silu"),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for rows in (2, 3, 8, 9, 30, 5):
        x = cases.normal((rows, 64), BF16, device, seed=rows)
        assert_bitwise(compiled(x), family.linear(x, weight, activation="silu"))


def test_compile_embedding(family: ModuleType, device: str) -> None:
    table = cases.normal((20, 72), BF16, device, seed=0)
    ids = torch.tensor([[3, 0, 19]], device=device)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda ids: family.embedding(ids, table, scale=3.0), fullgraph=True, backend="aot_eager"
    )
    assert_bitwise(compiled(ids), family.embedding(ids, table, scale=3.0))


def test_compile_with_inductor(family: ModuleType, cuda: str) -> None:
    """Inductor's own code around the operators computes the same function."""
    x = cases.normal((4, 256), BF16, cuda, seed=0)
    weight = cases.make_weight(256, 256, BF16, cuda)
    norm = cases.normal((256,), BF16, cuda, seed=4)

    def block(x: torch.Tensor) -> torch.Tensor:
        y = family.linear(x * 2, weight, norm_weight=norm, norm_eps=1e-6)
        return family.linear(y, weight, residual=x) + 1

    torch._dynamo.reset()
    exact = cases.linear(x.double() * 2, weight.double(), norm_weight=norm.double(), norm_eps=1e-6)
    exact = cases.linear(exact, weight.double(), residual=x.double()) + 1
    compiled = torch.compile(block, fullgraph=True)
    assert_accurate(compiled(x), exact, block(x))
