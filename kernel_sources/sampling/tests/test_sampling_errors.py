"""Every documented error of the sampling family, word for word."""

import re

import pytest
import torch

LOGITS = torch.zeros(2, 64)


def raises(message, error=ValueError):
    return pytest.raises(error, match="^" + re.escape(message))


def step(sampling, **replaced):
    arguments = dict(
        logits=LOGITS,
        tokens=torch.zeros(2, 4, dtype=torch.int64),
        counts=torch.zeros(2, dtype=torch.int32),
        lengths=torch.zeros(2, dtype=torch.int32),
        finished=torch.zeros(2, dtype=torch.bool),
        next_ids=torch.zeros(2, dtype=torch.int64),
        eos=torch.zeros(1, dtype=torch.int64),
        max_new=torch.ones(2, dtype=torch.int32),
        pad_id=0,
    )
    sampling.greedy_step(**(arguments | replaced))


@pytest.mark.parametrize(
    "logits,rule",
    [
        (torch.zeros(()), "have at least 1 dims, got shape ()"),
        (LOGITS.double(), "be bfloat16 or float16 or float32, got float64"),
        (torch.zeros(64, 2).t(), "have unit stride in dim 1, got strides (1, 2)"),
        (torch.zeros(2, 0), "have 1 to 2**30 elements in its last dim, got (2, 0)"),
    ],
)
def test_logits(sampling, logits, rule):
    with raises(f"argmax: logits must {rule}"):
        sampling.argmax(logits)
    with raises(f"greedy_step: logits must {rule}"):
        step(sampling, logits=logits)


@pytest.mark.parametrize(
    "out,rule",
    [
        (torch.zeros(3, dtype=torch.int64), "have shape (2,), got (3,)"),
        (torch.zeros(2, dtype=torch.int32), "be int64, got int32"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "be on cpu, got meta"),
        (torch.zeros(4, dtype=torch.int64)[::2], "have unit stride in dim 0, got strides (2,)"),
    ],
)
def test_out(sampling, out, rule):
    with raises(f"argmax: out must {rule}"):
        sampling.argmax(LOGITS, out=out)


def test_out_of_strided_rows(sampling):
    out = torch.zeros(2, 6, dtype=torch.int64)[:, :3]
    with raises("argmax: out must be contiguous, got strides (6, 1)"):
        sampling.argmax(torch.zeros(2, 3, 8), out=out)


@pytest.mark.parametrize(
    "make,rule",
    [
        (lambda w: w.float(), "be uint8, got float32"),
        (lambda w: w.to("meta"), "be on cpu, got meta"),
        (lambda w: w.repeat(2)[::2], "be contiguous, got strides (2,)"),
        (
            lambda w: w[:-1],
            "have at least 2064 bytes, as workspace(2, 64, device) makes, got 2063",
        ),
    ],
)
def test_workspace(sampling, make, rule):
    scratch = make(sampling.workspace(2, 64, "cpu"))
    with raises(f"argmax: workspace must {rule}"):
        sampling.argmax(LOGITS, workspace=scratch)
    with raises(f"greedy_step: workspace must {rule}"):
        step(sampling, workspace=scratch)


def test_workspace_sizes(sampling):
    with raises("workspace: B must not be negative, got -1"):
        sampling.workspace(-1, 64, "cpu")
    with raises("workspace: V must be at least 1, got 0"):
        sampling.workspace(1, 0, "cpu")


@pytest.mark.parametrize(
    "argument,value,rule",
    [
        ("logits", torch.zeros(64), "have shape [B, V], got (64,)"),
        ("tokens", torch.zeros(2, dtype=torch.int64), "have shape [B, L], got (2,)"),
        ("tokens", torch.zeros(3, 4, dtype=torch.int64), "have shape (2, 4), got (3, 4)"),
        ("tokens", torch.zeros(2, 4, dtype=torch.int32), "be int64, got int32"),
        ("counts", torch.zeros(2, dtype=torch.int64), "be int32, got int64"),
        ("counts", torch.zeros(1, dtype=torch.int32), "have shape (2,), got (1,)"),
        ("lengths", torch.zeros(4, dtype=torch.int32)[::2], "be contiguous, got strides (2,)"),
        ("finished", torch.zeros(2, dtype=torch.uint8), "be bool, got uint8"),
        ("next_ids", torch.zeros(2, dtype=torch.int32), "be int64, got int32"),
        ("eos", torch.zeros((), dtype=torch.int64), "have shape [E] or [2, E], got ()"),
        ("eos", torch.zeros(1, dtype=torch.int32), "be int64, got int32"),
        ("max_new", torch.zeros(2, dtype=torch.int32, device="meta"), "be on cpu, got meta"),
    ],
)
def test_greedy_step_arguments(sampling, argument, value, rule):
    with raises(f"greedy_step: {argument} must {rule}"):
        step(sampling, **{argument: value})


def test_pad_id_is_a_keyword(sampling):
    with pytest.raises(TypeError, match="takes 8 positional arguments but 9 were given"):
        sampling.greedy_step(LOGITS, *[LOGITS] * 7, 0)


def test_grad(sampling):
    logits = torch.zeros(2, 64, requires_grad=True)
    with torch.enable_grad():
        with raises("argmax: has no backward", RuntimeError):
            sampling.argmax(logits)
        with raises("greedy_step: has no backward", RuntimeError):
            step(sampling, logits=logits)
