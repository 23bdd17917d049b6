"""Quantised weights as torch sees them: fakes, mutation, torch.compile without breaks."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import linear_cases as cases
import packing
import pytest
import torch
from _common.tolerance import assert_bitwise

BF16 = torch.bfloat16
FORMATS = pytest.mark.parametrize("form", packing.FORMATS)
# Of opcheck's tests; its test of mutation compares with allclose, which torch lacks for E4M3.
WITHOUT_ALLCLOSE = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def operators(family: ModuleType) -> Any:
    return importlib.import_module(f"{family.__name__}.schema").ops


@FORMATS
def test_opcheck(family: ModuleType, device: str, form: str) -> None:
    """Both forms of the product, and of the gather."""
    x = cases.normal((3, 272), BF16, device, seed=0)
    packed = [packing.make_packed(family, form, 40, 272, device, seed=i).weight for i in (1, 2)]
    weights = (packed[0].data, packed[1].data, None, packed[0].scale, packed[1].scale, None)
    nothing = (None, None, None)
    tests = WITHOUT_ALLCLOSE if form.startswith("fp8") else "ALL"
    for gated, columns in ((False, 80), (True, 40)):
        inputs = (x, *weights, *nothing, None, 0.0, 0, None, 1, gated, 1.0, 0.0, False)
        torch.library.opcheck(operators(family).linear, (*inputs, False), test_utils=tests)
        out = torch.empty(3, columns, dtype=BF16, device=device)
        before = (None, None, None, 0.0, 0)
        torch.library.opcheck(
            operators(family).linear_out, (out, *before, *inputs), test_utils=tests
        )
    ids = torch.tensor([3, 0, 19], device=device)
    out = torch.empty(3, 272, dtype=BF16, device=device)
    gather = (out, ids, packed[0].data, packed[0].scale, 2.0, False)
    torch.library.opcheck(operators(family).embedding_out, gather, test_utils=tests)


@FORMATS
def test_meta_tensors(family: ModuleType, form: str) -> None:
    """Shapes and dtypes without data; N is that of the weight, not of its tiles."""
    data, scale, shape = packing.make_packed(family, form, 40, 272, "cpu").weight
    weight = family.PackedWeight(data.to("meta"), scale.to("meta"), shape)
    x = torch.empty(2, 3, 272, dtype=BF16, device="meta")
    assert family.linear(x, weight).shape == (2, 3, 40)
    assert family.linear(x, weight, out_dtype=torch.float32).dtype == torch.float32
    assert [q.shape for q in family.linear_split(x, [weight, weight])] == [(2, 3, 40)] * 2
    assert family.gated_linear(x, weight, weight).shape == (2, 3, 40)
    many = torch.empty(12, 272, dtype=BF16, device="meta")
    assert family.linear(many, weight).shape == (12, 40)
    ids = torch.empty(5, dtype=torch.int64, device="meta")
    assert family.embedding(ids, weight).shape == (5, 272)


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
@pytest.mark.parametrize("rows", [2, 12])
def test_compile(family: ModuleType, device: str, form: str, rows: int) -> None:
    """A decoder layer's calls in one graph, weights as arguments, give the same bits."""
    make = packing.make_packed
    table = make(family, form, 30, 64, device).weight
    weight, up = (make(family, form, 64, 64, device, seed=i).weight for i in (2, 3))
    norm = cases.normal((64,), BF16, device, seed=4)
    ids = torch.arange(rows, device=device)

    def layer(ids: torch.Tensor, table: Any, weight: Any, up: Any) -> tuple[torch.Tensor, ...]:
        x = family.embedding(ids, table, scale=3.0)
        q, k = family.linear_split(x, [weight, up], norm_weight=norm, norm_eps=1e-6)
        out = torch.empty_like(x)
        family.linear(q, weight, residual=x, out=out)
        hidden = family.gated_linear(out, weight, up, activation="gelu_tanh")
        return q, k, family.linear(hidden, up, residual=out, soft_cap=5.0), out

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    arguments = (ids, table, weight, up)
    for result, expected in zip(compiled(*arguments), layer(*arguments), strict=True):
        assert_bitwise(result, expected)


def test_compile_dynamic_rows(family: ModuleType, device: str) -> None:
    """One function serves any number of rows, across the limit of one launch."""
    weight = packing.make_packed(family, "int8", 24, 64, device).weight
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: family.linear(x, weight, activation="silu"),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for rows in (2, 8, 9, 30):
        x = cases.normal((rows, 64), BF16, device, seed=rows)
        assert_bitwise(compiled(x), family.linear(x, weight, activation="silu"))


@pytest.mark.parametrize("rows", [2, 12])
def test_compile_quantized_input(family: ModuleType, device: str, rows: int) -> None:
    weight = packing.make_packed(family, "fp8", 64, 64, device).weight
    x = cases.normal((rows, 64), torch.float32, device, seed=0).to(torch.float8_e4m3fn)
    scale = torch.full((rows,), 0.5, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, scale: family.linear(x, weight, input_scale=scale),
        fullgraph=True,
        backend="aot_eager",
    )
    assert_bitwise(compiled(x, scale), family.linear(x, weight, input_scale=scale))


def test_gradients(family: ModuleType, device: str) -> None:
    """A scale that requires grad is refused like a weight that does."""
    data, scale, shape = packing.make_packed(family, "int8", 24, 64, device).weight
    weight = family.PackedWeight(data, scale.requires_grad_(True), shape)
    x = cases.normal((2, 64), BF16, device, seed=0)
    ids = torch.zeros(1, dtype=torch.int64, device=device)
    with torch.enable_grad():
        with pytest.raises(RuntimeError, match="^linear: has no backward"):
            family.linear(x, weight)
        with pytest.raises(RuntimeError, match="^embedding: has no backward"):
            family.embedding(ids, weight)
