"""Norms with FP8 output: the bits of the rounded norm, quantised."""

import re
import sys

import norm_cases as cases
import pytest
import torch
from _common.buffers import Guarded, gapped_copy, offset_copy
from _common.family import DTYPES, replayed, write_late
from _common.fp8 import FP8, assert_quantised
from _common.tolerance import assert_bitwise


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", cases.SIZES)
@pytest.mark.parametrize("static", [False, True])
def test_values(norm, device, dtype, size, static):
    x = cases.rows(3, size, dtype=dtype, device=device)
    residual = cases.rows(3, size, dtype=dtype, device=device, seed=5)
    weight = cases.parameter(size, dtype=dtype, device=device)
    scale = torch.full((1,), 0.004, device=device) if static else None  # some of it saturates
    given = dict(static_scale=scale)
    assert_quantised(norm.rms_norm_fp8(x, weight, **given), norm.rms_norm(x, weight), scale)
    data, used, total = norm.add_rms_norm_fp8(x, residual, weight, zero_centered=True, **given)
    y, expected = norm.add_rms_norm(x, residual, weight, zero_centered=True)
    assert_quantised((data, used), y, scale)
    assert_bitwise(total, expected)
    arguments = dict(scale=residual, shift=x)
    assert_quantised(
        norm.layer_norm_fp8(x, weight, weight, **arguments, **given),
        norm.layer_norm(x, weight, weight, **arguments),
        scale,
    )
    if static:
        assert norm.rms_norm_fp8(x, weight, **given)[1] is scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 127, 257, 5003, 65601])
@pytest.mark.parametrize("mean", [0.0, -200.0])
def test_a_layer_norm_takes_its_scale_from_the_row_alone(norm, device, dtype, size, mean):
    """A last chunk that is not full, and a mean far from zero: what is not there counts as none."""
    x = cases.rows(3, size, dtype=dtype, device=device) + mean
    bias = cases.parameter(size, dtype=dtype, device=device)
    for given in (dict(), dict(bias=bias), dict(shift=x)):
        assert_quantised(norm.layer_norm_fp8(x, **given), norm.layer_norm(x, **given))


@pytest.mark.parametrize("shape", [(64,), (1, 64), (0, 64), (2, 0, 64), (2, 3, 4, 64)])
def test_leading_dims(norm, device, shape):
    x = cases.rows(*shape, dtype=torch.bfloat16, device=device)
    data, scale = norm.rms_norm_fp8(x, None)
    assert data.shape == shape
    assert scale.shape == shape[:-1]
    if x.numel():
        assert_quantised((data, scale), norm.rms_norm(x, None))


@pytest.mark.parametrize("size", [64, 65, 1000, 4096])
def test_bits_do_not_depend_on_the_layout_or_on_other_rows(norm, device, size):
    x = cases.rows(4, 3, size, dtype=torch.bfloat16, device=device)
    weight = cases.parameter(size, dtype=torch.bfloat16, device=device)
    expected = norm.rms_norm_fp8(x, weight)
    for view in (offset_copy(x), gapped_copy(x, 3), gapped_copy(x, 8)):
        for one, other in zip(norm.rms_norm_fp8(view, weight), expected, strict=True):
            assert_bitwise(one, other)
    for row in range(4):
        alone = norm.rms_norm_fp8(x[row, 1:2], weight)
        for one, other in zip(alone, expected, strict=True):
            assert_bitwise(one, other[row, 1:2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 64, 127, 4096, 65600])
@pytest.mark.parametrize("offset,row_gap", [(0, 0), (1, 0), (0, 8), (3, 5)])
def test_out(norm, device, dtype, size, offset, row_gap):
    x = cases.rows(3, size, dtype=dtype, device=device)
    out = Guarded((3, size), FP8, device, offset=offset, row_gap=row_gap)
    scale = Guarded((3,), torch.float32, device)
    total = Guarded((3, size), dtype, device, offset=offset)
    given = dict(out=out.view, scale_out=scale.view)
    for call, expected in (
        (lambda: norm.rms_norm_fp8(x, None, **given), norm.rms_norm(x, None)),
        (lambda: norm.layer_norm_fp8(x, **given), norm.layer_norm(x)),
        (
            lambda: norm.add_rms_norm_fp8(x, x, None, **given, residual_out=total.view),
            norm.rms_norm(x + x, None),
        ),
    ):
        results = call()
        assert results[0] is out.view
        assert results[1] is scale.view
        out.assert_intact()
        scale.assert_written()
        assert_quantised((out.view.contiguous(), scale.view), expected)
    total.assert_written()
    assert_bitwise(total.view, x + x)


@pytest.mark.parametrize("size", [64, 65600])
def test_residual_in_place(norm, device, size):
    x = cases.rows(3, size, dtype=torch.bfloat16, device=device)
    residual = cases.rows(3, size, dtype=torch.bfloat16, device=device, seed=5)
    expected = norm.add_rms_norm_fp8(x, residual, None)
    actual = norm.add_rms_norm_fp8(x, residual, None, residual_out=residual)
    for one, other in zip(actual, expected, strict=True):
        assert_bitwise(one, other)


@pytest.mark.parametrize("size", [64, 65600])
def test_a_nan_poisons_its_row_alone(norm, device, size):
    x = cases.rows(3, size, dtype=torch.bfloat16, device=device)
    expected = norm.rms_norm_fp8(x, None)
    x[1, size - 1] = float("nan")
    data, scale = norm.rms_norm_fp8(x, None)
    assert scale.isnan().tolist() == [False, True, False]
    assert (data.view(torch.uint8)[1] == 0x7F).all()
    for row in (0, 2):
        assert_bitwise(data[row], expected[0][row])


def test_row_of_zeros(norm, device):
    data, scale = norm.rms_norm_fp8(torch.zeros(2, 48, device=device), None)
    assert scale.tolist() == [1.0, 1.0]
    assert not data.view(torch.uint8).any()


def test_opcheck(norm, device):
    ops = sys.modules[f"{norm.__name__}.ops"].ops
    x = cases.rows(2, 3, 64, dtype=torch.bfloat16, device=device)
    data = torch.zeros(2, 3, 64, device=device).to(FP8)
    scale, one = torch.empty(2, 3, device=device), torch.ones(1, device=device)
    # all but the part that multiplies FP8, which torch cannot do
    checks = dict(
        test_utils=(
            "test_autograd_registration",
            "test_faketensor",
            "test_aot_dispatch_dynamic",
        )
    )
    for given in ((None, data, scale), (one, data, None)):
        arguments = (x, None, None, None, 1e-6, False, False, *given)
        torch.library.opcheck(ops.rms_norm_fp8, arguments, **checks)
        arguments = (x, None, None, None, None, 1e-6, False, *given)
        torch.library.opcheck(ops.layer_norm_fp8, arguments, **checks)
        arguments = (x, x.clone(), None, 1e-6, False, False, *given, torch.empty_like(x))
        torch.library.opcheck(ops.add_rms_norm_fp8, arguments, **checks)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(norm, device, dynamic):
    def block(x, static):
        data, scale, total = norm.add_rms_norm_fp8(x, x, None)
        fixed, _ = norm.rms_norm_fp8(total, None, static_scale=static)
        return data.float(), scale, fixed.float()

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    static = torch.full((1,), 0.01, device=device)
    for tokens in (2, 5):
        x = cases.rows(tokens, 64, dtype=torch.bfloat16, device=device)
        for one, other in zip(compiled(x, static), block(x, static), strict=True):
            assert_bitwise(one, other)


@pytest.mark.parametrize(
    "given,message",
    [
        (dict(out=torch.empty(2, 64)), "out must be float8_e4m3fn, got float32"),
        (dict(out=torch.empty(2, 63)), "out must have shape (2, 64), got (2, 63)"),
        (dict(scale_out=torch.empty(2, 1)), "scale_out must have shape (2,), got (2, 1)"),
        (dict(scale_out=torch.empty(2).half()), "scale_out must be float32, got float16"),
        (dict(static_scale=torch.ones(2)), "static_scale must have one element, got shape (2,)"),
        (dict(static_scale=torch.ones(1).half()), "static_scale must be float32, got float16"),
        (dict(static_scale=torch.ones(1, device="meta")), "static_scale must be on cpu, got meta"),
        (
            dict(static_scale=torch.ones(1), scale_out=torch.empty(2)),
            "scale_out must be None when static_scale is given, got a tensor",
        ),
    ],
)
def test_errors(norm, given, message):
    x = torch.ones(2, 64)
    with pytest.raises(ValueError, match="^" + re.escape(f"rms_norm_fp8: {message}")):
        norm.rms_norm_fp8(x, None, **given)
    with pytest.raises(ValueError, match="^" + re.escape(f"layer_norm_fp8: {message}")):
        norm.layer_norm_fp8(x, **given)
    with pytest.raises(ValueError, match="^" + re.escape(f"add_rms_norm_fp8: {message}")):
        norm.add_rms_norm_fp8(x, x, None, **given)


def test_replay_equals_eager_and_producers_may_be_in_flight(norm, cuda):
    x = cases.rows(2, 4096, dtype=torch.bfloat16, device=cuda)
    weight = cases.parameter(4096, dtype=torch.bfloat16, device=cuda)

    def outputs():
        return torch.zeros(2, 4096, device=cuda).to(FP8), torch.zeros(2, device=cuda)

    actual, expected = outputs(), outputs()

    def call(pair):
        norm.rms_norm_fp8(x, weight, weights_static=True, out=pair[0], scale_out=pair[1])

    call(expected)
    replayed(lambda: call(actual))
    for one, other in zip(actual, expected, strict=True):
        assert_bitwise(one, other)
    static = torch.full((1,), 0.01, device=cuda)
    wanted = norm.rms_norm_fp8(x, weight, static_scale=static)[0]
    for operand, late_call in (
        (x, lambda late: norm.rms_norm_fp8(late, weight, weights_static=True)[0]),
        (weight, lambda late: norm.rms_norm_fp8(x, late)[0]),
    ):
        late = torch.zeros_like(operand)
        torch.cuda.synchronize()
        write_late(late, operand)
        assert_bitwise(late_call(late), expected[0])
    late = torch.ones_like(static)
    torch.cuda.synchronize()
    write_late(late, static)
    assert_bitwise(norm.rms_norm_fp8(x, weight, static_scale=late)[0], wanted)
