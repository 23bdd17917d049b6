"""greedy_step: every branch of the bookkeeping, on every row by itself."""

from dataclasses import dataclass, fields

import pytest
import torch
from _common.buffers import Guarded
from _common.family import DTYPES
from _common.tolerance import assert_bitwise

PAD = 99


@dataclass
class Row:
    """State of one row before the step, the token that will win, and the state expected after."""

    winner: int
    count: int
    length: int
    finished: bool
    max_new: int
    after: tuple[int, int, bool, int]  # count, length, finished, next id


CAPACITY = 6
EOS = (7, -1, 2047)
ROWS = {
    "goes on": Row(5, 2, 40, False, 6, (3, 41, False, 5)),
    "first token": Row(0, 0, 1, False, 6, (1, 2, False, 0)),
    "first end of sequence": Row(7, 2, 40, False, 6, (3, 41, True, 7)),
    "last end of sequence": Row(2047, 2, 40, False, 6, (3, 41, True, 2047)),
    "reaches max_new": Row(5, 2, 40, False, 3, (3, 41, True, 5)),
    "reaches the capacity": Row(5, 5, 40, False, 1000, (6, 41, True, 5)),
    "was finished": Row(5, 2, 40, True, 6, (2, 40, True, PAD)),
    "was finished with an end of sequence on top": Row(7, 2, 40, True, 6, (2, 40, True, PAD)),
    "has no room by max_new": Row(5, 3, 40, False, 3, (3, 40, True, PAD)),
    "has no room by capacity": Row(5, 6, 40, False, 1000, (6, 40, True, PAD)),
    "may generate nothing": Row(5, 0, 40, False, 0, (0, 40, True, PAD)),
}


@dataclass
class State:
    tokens: torch.Tensor
    counts: torch.Tensor
    lengths: torch.Tensor
    finished: torch.Tensor
    next_ids: torch.Tensor

    def __iter__(self):
        return (getattr(self, field.name) for field in fields(self))


def state_of(rows, device):
    return State(
        torch.arange(1000, 1000 + len(rows) * CAPACITY, device=device).view(-1, CAPACITY),
        torch.tensor([row.count for row in rows], dtype=torch.int32, device=device),
        torch.tensor([row.length for row in rows], dtype=torch.int32, device=device),
        torch.tensor([row.finished for row in rows], dtype=torch.bool, device=device),
        torch.full((len(rows),), -5, device=device),
    )


def logits_of(rows, size, dtype, device):
    logits = torch.linspace(-1, 0, size).expand(len(rows), size).clone()
    for index, row in enumerate(rows):
        logits[index, row.winner] = 1.0
    return logits.to(dtype).to(device)


def step(sampling, rows, state, device, size=5003, dtype=torch.float32, **arguments):
    logits = logits_of(rows, size, dtype, device)
    eos = torch.tensor(EOS, device=device)
    max_new = torch.tensor([row.max_new for row in rows], dtype=torch.int32, device=device)
    assert sampling.greedy_step(logits, *state, eos, max_new, pad_id=PAD, **arguments) is None


def assert_after(rows, state):
    tokens = torch.arange(1000, 1000 + len(rows) * CAPACITY).view(-1, CAPACITY)
    for index, row in enumerate(rows):
        count, length, finished, next_id = row.after
        actual = (state.counts[index], state.lengths[index], state.finished[index])
        assert tuple(value.item() for value in actual) == (count, length, finished)
        assert state.next_ids[index].item() == next_id
        if count > row.count:
            tokens[index, row.count] = row.winner
    assert state.tokens.tolist() == tokens.tolist()


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row(sampling, device, name, dtype):
    rows = [ROWS[name]]
    state = state_of(rows, device)
    step(sampling, rows, state, device, dtype=dtype)
    assert_after(rows, state)


@pytest.mark.parametrize("size", [2048, 151936])
def test_rows_do_not_disturb_each_other(sampling, device, size):
    rows = list(ROWS.values())
    state = state_of(rows, device)
    step(sampling, rows, state, device, size, workspace=sampling.workspace(len(rows), size, device))
    assert_after(rows, state)


def test_writes_nothing_else(sampling, device):
    rows = list(ROWS.values())
    plain = state_of(rows, device)
    guards = [Guarded(t.shape, t.dtype, device, row_gap=3 * (t.dim() - 1)) for t in plain]
    for guard, tensor in zip(guards, plain, strict=True):
        guard.view.copy_(tensor)
    step(sampling, rows, State(*(guard.view for guard in guards)), device)
    for guard in guards:
        guard.assert_intact()
    assert_after(rows, State(*(guard.view for guard in guards)))


def test_no_end_of_sequence_and_no_rows(sampling, device):
    rows = [ROWS["first end of sequence"]]
    state = state_of(rows, device)
    logits = logits_of(rows, 100, torch.float32, device)
    eos = torch.empty(0, dtype=torch.int64, device=device)
    max_new = torch.tensor([6], dtype=torch.int32, device=device)
    sampling.greedy_step(logits, *state, eos, max_new, pad_id=PAD)
    assert (state.counts.item(), state.finished.item()) == (3, False)
    empty = state_of([], device)
    sampling.greedy_step(logits[:0], *empty, eos, max_new[:0], pad_id=PAD)
    assert empty.tokens.shape == (0, CAPACITY)


def test_a_loop_of_steps_writes_a_sentence(sampling, device):
    sentence = [3, 1, 4, 1, 5, 7, 9, 2]  # 7 ends it
    rows = [Row(0, 0, 10, False, 8, ())]
    state = State(
        torch.zeros(1, 8, dtype=torch.int64, device=device), *list(state_of(rows, device))[1:]
    )
    scratch = sampling.workspace(1, 5003, device)
    emitted = []
    for winner in sentence:
        step(sampling, [Row(winner, 0, 0, False, 8, ())], state, device, workspace=scratch)
        emitted.append(state.next_ids.item())
    assert emitted == [3, 1, 4, 1, 5, 7, PAD, PAD]
    assert state.tokens.tolist() == [[3, 1, 4, 1, 5, 7, 0, 0]]
    assert (state.counts.item(), state.lengths.item()) == (6, 16)
    assert_bitwise(state.finished, torch.tensor([True], device=device))
