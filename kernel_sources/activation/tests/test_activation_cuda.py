"""What only a GPU can show: graph replay, launch order, many rows."""

import activation_cases as cases
import pytest
import torch
from _common.family import replayed, write_late
from _common.tolerance import assert_accurate, assert_bitwise


def test_replay_equals_eager(activation, cuda):
    x = cases.values(2, 1536, dtype=torch.bfloat16, device=cuda)

    def chain(out):
        activation.activate(x, activation="gelu", out=out)
        activation.gated(out, x, out=out)
        activation.gated(x, out, activation="tanh", out=out)

    expected, actual = torch.empty_like(x), torch.empty_like(x)
    chain(expected)
    replayed(lambda: chain(actual))
    assert_bitwise(actual, expected)


def test_inputs_may_have_a_producer_in_flight(activation, cuda):
    x = cases.values(2, 1536, dtype=torch.bfloat16, device=cuda)
    calls = (
        lambda late: activation.activate(late, activation="silu"),
        lambda late: activation.gated(late, x),
        lambda late: activation.gated(x, late),
    )
    for call in calls:
        expected = call(x)
        late = torch.zeros_like(x)
        torch.cuda.synchronize()
        write_late(late, x)
        assert_bitwise(call(late), expected)


@pytest.mark.parametrize("shape", [(70_001, 40), (3, 5, 70_001), (1, 2**23 + 8)])
def test_large(activation, cuda, shape):
    x = cases.values(*shape, dtype=torch.bfloat16, device=cuda)
    for view in (x, x[..., :-1]):
        actual = activation.gated(view, view)
        wide = view.float()
        eager = torch.nn.functional.silu(view) * view
        assert_accurate(actual, torch.nn.functional.silu(wide) * wide, eager)
