"""Every documented error of sample_step, accept_drafts, logprobs and record_prompt."""

import re

import pytest
import torch
from sampling_cases import NEUTRAL, settings_of, state_of, stops_of

V = 70


def raises(message, error=ValueError):
    return pytest.raises(error, match="^" + re.escape(message))


def arguments_of(places=None):
    shape = (2, V) if places is None else (2, places, V)
    names = ("tokens", "counts", "lengths", "finished", "next_ids")
    arguments = dict(zip(names, state_of(2, "cpu"), strict=True))
    arguments["eos"], arguments["max_new"] = stops_of(2, "cpu", eos=(3,))
    settings = settings_of(2, "cpu", seed=0, **NEUTRAL)
    extras = dict(
        occurrences=torch.zeros(2, V, dtype=torch.int32),
        bias_ids=torch.zeros(2, 4, dtype=torch.int64),
        bias_values=torch.zeros(2, 4),
        allowed=torch.zeros(*shape[:-1], 3, dtype=torch.int32),
    )
    return dict(logits=torch.zeros(shape), pad_id=0, **arguments, **settings, **extras)


def step(sampling, **replaced):
    sampling.sample_step(**(arguments_of() | replaced))


def accept(sampling, **replaced):
    drafts = dict(drafts=torch.zeros(2, 3, dtype=torch.int64))
    accepted = dict(accepted=torch.zeros(2, dtype=torch.int32))
    sampling.accept_drafts(**(arguments_of(4) | drafts | accepted | replaced))


LONG, INT, FLOAT = torch.int64, torch.int32, torch.float32
COMMON = [
    ("tokens", torch.zeros(2, dtype=LONG), "have shape [B, L], got (2,)"),
    ("counts", torch.zeros(2, dtype=LONG), "be int32, got int64"),
    ("lengths", torch.zeros(3, dtype=INT), "have shape (2,), got (3,)"),
    ("finished", torch.zeros(2, dtype=INT), "be bool, got int32"),
    ("next_ids", torch.zeros(4, dtype=LONG)[::2], "be contiguous, got strides (2,)"),
    ("eos", torch.zeros(3, 1, dtype=LONG), "have shape [E] or [2, E], got (3, 1)"),
    ("max_new", torch.zeros(2, dtype=INT, device="meta"), "be on cpu, got meta"),
    ("temperature", torch.zeros(2, dtype=torch.float64), "be float32, got float64"),
    ("temperature", torch.zeros(()), "have shape (2,), got ()"),
    ("seed", torch.zeros(2, dtype=INT), "be int64, got int32"),
    ("top_k", torch.zeros(2, dtype=LONG), "be int32, got int64"),
    ("top_p", torch.zeros(1), "have shape (2,), got (1,)"),
    ("min_p", torch.zeros(4)[::2], "be contiguous, got strides (2,)"),
    ("min_new", torch.zeros(2), "be int32, got float32"),
    ("repetition_penalty", torch.zeros(2, dtype=INT), "be float32, got int32"),
    ("presence_penalty", torch.zeros(3), "have shape (2,), got (3,)"),
    ("frequency_penalty", torch.zeros(2, device="meta"), "be on cpu, got meta"),
    ("occurrences", None, "be given with repetition_penalty, got None"),
    ("occurrences", torch.zeros(2, V, dtype=LONG), "be int32, got int64"),
    ("occurrences", torch.zeros(2, 71, dtype=INT), "have shape (2, 70), got (2, 71)"),
    ("occurrences", torch.zeros(1, V, dtype=INT).expand(2, V), "not be expanded, got strides"),
    ("bias_ids", None, "be given with bias_values, got None"),
    ("bias_values", None, "be given with bias_ids, got None"),
    ("bias_ids", torch.zeros(2, dtype=LONG), "have shape [B, C], got (2,)"),
    ("bias_ids", torch.zeros(3, 4, dtype=LONG), "have shape (2, 4), got (3, 4)"),
    ("bias_values", torch.zeros(2, 3), "have shape (2, 4), got (2, 3)"),
    ("allowed", torch.zeros(2, 3), None),
    ("workspace", torch.zeros(10), "be uint8, got float32"),
    ("workspace", torch.zeros(20, dtype=torch.uint8)[::2], "be contiguous, got strides (2,)"),
]


@pytest.mark.parametrize("argument,value,rule", COMMON)
def test_common_arguments(sampling, argument, value, rule):
    for op, call, allowed in (
        ("sample_step", step, "be int32, got float32"),
        ("accept_drafts", accept, "have shape (2, 4, 3), got (2, 3)"),
    ):
        with raises(f"{op}: {argument} must {rule or allowed}"):
            call(sampling, **{argument: value})


@pytest.mark.parametrize(
    "logits,rule",
    [
        (torch.zeros(()), "have at least 1 dims, got shape ()"),
        (torch.zeros(2, V, dtype=torch.bfloat16), "be float32, got bfloat16"),
        (torch.zeros(V, 2).t(), "have unit stride in dim 1, got strides (1, 2)"),
        (torch.zeros(2, 0), "have 1 to 2**22 elements in its last dim, got (2, 0)"),
        (
            torch.empty(1, 2**22 + 1, device="meta"),
            "have 1 to 2**22 elements in its last dim, got (1, 4194305)",
        ),
        (torch.zeros(V), "have shape [B, V], got (70,)"),
    ],
)
def test_logits_of_a_step(sampling, logits, rule):
    with raises(f"sample_step: logits must {rule}"):
        step(sampling, logits=logits)


@pytest.mark.parametrize(
    "argument,value,rule",
    [
        ("logits", torch.zeros(2, V), "have shape [B, T, V] with T at least 1, got (2, 70)"),
        ("logits", torch.zeros(2, 0, V), "have shape [B, T, V] with T at least 1, got (2, 0, 70)"),
        ("drafts", torch.zeros(2, 4, dtype=LONG), "have shape (2, 3), got (2, 4)"),
        ("drafts", torch.zeros(2, 3, dtype=INT), "be int64, got int32"),
        ("accepted", torch.zeros(2, dtype=LONG), "be int32, got int64"),
        ("draft_probs", torch.zeros(2, 4, V), "have shape (2, 3, 70), got (2, 4, 70)"),
        ("draft_probs", torch.zeros(2, 3, V, dtype=LONG), "be float32, got int64"),
        ("allowed", torch.zeros(2, 4, 2, dtype=INT), "have shape (2, 4, 3), got (2, 4, 2)"),
    ],
)
def test_drafts(sampling, argument, value, rule):
    with raises(f"accept_drafts: {argument} must {rule}"):
        accept(sampling, **{argument: value})


def test_workspaces(sampling):
    size = sampling.sample_workspace(2, V, "cpu").numel()
    small = torch.zeros(size - 1, dtype=torch.uint8)
    rule = f"must have at least {size} bytes, as sample_workspace(2, 70, device) makes, got"
    with raises(f"sample_step: workspace {rule} {size - 1}"):
        step(sampling, workspace=small)
    with raises(f"logprobs: workspace {rule} {size - 1}"):
        ids = torch.zeros(2, dtype=LONG)
        sampling.logprobs(torch.zeros(2, V), ids, workspace=small)
    with raises("accept_drafts: workspace must have at least"):
        accept(sampling, workspace=torch.zeros(size, dtype=torch.uint8))
    with raises("sample_workspace: B must not be negative, got -1"):
        sampling.sample_workspace(-1, V, "cpu")
    with raises("sample_workspace: V must be at least 1, got 0"):
        sampling.sample_workspace(1, 0, "cpu")


@pytest.mark.parametrize(
    "replaced,rule",
    [
        (dict(logits=torch.zeros(2, V).half()), "logits must be float32, got float16"),
        (dict(ids=torch.zeros(3, dtype=LONG)), "ids must have shape (2,), got (3,)"),
        (dict(ids=torch.zeros(2, dtype=INT)), "ids must be int64, got int32"),
        (dict(top_n=21), "top_n must be from 0 to 20, got 21"),
        (dict(top_n=-1), "top_n must be from 0 to 20, got -1"),
        (dict(logits=torch.zeros(2, 3), top_n=4), "top_n must be from 0 to 3, got 4"),
        (
            dict(out=(torch.zeros(2), torch.zeros(2, 2, dtype=LONG), torch.zeros(2, 1))),
            "out[1] must have shape (2, 1), got (2, 2)",
        ),
        (
            dict(out=(torch.zeros(2), torch.zeros(2, 1, dtype=INT), torch.zeros(2, 1))),
            "out[1] must be int64, got int32",
        ),
        (
            dict(out=(torch.zeros(3), torch.zeros(2, 1, dtype=LONG), torch.zeros(2, 1))),
            "out[0] must have shape (2,), got (3,)",
        ),
    ],
)
def test_logprobs(sampling, replaced, rule):
    arguments = dict(logits=torch.zeros(2, V), ids=torch.zeros(2, dtype=LONG), top_n=1) | replaced
    with raises(f"logprobs: {rule}"):
        sampling.logprobs(**arguments)


@pytest.mark.parametrize(
    "replaced,rule",
    [
        (dict(occurrences=torch.zeros(V, dtype=INT)), "occurrences must have shape [B, V]"),
        (dict(occurrences=torch.zeros(2, V)), "occurrences must be int32, got float32"),
        (dict(prompt_ids=torch.zeros(3, 5, dtype=LONG)), "prompt_ids must have shape (2, P)"),
        (dict(prompt_ids=torch.zeros(2, 5)), "prompt_ids must be int64, got float32"),
        (dict(prompt_lengths=torch.zeros(2)), "prompt_lengths must be int32 or int64"),
        (dict(prompt_lengths=torch.zeros(1, dtype=INT)), "prompt_lengths must have shape (2,)"),
    ],
)
def test_record_prompt(sampling, replaced, rule):
    arguments = dict(
        occurrences=torch.zeros(2, V, dtype=INT),
        prompt_ids=torch.zeros(2, 5, dtype=LONG),
        prompt_lengths=torch.zeros(2, dtype=INT),
    )
    with raises(f"record_prompt: {rule}"):
        sampling.record_prompt(**(arguments | replaced))


def test_grad(sampling):
    logits = torch.zeros(2, V, requires_grad=True)
    drafts = torch.zeros(2, 4, V, requires_grad=True)
    with torch.enable_grad():
        with raises("sample_step: has no backward", RuntimeError):
            step(sampling, logits=logits)
        with raises("accept_drafts: has no backward", RuntimeError):
            accept(sampling, logits=drafts)
        with raises("logprobs: has no backward", RuntimeError):
            sampling.logprobs(logits, torch.zeros(2, dtype=LONG))
