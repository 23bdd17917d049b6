"""More than 8 rows with quantised weights: FP8 products, parts of a weight, a quantised input."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any

import linear_cases as cases
import packing
import pytest
import torch
from _common.tolerance import assert_accurate, assert_bitwise, unit_roundoff

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16


def products(family: ModuleType) -> Any:
    return importlib.import_module(f"{family.__name__}.packed_products")


@cache
def cpu_scales_rows() -> bool:
    """Whether torch's E4M3 products on the CPU take scales of rows: not in torch 2.11."""
    ones = torch.ones((16, 16)).to(FP8)
    try:
        torch._scaled_mm(
            *(ones, ones.t()),
            scale_a=torch.ones((16, 1)),
            scale_b=torch.ones((1, 16)),
            out_dtype=BF16,
        )
    except RuntimeError:
        return False
    return True


def need_cpu_product(dtype: torch.dtype) -> None:
    """Skip where torch cannot compute what ``_fp8_product`` asks of it on a GPU."""
    if dtype == BF16 and not cpu_scales_rows():
        pytest.skip("torch's FP8 products on this CPU take no scale for each row")


def quantized(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x.float() / scale).clamp(-448, 448).to(FP8)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "k"), [(64, 272), (2048, 1024), (16, 16)])
def test_fp8_product(
    family: ModuleType, device: str, dtype: torch.dtype, bias: bool, n: int, k: int
) -> None:
    """E4M3 times E4M3 with a scale for each row and column, rounded to each dtype."""
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    if device == "cpu":
        need_cpu_product(dtype)
    packed = packing.make_packed(family, "fp8", n, k, device)
    x = cases.normal((19, k), BF16, device, seed=0)
    scale = x.float().abs().amax(1, keepdim=True) / 448
    x = quantized(x, scale)
    addend = None
    if bias:
        addend = cases.normal((n,), BF16 if dtype == torch.float32 else dtype, device, seed=3)
    operands = (x, scale, packed.weight.data, packed.weight.scale, addend, dtype)
    actual = products(family)._fp8_product(*operands)
    exact = (x.double() * scale.double()) @ packed.dense.double().t()
    eager = (x.float() * scale) @ packed.dense.t()
    if addend is not None:
        exact, eager = exact + addend.double(), eager + addend.float()
    assert actual.dtype == dtype
    if device == "cpu":
        assert_accurate(actual, exact, eager.to(dtype))
        return
    # Hopper's tensor cores keep 14 bits of a sum of E4M3 products, and cut it there every 32
    # columns: up to 2**-13 of the sum so far, which is half of the whole on average.
    error = (actual.double() - exact).abs().max() / exact.abs().max()
    assert error < 2.0**-11 + k / 32 * 2.0**-14 + unit_roundoff(dtype), error


@pytest.mark.parametrize("form", packing.FORMATS)
@pytest.mark.parametrize("rows_a_part", [1, 48, 204])
def test_parts_of_a_weight(
    family: ModuleType,
    device: str,
    form: str,
    rows_a_part: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A weight dequantised in parts, the last one smaller."""
    packed = packing.make_packed(family, form, 205, 130, device)
    x = cases.normal((40, 130), BF16, device, seed=0)
    bias = cases.normal((205,), BF16, device, seed=1)
    monkeypatch.setattr(products(family), "_PART_BYTES", 2 * 130 * rows_a_part)
    actual = family.linear(x, packed.weight, bias)
    wanted = packing.expected(form, {"x": x, "bias": bias}, {"weight": packed.dense})
    assert_accurate(actual, *wanted)


@pytest.mark.parametrize("rows", [0, 1, 9, 33])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("form", ["fp8", "fp8_blocks"])
@pytest.mark.parametrize("function", ["linear", "linear_split", "gated_linear"])
def test_quantized_input(
    family: ModuleType, device: str, rows: int, per_row: bool, form: str, function: str
) -> None:
    """E4M3 with its scale is multiplied as the values it stands for."""
    x = cases.normal((rows, 272), BF16, device, seed=0)
    scale = torch.full((1,), 0.01, device=device)
    if per_row:
        scale = 0.01 + torch.arange(rows, device=device) / 1000
    values = quantized(x, scale[:, None])
    dequantized = values.double() * scale[:, None].double()
    packed = packing.make_packed(family, form, 64, 272, device)
    other = packing.make_packed(family, form, 64, 272, device, seed=2)
    residual = cases.normal((rows, 64), BF16, device, seed=5)
    if function == "linear":
        actual = family.linear(values, packed.weight, residual=residual, input_scale=scale)
    elif function == "linear_split":
        weights = [packed.weight, other.weight]
        parts = family.linear_split(values, weights, input_scale=scale)
        actual, residual = parts[1], torch.zeros_like(residual)
        packed = other
    else:
        actual = family.gated_linear(values, packed.weight, other.weight, input_scale=scale)

    def compute(x: torch.Tensor) -> torch.Tensor:
        first, second = packed.dense.to(x.dtype), other.dense.to(x.dtype)
        if function == "gated_linear":
            return cases.gated_linear(x, first, second)
        return cases.linear(x, first, residual=residual.to(x.dtype))

    assert_accurate(actual, compute(dequantized), compute(dequantized.to(BF16)))


@pytest.mark.parametrize("rows", [2, 20])
def test_dtypes_with_a_quantized_input(family: ModuleType, device: str, rows: int) -> None:
    """bf16 where nothing says otherwise, else what is asked for or comes with the call."""
    x = torch.ones((2, rows, 32), device=device).to(FP8)
    scale = torch.full((1,), 0.5, device=device)
    ones = torch.ones((16, 32), device=device).to(FP8)
    weight = family.PackedWeight(ones, torch.full((16,), 2.0, device=device), (16, 32))

    def call(**arguments: Any) -> torch.Tensor:
        return family.linear(x, weight, input_scale=scale, **arguments)

    bias = torch.ones(16, dtype=torch.float16, device=device)
    out = torch.empty((2, rows, 16), dtype=torch.float16, device=device)
    results = [
        (call(), BF16, 32),
        (call(out_dtype=torch.float16), torch.float16, 32),
        (call(out_dtype=torch.float32), torch.float32, 32),
        (call(bias=bias), torch.float16, 33),
        (call(bias=bias, out_dtype=torch.float32), torch.float32, 33),
        (call(out=out), torch.float16, 32),
    ]
    for result, dtype, value in results:
        assert_bitwise(result, torch.full((2, rows, 16), value, dtype=dtype, device=device))
    if device == "cpu":
        wide = call(residual=torch.ones((2, rows, 16)))
        assert_bitwise(wide, torch.full((2, rows, 16), 33.0))


@pytest.mark.parametrize("rows", [1, 8, 12, 40])
def test_static_scale(family: ModuleType, device: str, rows: int) -> None:
    """Where the product runs in FP8 the input is rounded with the scale given; never elsewhere."""
    packed = packing.make_packed(family, "fp8", 64, 272, device)
    x = cases.normal((rows, 272), BF16, device, seed=0)
    scale = torch.full((1,), 2.0**-6, device=device)  # E4M3 times it is exact in bf16
    actual = family.linear(x, packed.weight, input_scale=scale)
    if packing.runs_in_fp8("fp8", x, packed.dense):
        x = (quantized(x, scale).float() * scale).to(BF16)
    dense = packed.dense
    assert_accurate(
        actual, cases.linear(x.double(), dense.double()), cases.linear(x, dense.to(BF16))
    )
    if device == "cpu":
        assert_bitwise(actual, family.linear(x, packed.weight))


@pytest.fixture
def in_fp8(family: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a GPU with E4M3 products, on torch's CPU implementation of them."""
    monkeypatch.setattr(products(family), "multiplies_in_fp8", lambda x, weights, scales: True)


@pytest.mark.parametrize("quantized_input", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_decoder_layer_in_fp8(
    family: ModuleType, in_fp8: None, dtype: torch.dtype, quantized_input: bool
) -> None:
    """A layer's products as a GPU multiplies them, in eager and in one traced graph."""
    need_cpu_product(dtype)
    make = packing.make_packed
    (q, dense), (gate, _), (up, _) = (make(family, "fp8", 64, 64, "cpu", seed=i) for i in (1, 2, 3))
    norm = cases.normal((64,), dtype, "cpu", seed=4)
    static = torch.full((1,), 0.02)

    def layer(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if quantized_input:
            given = {"input_scale": scale, "out_dtype": dtype}
        else:
            given = {"norm_weight": norm, "norm_eps": 1e-6}
        first, second = family.linear_split(x, [q, gate], **given)
        stream = torch.empty_like(first)
        added = {"branch": second, "residual_out": stream}
        normed = {"norm_weight": norm, "norm_eps": 1e-6, "input_scale": static}
        hidden = family.gated_linear(first, gate, up, **added, **normed)
        return first, stream, family.linear(hidden, q, residual=stream, scale=0.5)

    x = cases.normal((2, 10, 64), dtype, "cpu", seed=0)
    scale = 0.01 + torch.arange(20) / 1000
    if quantized_input:
        x = quantized(x, scale.view(2, 10, 1))
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = layer(x, scale)
    for result, expected in zip(compiled(x, scale), results, strict=True):
        assert_bitwise(result, expected)
    if quantized_input:
        exact = x.double() * scale.double().view(2, 10, 1)
        eager = exact.to(dtype)
    else:
        exact = cases.norm(x.double(), norm.double(), 1e-6, False)
        eager = packing.quantized(cases.norm(x, norm, 1e-6, False))
    assert_accurate(results[0], exact @ dense.double().t(), eager @ dense.to(dtype).t())
