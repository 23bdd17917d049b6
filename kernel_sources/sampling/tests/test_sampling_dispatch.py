"""What torch needs to know about the ops: schemas, fakes, torch.compile."""

import sys

import pytest
import torch


def arguments_of(device, rows=2, size=3000):
    generator = torch.Generator().manual_seed(0)
    integers = dict(dtype=torch.int32, device=device)
    return (
        torch.randn(rows, size, generator=generator).to(device),
        torch.zeros(rows, 4, dtype=torch.int64, device=device),
        torch.zeros(rows, **integers),
        torch.zeros(rows, **integers),
        torch.zeros(rows, dtype=torch.bool, device=device),
        torch.zeros(rows, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.full((rows,), 3, **integers),
    )


def test_opcheck(sampling, device):
    ops = sys.modules[f"{sampling.__name__}.ops"].ops
    arguments = arguments_of(device)
    scratch = sampling.workspace(2, 3000, device)
    out = torch.zeros(2, dtype=torch.int64, device=device)
    torch.library.opcheck(ops.argmax, (arguments[0], scratch, out))
    torch.library.opcheck(ops.greedy_step, (*arguments, 5, scratch))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(sampling, device, dynamic):
    def block(logits, *rest):
        scratch = sampling.workspace(logits.shape[0], logits.shape[1], logits.device)
        sampling.greedy_step(logits, *rest, pad_id=5, workspace=scratch)
        return sampling.argmax(logits.neg())

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (2, 5):
        expected, actual = arguments_of(device, rows), arguments_of(device, rows)
        assert torch.equal(compiled(*actual), block(*expected))
        for one, other in zip(actual, expected, strict=True):
            assert torch.equal(one, other)
        assert expected[2].tolist() == [1] * rows
