"""What only a GPU can show: graph replay, launch order, many rows."""

import norm_cases as cases
import pytest
import torch
from _common.family import replayed, write_late
from _common.tolerance import assert_accurate, assert_bitwise


@pytest.mark.parametrize("weights_static", [False, True])
def test_replay_equals_eager(norm, cuda, weights_static):
    x = cases.rows(2, 4096, dtype=torch.bfloat16, device=cuda)
    weight = cases.parameter(4096, dtype=torch.bfloat16, device=cuda)

    bias = cases.parameter(4096, dtype=torch.bfloat16, device=cuda, seed=2)
    static = dict(weights_static=weights_static)

    def chain(out, total):
        norm.rms_norm(x, weight, **static, out=out)
        norm.add_rms_norm(out, x, weight, **static, out=out, residual_out=total)
        norm.layer_norm(out, weight, bias, scale=total, **static, out=out)

    expected = torch.empty_like(x), torch.empty_like(x)
    actual = torch.empty_like(x), torch.empty_like(x)
    chain(*expected)
    replayed(lambda: chain(*actual))
    assert_bitwise(actual[0], expected[0])
    assert_bitwise(actual[1], expected[1])


def test_parameters_may_have_a_producer_in_flight(norm, cuda):
    x = cases.rows(2, 4096, dtype=torch.bfloat16, device=cuda)
    weight = cases.parameter(4096, dtype=torch.bfloat16, device=cuda)
    calls = (
        lambda operand: norm.rms_norm(x, operand),
        lambda operand: norm.add_rms_norm(x, x, operand)[0],
        lambda operand: norm.layer_norm(x, operand, operand),
        lambda operand: norm.layer_norm(x, scale=operand, shift=operand),
    )
    for call in calls:
        expected = call(weight)
        late = torch.zeros_like(weight)
        torch.cuda.synchronize()
        write_late(late, weight)
        assert_bitwise(call(late), expected)


def test_inputs_may_have_a_producer_in_flight(norm, cuda):
    x = cases.rows(2, 4096, dtype=torch.bfloat16, device=cuda)
    weight = cases.parameter(4096, dtype=torch.bfloat16, device=cuda)
    calls = (
        lambda late: norm.rms_norm(late, weight, weights_static=True),
        lambda late: norm.add_rms_norm(x, late, weight, weights_static=True)[0],
        lambda late: norm.layer_norm(late, weight, weight, weights_static=True),
    )
    for call in calls:
        expected = call(x)
        late = torch.zeros_like(x)
        torch.cuda.synchronize()
        write_late(late, x)
        assert_bitwise(call(late), expected)


def test_producer_of_a_weight_is_a_kernel_that_lets_its_successor_start_early(norm, cuda):
    x = cases.rows(2, 4096, dtype=torch.bfloat16, device=cuda)
    many = cases.rows(20_000, 4096, dtype=torch.bfloat16, device=cuda)
    for call in (norm.rms_norm, norm.layer_norm):
        expected = call(x, norm.rms_norm(many, None)[-1])
        produced = torch.zeros_like(many)
        torch.cuda.synchronize()
        norm.rms_norm(many, None, out=produced)
        assert_bitwise(call(x, produced[-1]), expected)


@pytest.mark.parametrize("rows,size", [(70_001, 64), (20_011, 128), (2_003, 4096)])
def test_many_rows(norm, cuda, rows, size):
    x = cases.rows(rows, size, dtype=torch.bfloat16, device=cuda)
    weight = cases.parameter(size, dtype=torch.bfloat16, device=cuda)
    actual = norm.rms_norm(x, weight)
    exact = cases.rms_norm(x, weight, to=torch.float32)
    assert_accurate(actual, exact, cases.rms_norm(x, weight, to=x.dtype))
    assert_bitwise(norm.rms_norm(x[-1:], weight), actual[-1:])
    assert_accurate(
        norm.layer_norm(x), cases.layer_norm(x, to=torch.float32), cases.layer_norm(x, to=x.dtype)
    )


def test_runs_on_the_current_stream(norm, cuda):
    x = cases.rows(2, 4096, dtype=torch.bfloat16, device=cuda)
    expected = norm.rms_norm(x, None)
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        write_late(late, x)
        actual = norm.rms_norm(late, None)
    side.synchronize()
    assert_bitwise(actual, expected)
