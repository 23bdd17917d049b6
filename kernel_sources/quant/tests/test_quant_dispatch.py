"""What torch needs to know about the ops: schemas, fakes, torch.compile."""

import sys

import pytest
import quant_cases as cases
import torch
from _common.tolerance import assert_bitwise

FP8 = torch.float8_e4m3fn


def check(op, arguments):
    """torch.library.opcheck, without the part that multiplies FP8, which torch cannot do."""
    tests = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )
    has_fp8 = any(isinstance(one, torch.Tensor) and one.dtype == FP8 for one in arguments)
    torch.library.opcheck(op, arguments, test_utils=tests[has_fp8:])


def test_opcheck(quant, device):
    ops = sys.modules[f"{quant.__name__}.schemas"].ops
    x = cases.rows(3, 40, dtype=torch.bfloat16, device=device)
    scale, one = torch.empty(3, device=device), torch.ones(1, device=device)
    for dtype in (FP8, torch.int8):
        data = torch.zeros(3, 40, device=device).to(dtype)
        check(ops.quantize_rows, (x, None, data, scale))
        check(ops.quantize_rows, (x, one, data, None))
        check(ops.dequantize, (data, one, torch.empty_like(x)))
    codes = torch.zeros(3, 20, dtype=torch.uint8, device=device)
    scales = torch.zeros(3, 3, device=device).to(FP8)
    tiles = torch.zeros(1, 1, 2304, dtype=torch.uint8, device=device)
    check(ops.quantize_nvfp4, (x, one, None, codes, scales))
    check(ops.dequantize_nvfp4, (codes, scales, one, torch.empty_like(x)))
    check(ops.tile_nvfp4, (codes, scales, tiles))
    check(ops.untile_nvfp4, (tiles, codes, scales))
    check(ops.dequantize_nvfp4_tiles, (tiles, one, torch.empty_like(x)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(quant, device, dynamic):
    """What may run in a captured step: activations without the check, and weights to values."""

    def block(x, scale, tiles):
        data, scales = quant.quantize_fp8(x * 2, check_finite=False)
        fixed, _ = quant.quantize_fp8(x, scale=scale, check_finite=False)
        weight = quant.dequantize_nvfp4_tiles(tiles, scale, (8, 64))
        return quant.dequantize_fp8(data, scales) + quant.dequantize_fp8(fixed, scale), weight

    found = quant.quantize_nvfp4(cases.rows(8, 64, device=device))
    tiles = quant.tile_nvfp4(found.codes, found.block_scales)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (2, 5):
        x = cases.rows(tokens, 64, dtype=torch.bfloat16, device=device)
        arguments = (x, torch.full((1,), 0.01, device=device), tiles)
        for one, other in zip(compiled(*arguments), block(*arguments), strict=True):
            assert_bitwise(one, other)


def test_unknown_name(quant):
    with pytest.raises(AttributeError, match=r"quant: no kernel 'quantise'; it has NVFP4, "):
        _ = quant.quantise
