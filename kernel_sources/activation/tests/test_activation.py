"""activate, gated and gated_packed: values, layouts, aliases."""

import activation_cases as cases
import pytest
import torch
from _common.buffers import Guarded, gapped_copy, offset_copy
from _common.family import DTYPES
from _common.tolerance import assert_accurate, assert_bitwise

SIZES = (1, 3, 64, 127, 1536, 5003)
NAMES = tuple(cases.FORMULAS)


def test_names(activation):
    assert set(activation.ACTIVATIONS) == set(NAMES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_values(activation, device, dtype, name):
    x = cases.values(3, 1000, dtype=dtype, device=device)
    formula = cases.FORMULAS[name]
    actual = activation.activate(x, activation=name)
    assert actual.data_ptr() != x.data_ptr()
    assert_accurate(actual, formula(x.double()), formula(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_special_values(activation, device, dtype, name):
    x = torch.tensor([0.0, -0.0, 90.0, -90.0, 200.0, -200.0, float("nan")], device=device)
    actual = activation.activate(x.to(dtype), activation=name).double()
    limit = torch.finfo(dtype).max
    expected = cases.FORMULAS[name](x.to(dtype).double())
    assert actual.isnan().tolist() == [False] * 6 + [True]
    torch.testing.assert_close(
        actual[:6].clamp(-limit, limit), expected[:6].clamp(-limit, limit), rtol=1e-2, atol=1e-3
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "identity"])
def test_gated_values(activation, device, dtype, size, name):
    gate = cases.values(3, size, dtype=dtype, device=device)
    up = cases.values(3, size, dtype=dtype, device=device, seed=1)
    formula = cases.FORMULAS[name]
    actual = activation.gated(gate, up, activation=name)
    assert_accurate(actual, formula(gate.double()) * up.double(), formula(gate) * up)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
def test_packed_equals_gated(activation, device, size, gate_first, leading):
    x = cases.values(*leading, 2 * size, dtype=torch.bfloat16, device=device)
    halves = [half.contiguous() for half in x.split(size, dim=-1)]
    gate, up = halves if gate_first else reversed(halves)
    actual = activation.gated_packed(x, activation="gelu", gate_first=gate_first)
    assert actual.is_contiguous()
    assert_bitwise(actual, activation.gated(gate, up, activation="gelu"))
    out = Guarded((*leading, size), torch.bfloat16, device)
    activation.gated_packed(x, activation="gelu", gate_first=gate_first, out=out.view)
    out.assert_written()
    assert_bitwise(out.view, actual)


@pytest.mark.parametrize("size", [64, 65, 1000])
def test_bits_do_not_depend_on_the_layout(activation, device, size):
    x = cases.values(4, 3, size, dtype=torch.bfloat16, device=device)
    up = cases.values(4, 3, size, dtype=torch.bfloat16, device=device, seed=1)
    expected = activation.gated(x, up)
    for copy in (offset_copy, lambda t: gapped_copy(t, 3), lambda t: gapped_copy(t, 8)):
        assert_bitwise(activation.gated(copy(x), up), expected)
        assert_bitwise(activation.gated(x, copy(up)), expected)
        alone = activation.activate(copy(x), activation="silu")
        assert_bitwise(alone, activation.activate(x, activation="silu"))
    swapped = activation.gated(x.transpose(0, 1), up.transpose(0, 1))
    assert_bitwise(swapped, expected.transpose(0, 1).contiguous())
    assert_bitwise(activation.gated(x[1:3, ::2], up[1:3, ::2]), expected[1:3, ::2].contiguous())
    assert_bitwise(activation.gated(x, up[:1, :1].expand_as(x))[0, 0], expected[0, 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset,row_gap", [(0, 0), (1, 0), (0, 8), (3, 5)])
def test_out(activation, device, dtype, size, offset, row_gap):
    x = cases.values(3, size, dtype=dtype, device=device)
    layout = dict(offset=offset, row_gap=row_gap)
    one = Guarded((3, size), dtype, device, **layout)
    two = Guarded((3, size), dtype, device, **layout)
    assert activation.activate(x, activation="silu", out=one.view) is one.view
    assert activation.gated(x, x, out=two.view) is two.view
    one.assert_written()
    two.assert_written()
    assert_bitwise(one.view, activation.activate(x, activation="silu"))
    assert_bitwise(two.view, activation.gated(x, x))


@pytest.mark.parametrize("size", [64, 65])
def test_in_place(activation, device, size):
    gate = cases.values(3, size, dtype=torch.bfloat16, device=device)
    up = cases.values(3, size, dtype=torch.bfloat16, device=device, seed=1)
    expected = activation.gated(gate, up)
    for aliased in (0, 1):
        operands = [gate.clone(), up.clone()]
        assert_bitwise(activation.gated(*operands, out=operands[aliased]), expected)
    alone = activation.activate(gate, activation="tanh")
    assert_bitwise(activation.activate(gate, activation="tanh", out=gate), alone)


@pytest.mark.parametrize("shape", [(0,), (0, 64), (2, 0, 64), (3, 0)])
def test_empty(activation, device, shape):
    x = torch.empty(shape, device=device)
    assert activation.activate(x, activation="silu").shape == shape
    assert activation.gated(x, x).shape == shape
    assert activation.gated_packed(x).shape == (*shape[:-1], shape[-1] // 2)
