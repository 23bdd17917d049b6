"""Activations with FP8 output: the bits of the rounded activation, quantised."""

import re
import sys

import activation_cases as cases
import pytest
import torch
from _common.buffers import Guarded, gapped_copy, offset_copy
from _common.family import DTYPES, replayed, write_late
from _common.fp8 import FP8, assert_quantised
from _common.tolerance import assert_bitwise

# A warp, several warps, 2 and 4 chunks a thread, and a row that is computed twice.
SIZES = (1, 3, 64, 127, 1536, 5003, 12288, 16392, 20001)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("static", [False, True])
def test_values(activation, device, dtype, size, static):
    gate = cases.values(3, size, dtype=dtype, device=device)
    up = cases.values(3, size, dtype=dtype, device=device, seed=1)
    scale = torch.full((1,), 0.02, device=device) if static else None  # some of it saturates
    given = dict(static_scale=scale)
    expected = activation.gated(gate, up)
    assert_quantised(activation.gated_fp8(gate, up, **given), expected, scale)
    packed = torch.cat((gate, up), dim=-1)
    assert_quantised(activation.gated_packed_fp8(packed, **given), expected, scale)
    packed = torch.cat((up, gate), dim=-1)
    actual = activation.gated_packed_fp8(packed, gate_first=False, **given)
    assert_quantised(actual, expected, scale)
    actual = activation.activate_fp8(gate, activation="gelu", **given)
    assert_quantised(actual, activation.activate(gate, activation="gelu"), scale)
    if static:
        assert actual[1] is scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_a_sigmoid_takes_its_scale_from_the_row_alone(activation, device, dtype, size):
    """All of it below sigmoid(0), also where the last chunk is not full."""
    x = cases.values(3, size, dtype=dtype, device=device).abs().neg() - 1
    for kind in ("sigmoid", "tanh", "relu", "identity"):
        expected = activation.activate(x, activation=kind)
        assert_quantised(activation.activate_fp8(x, activation=kind), expected)


@pytest.mark.parametrize("size", [64, 65, 1000])
def test_bits_do_not_depend_on_the_layout(activation, device, size):
    x = cases.values(4, 3, size, dtype=torch.bfloat16, device=device)
    up = cases.values(4, 3, size, dtype=torch.bfloat16, device=device, seed=1)
    for static in (None, torch.full((1,), 0.01, device=device)):
        expected = activation.gated_fp8(x, up, static_scale=static)
        for copy in (offset_copy, lambda t: gapped_copy(t, 3), lambda t: gapped_copy(t, 8)):
            for one, other in zip(
                activation.gated_fp8(copy(x), copy(up), static_scale=static), expected, strict=True
            ):
                assert_bitwise(one, other)
        part = activation.gated_fp8(x[1:3, ::2], up[1:3, ::2], static_scale=static)
        assert_bitwise(part[0], expected[0][1:3, ::2])
        swapped = activation.gated_fp8(x.transpose(0, 1), up.transpose(0, 1), static_scale=static)
        assert_bitwise(swapped[0], expected[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset,row_gap", [(0, 0), (1, 0), (0, 8), (3, 5)])
@pytest.mark.parametrize("static", [False, True])
def test_out(activation, device, dtype, size, offset, row_gap, static):
    x = cases.values(3, size, dtype=dtype, device=device)
    out = Guarded((3, size), FP8, device, offset=offset, row_gap=row_gap)
    scale = Guarded((3,), torch.float32, device)
    fixed = torch.full((1,), 0.02, device=device)
    given = dict(static_scale=fixed) if static else dict(scale_out=scale.view)
    data, used = activation.activate_fp8(x, activation="silu", out=out.view, **given)
    assert data is out.view
    out.assert_intact()
    if not static:
        assert used is scale.view
        scale.assert_written()
    expected = activation.activate(x, activation="silu")
    assert_quantised((data.contiguous(), used), expected, fixed if static else None)


@pytest.mark.parametrize("size", [64, 20001])
def test_a_nan_poisons_its_row_alone(activation, device, size):
    x = cases.values(3, size, dtype=torch.bfloat16, device=device)
    expected = activation.activate_fp8(x, activation="silu")
    x[1, size - 1] = float("nan")
    data, scale = activation.activate_fp8(x, activation="silu")
    assert scale.isnan().tolist() == [False, True, False]
    assert (data.view(torch.uint8)[1] == 0x7F).all()
    for row in (0, 2):
        assert_bitwise(data[row], expected[0][row])


@pytest.mark.parametrize("shape", [(0,), (0, 64), (2, 0, 64), (3, 0)])
def test_empty(activation, device, shape):
    x = torch.empty(shape, device=device)
    data, scale = activation.gated_fp8(x, x)
    assert data.shape == shape
    assert_bitwise(scale, torch.ones(shape[:-1], device=device))
    one = torch.ones(1, device=device)
    assert activation.gated_packed_fp8(x, static_scale=one)[0].shape[-1] == shape[-1] // 2


def test_opcheck(activation, device):
    ops = sys.modules[f"{activation.__name__}.ops"].ops
    x = cases.values(2, 3, 64, dtype=torch.bfloat16, device=device)
    data = torch.zeros(2, 3, 64, device=device).to(FP8)
    half = torch.zeros(2, 3, 32, device=device).to(FP8)
    scale, one = torch.empty(2, 3, device=device), torch.ones(1, device=device)
    # all but the part that multiplies FP8, which torch cannot do
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for static, out in ((None, scale), (one, None)):
        for op, arguments in (
            (ops.activate_fp8, (x, 1, static, data, out)),
            (ops.gated_fp8, (x, x.clone(), 1, static, data, out)),
            (ops.gated_packed_fp8, (x, 1, True, static, half, out)),
        ):
            torch.library.opcheck(op, arguments, test_utils=tests)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(activation, device, dynamic):
    def block(x):
        data, scale = activation.gated_fp8(x, x)
        half, _ = activation.gated_packed_fp8(x, static_scale=scale.flatten()[:1])
        return data.float(), scale, half.float()

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (2, 5):
        x = cases.values(tokens, 64, dtype=torch.bfloat16, device=device)
        for one, other in zip(compiled(x), block(x), strict=True):
            assert_bitwise(one, other)


@pytest.mark.parametrize(
    "given,message",
    [
        (dict(out=torch.empty(2, 64)), "out must be float8_e4m3fn, got float32"),
        (dict(out=torch.empty(2, 63)), "out must have shape (2, 64), got (2, 63)"),
        (dict(scale_out=torch.empty(2, 1)), "scale_out must have shape (2,), got (2, 1)"),
        (dict(static_scale=torch.ones(2)), "static_scale must have one element, got shape (2,)"),
        (
            dict(static_scale=torch.ones(1), scale_out=torch.empty(2)),
            "scale_out must be None when static_scale is given, got a tensor",
        ),
    ],
)
def test_errors(activation, given, message):
    x = torch.ones(2, 64)
    calls = {
        "activate_fp8": lambda: activation.activate_fp8(x, activation="silu", **given),
        "gated_fp8": lambda: activation.gated_fp8(x, x, **given),
        "gated_packed_fp8": lambda: activation.gated_packed_fp8(torch.ones(2, 128), **given),
    }
    for op, call in calls.items():
        with pytest.raises(ValueError, match="^" + re.escape(f"{op}: {message}")):
            call()
    with pytest.raises(ValueError, match="gated_packed_fp8: x must have an even last dim"):
        activation.gated_packed_fp8(torch.ones(2, 3))
    with pytest.raises(ValueError, match="gated_fp8: up must have shape"):
        activation.gated_fp8(x, x[:1])


def test_replay_equals_eager_and_producers_may_be_in_flight(activation, cuda):
    x = cases.values(2, 12288, dtype=torch.bfloat16, device=cuda)

    def outputs():
        return torch.zeros(2, 12288, device=cuda).to(FP8), torch.zeros(2, device=cuda)

    actual, expected = outputs(), outputs()

    def call(pair):
        activation.gated_fp8(x, x, out=pair[0], scale_out=pair[1])

    call(expected)
    replayed(lambda: call(actual))
    for one, other in zip(actual, expected, strict=True):
        assert_bitwise(one, other)
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    write_late(late, x)
    assert_bitwise(activation.gated_fp8(late, late)[0], expected[0])
