"""What only a GPU can show: graph replay, launch order, repeatability."""

import torch
from _common.family import replayed, write_late
from test_sampling_dispatch import arguments_of


def test_replay_equals_eager(sampling, cuda):
    scratch = sampling.workspace(2, 151936, cuda)

    def two_steps(arguments):
        sampling.greedy_step(*arguments, pad_id=5, workspace=scratch)
        sampling.greedy_step(*arguments, pad_id=5, workspace=scratch)

    def reset(arguments):
        for tensor in arguments[1:6]:
            tensor.zero_()

    expected, actual = arguments_of(cuda, size=151936), arguments_of(cuda, size=151936)
    two_steps(expected)

    def steps_from_zero():
        reset(actual)
        two_steps(actual)

    replayed(steps_from_zero)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)
    assert expected[2].tolist() == [2, 2]


def test_logits_and_state_may_have_a_producer_in_flight(sampling, cuda):
    arguments = arguments_of(cuda, size=151936)
    expected = arguments[0].argmax(-1)
    late = torch.zeros_like(arguments[0])
    finished_late = torch.ones_like(arguments[4])
    scratch = sampling.workspace(2, 151936, cuda)
    torch.cuda.synchronize()
    write_late(late, arguments[0])
    assert torch.equal(sampling.argmax(late, workspace=scratch), expected)
    late.zero_()
    torch.cuda.synchronize()
    write_late(late, arguments[0])
    finished_late.zero_()
    rest = (*arguments[1:4], finished_late, *arguments[5:])
    sampling.greedy_step(late, *rest, pad_id=5, workspace=scratch)
    assert torch.equal(arguments[5], expected)
    assert arguments[2].tolist() == [1, 1]


def test_the_workspace_is_ready_again_after_thousands_of_calls(sampling, cuda):
    logits = arguments_of(cuda, rows=3, size=100_000)[0]
    scratch = sampling.workspace(3, 100_000, cuda)
    expected = logits.argmax(-1)
    out = torch.empty_like(expected)
    wrong = torch.zeros((), dtype=torch.int64, device=cuda)
    for _ in range(3000):
        out.fill_(-1)
        sampling.argmax(logits, workspace=scratch, out=out)
        wrong += (out != expected).sum()
    assert wrong.item() == 0
