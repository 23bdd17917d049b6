"""Every documented error of the quant family, word for word."""

import re

import pytest
import torch

X = torch.ones(4, 32)
FP8 = torch.float8_e4m3fn
DATA = X.to(FP8)
ONE = torch.ones(1)
CODES = torch.zeros(4, 16, dtype=torch.uint8)
SCALES = torch.ones(4, 2).to(FP8)
TILES = torch.zeros(1, 1, 2304, dtype=torch.uint8)


def raises(message, error=ValueError):
    return pytest.raises(error, match="^" + re.escape(message))


@pytest.mark.parametrize("name", ["quantize_fp8", "quantize_int8", "quantize_nvfp4"])
@pytest.mark.parametrize(
    "x,message",
    [
        (torch.ones(()), "must have at least 1 dims, got shape ()"),
        (X.double(), "must be bfloat16 or float16 or float32, got float64"),
        (X.t(), "must have unit stride in dim 1, got strides (1, 32)"),
    ],
)
def test_input(quant, name, x, message):
    argument = "weight" if name == "quantize_nvfp4" else "x"
    with raises(f"{name}: {argument} {message}"):
        getattr(quant, name)(x)


@pytest.mark.parametrize("name", ["quantize_fp8", "quantize_int8", "quantize_nvfp4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_not_finite(quant, device, name, value):
    x = X.to(device).clone()
    x[3, 31] = value
    argument = "weight" if name == "quantize_nvfp4" else "x"
    with raises(f"{name}: {argument} must be finite, got a NaN or an infinity"):
        getattr(quant, name)(x)
    if name == "quantize_fp8":
        for given in (dict(per="tensor"), dict(scale=ONE.to(device))):
            with raises("quantize_fp8: x must be finite, got a NaN or an infinity"):
                quant.quantize_fp8(x, **given)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_scale_value(quant, value):
    scale = torch.full((1,), value)
    rule = "must be positive and finite, got a value that is not"
    with raises(f"quantize_fp8: scale {rule}"):
        quant.quantize_fp8(X, scale=scale)
    with raises(f"quantize_nvfp4: global_scale {rule}"):
        quant.quantize_nvfp4(X, global_scale=scale)


def test_given_scale(quant):
    with raises("quantize_fp8: per must be one of row, tensor, got 'column'"):
        quant.quantize_fp8(X, per="column")
    with raises("quantize_fp8: scale_out must be None when scale is given, got a tensor"):
        quant.quantize_fp8(X, scale=ONE, scale_out=ONE)
    with raises("quantize_fp8: scale must be float32, got float16"):
        quant.quantize_fp8(X, scale=ONE.half())
    with raises("quantize_fp8: scale must be on cpu, got meta"):
        quant.quantize_fp8(X, scale=ONE.to("meta"))
    with raises("quantize_fp8: scale must have one element or shape (4,), got (4, 1)"):
        quant.quantize_fp8(X, scale=torch.ones(4, 1))
    with raises("quantize_nvfp4: global_scale must have one element, got shape (4,)"):
        quant.quantize_nvfp4(X, global_scale=torch.ones(4))


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_outputs(quant, name):
    quantise = getattr(quant, f"quantize_{name}")
    dtype = {"fp8": "float8_e4m3fn", "int8": "int8"}[name]
    with raises(f"quantize_{name}: out must be {dtype}, got float32"):
        quantise(X, out=torch.empty(4, 32))
    with raises(f"quantize_{name}: out must have shape (4, 32), got (4, 31)"):
        quantise(X, out=torch.empty(4, 31))
    with raises(f"quantize_{name}: scale_out must have shape (4,), got (1,)"):
        quantise(X, scale_out=torch.empty(1))
    with raises(f"quantize_{name}: scale_out must have unit stride in dim 0, got strides (2,)"):
        quantise(X, scale_out=torch.empty(8)[::2])
    data, _ = quantise(X)
    with raises(f"dequantize_{name}: dtype must be bfloat16 or float16 or float32, got float64"):
        getattr(quant, f"dequantize_{name}")(data, ONE, dtype=torch.float64)
    with raises(f"dequantize_{name}: out must be bfloat16 or float16 or float32, got int32"):
        getattr(quant, f"dequantize_{name}")(data, ONE, out=torch.empty(4, 32).int())
    with raises(f"dequantize_{name}: out must have shape (4, 32), got (3, 32)"):
        getattr(quant, f"dequantize_{name}")(data, ONE, out=torch.empty(3, 32))


def test_dequantize(quant):
    with raises("dequantize_fp8: data must be float8_e4m3fn, got float32"):
        quant.dequantize_fp8(X, ONE)
    with raises("dequantize_int8: data must be int8, got float8_e4m3fn"):
        quant.dequantize_int8(DATA, ONE)
    rule = "scale must have one element or shape (4,)"
    with raises(f"dequantize_fp8: {rule} or (1, 1), got (4, 1)"):
        quant.dequantize_fp8(DATA, torch.ones(4, 1))
    with raises(f"dequantize_int8: {rule}, got (4, 1)"):
        quant.dequantize_int8(DATA.to(torch.int8), torch.ones(4, 1))
    with raises("dequantize_fp8: scale must be float32, got float16"):
        quant.dequantize_fp8(DATA, ONE.half())


def test_importance(quant):
    with raises("quantize_nvfp4: importance must have shape (32,), got (31,)"):
        quant.quantize_nvfp4(X, importance=torch.ones(31))
    with raises("quantize_nvfp4: importance must be finite and not negative, got a value that is"):
        quant.quantize_nvfp4(X, importance=torch.full((32,), -1.0))
    with raises("quantize_nvfp4: weight must have 2 dims, got shape (32,)"):
        quant.quantize_nvfp4(X[0])


@pytest.mark.parametrize("name", ["tile_nvfp4", "dequantize_nvfp4"])
def test_row_major_form(quant, name):
    rest = (ONE,) if name == "dequantize_nvfp4" else ()
    function = getattr(quant, name)
    with raises(f"{name}: codes must be uint8, got float32"):
        function(CODES.float(), SCALES, *rest)
    with raises(f"{name}: codes must have 2 dims, got shape (16,)"):
        function(CODES[0], SCALES, *rest)
    with raises(f"{name}: codes must be contiguous, got strides (1, 16)"):
        function(torch.zeros(16, 16, dtype=torch.uint8).t(), SCALES, *rest)
    with raises(f"{name}: block_scales must have shape (4, 2), got (4, 3)"):
        function(CODES, torch.ones(4, 3).to(FP8), *rest)
    with raises(f"{name}: block_scales must be float8_e4m3fn, got float32"):
        function(CODES, SCALES.float(), *rest)


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xFF])
def test_block_scale_value(quant, device, byte):
    scales = SCALES.to(device).clone()
    scales.view(torch.uint8)[3, 1] = byte
    with raises("tile_nvfp4: block_scales must be neither negative nor NaN, got a value that is"):
        quant.tile_nvfp4(CODES.to(device), scales)


def test_shapes(quant):
    for name, rest in (("untile_nvfp4", ()), ("dequantize_nvfp4_tiles", (ONE,))):
        function = getattr(quant, name)
        with raises(f"{name}: tiles must have shape (2, 1, 2304), got (1, 1, 2304)"):
            function(TILES, *rest, (17, 256))
        with raises(f"{name}: shape must be (N, K), neither negative, got (3,)"):
            function(TILES, *rest, (3,))
        with raises(f"{name}: tiles must be uint8, got float32"):
            function(TILES.float(), *rest, (16, 256))
    with raises("dequantize_nvfp4: columns must be 32 or 31, got 30"):
        quant.dequantize_nvfp4(CODES, SCALES, ONE, columns=30)
    with raises("dequantize_nvfp4: scale must have one element or shape (4,), got (3,)"):
        quant.dequantize_nvfp4(CODES, SCALES, torch.ones(3))
    with raises("unpack_nibbles: columns must be 32 or 31, got 33"):
        quant.unpack_nibbles(CODES, columns=33)
    with raises("pack_nibbles: codes must be at most 15, got 16"):
        quant.pack_nibbles(CODES + 16)
    with raises("tile_nvfp4: out must have shape (1, 1, 2304), got (2304,)"):
        quant.tile_nvfp4(CODES, SCALES, out=TILES.flatten())


def test_grad(quant):
    weight = torch.ones(4, 32, requires_grad=True)
    for name in ("quantize_fp8", "quantize_int8", "quantize_nvfp4"):
        with torch.enable_grad(), raises(f"{name}: has no backward", RuntimeError):
            getattr(quant, name)(weight)
        getattr(quant, name)(weight)  # under no_grad
