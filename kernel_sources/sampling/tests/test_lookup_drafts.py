"""lookup_drafts: its definition, and what it is good for."""

import random
import sys

import pytest
import torch
from _common.family import replayed, write_late
from lookup_cases import WEIGHTS, arguments_of, by_definition

NONE = [-1] * 7


def drafts(sampling, device, texts, prompts=None, count=7, behind=0):
    prompts = [max(len(text) - 2, 1) for text in texts] if prompts is None else prompts
    out = torch.full((len(texts), count), -9, device=device)
    arguments = arguments_of(texts, prompts, device, behind)
    assert sampling.lookup_drafts(*arguments, out=out) is None
    return out.tolist()


def test_weights_fall_with_age(sampling):
    reference = sys.modules[f"{sampling.__name__}.reference"]
    assert list(reference.LOOKUP_WEIGHTS) == WEIGHTS


def test_what_followed(sampling, device):
    source = list(range(1, 10))
    texts = [[*source, 1, 2], [8, 1, 2, 3, 1, 2, 3], [5, 5]]
    wanted = [[3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 1, 2, 3, 1], [5] * 7]
    assert drafts(sampling, device, texts) == wanted


def test_the_latest_of_equals_behind_a_longer_match(sampling, device):
    texts = [[1, 2, 50, 3, 1, 2, 60, 4, 1, 2], [1, 2, 3, 4, 50, 9, 3, 4, 60, 1, 2, 3, 4]]
    assert [found[0] for found in drafts(sampling, device, texts)] == [60, 50]


@pytest.mark.parametrize("replaced", [[30], [30, 31], [30, 31, 32]])
def test_a_copy_goes_on_behind_replaced_tokens(sampling, device, replaced):
    source = list(range(1, 20))
    text = [*source, 90, *source[:8], *replaced]
    ahead = source[8 + len(replaced) :]
    found = drafts(sampling, device, [text, [*text, ahead[0]]])
    assert found == [ahead[:7] if len(replaced) < 3 else NONE, ahead[1:8]]


@pytest.mark.parametrize("text", [[1], [1, 2], [*range(10)], [0, 1]])
def test_nothing_that_repeats(sampling, device, text):
    for prompt in range(len(text) + 1):
        assert drafts(sampling, device, [text], [prompt]) == [NONE]


def test_what_lies_behind_the_text_is_not_looked_at(sampling, device):
    for behind in range(5):
        assert drafts(sampling, device, [[1, 2, 3]], behind=behind) == [NONE]
        assert drafts(sampling, device, [[1, 2, 3, 1]], behind=behind) == [[2, 3, 1, 2, 3, 1, 2]]


def test_the_definition(sampling, device):
    pick = random.Random(1)
    for kinds in (2, 5, 40):
        sizes = [*range(1, 24), 511, 512, 513, 514, 1200]
        texts = [[pick.randrange(kinds) for _ in range(size)] for size in sizes]
        prompts = [pick.randint(0, size) for size in sizes]
        for count in (0, 1, 7, 512):
            wanted = [by_definition(text, count) for text in texts]
            assert drafts(sampling, device, texts, prompts, count) == wanted


@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_a_text_that_fills_its_tensors(sampling, device, size):
    text = [3, 4] * size
    for prompt in range(2 * size + 1):
        given = torch.tensor([text], device=device)
        counts = torch.tensor([2 * size - prompt], dtype=torch.int32, device=device)
        lengths = torch.tensor([2 * size - 1], dtype=torch.int32, device=device)
        out = torch.zeros(1, 20, dtype=torch.int64, device=device)
        parts = given[:, :prompt], given[:, prompt:]
        sampling.lookup_drafts(*parts, counts, lengths, out=out)
        assert out.tolist() == [by_definition(text, 20)]


def test_opcheck(sampling, device):
    ops = sys.modules[f"{sampling.__name__}.ops"].ops
    arguments = arguments_of([[1, 2, 1], [3]], [2, 1], device)
    out = torch.zeros(2, 3, dtype=torch.int64, device=device)
    torch.library.opcheck(ops.lookup_drafts, (*arguments, out))


@pytest.mark.parametrize(
    "argument,value,rule",
    [
        ("out", torch.zeros(2), "have shape [B, N] with N at most 512, got (2,)"),
        ("out", torch.zeros(2, 513), "have shape [B, N] with N at most 512, got (2, 513)"),
        ("out", torch.zeros(2, 7), "be int64, got float32"),
        ("out", torch.zeros(2, 8).long()[:, ::2], "be contiguous, got strides (8, 2)"),
        ("prompt", torch.zeros(9).long(), "have shape [B, S], got (9,)"),
        ("prompt", torch.zeros(3, 9).long(), "have shape (2, 9), got (3, 9)"),
        ("tokens", torch.zeros(2, 9).int(), "be int64, got int32"),
        ("tokens", torch.zeros(2, 9).long()[:, ::2], "have unit stride"),
        ("tokens", torch.zeros(2, 9, device="meta").long(), "be on cpu, got meta"),
        ("counts", torch.zeros(2).long(), "be int32, got int64"),
        ("lengths", torch.zeros(3).int(), "have shape (2,), got (3,)"),
    ],
)
def test_errors(sampling, argument, value, rule):
    names = ("prompt", "tokens", "counts", "lengths")
    given = dict(zip(names, arguments_of([[1, 2], [1]], [1, 1], "cpu"), strict=True))
    given["out"] = torch.zeros(2, 7).long()
    given[argument] = value
    with pytest.raises(ValueError) as raised:
        sampling.lookup_drafts(**given)
    assert str(raised.value).startswith(f"lookup_drafts: {argument} must {rule}")


def test_replay_and_inputs_in_flight(sampling, cuda):
    text = [1, 2, 3, 4, 1, 2]
    arguments = arguments_of([text], [4], cuda)
    out = torch.zeros(1, 7, dtype=torch.int64, device=cuda)
    replayed(lambda: sampling.lookup_drafts(*arguments, out=out))
    wanted = [by_definition(text, 7)]
    assert out.tolist() == wanted
    for index in range(4):
        late = [tensor.clone() for tensor in arguments]
        late[index].zero_()
        torch.cuda.synchronize()
        write_late(late[index], arguments[index])
        sampling.lookup_drafts(*late, out=out)
        assert out.tolist() == wanted
