"""Which drafts a text gives, and when they are worth a step: on ids alone."""

from __future__ import annotations

import random

import torch

from flash_rt.structures import kernels
from flash_rt.structures.loops import depth
from flash_rt.structures.loops.depth import Depth, Yields
from flash_rt.structures.loops.lookup import Lookup, Watch


def drafts(ids: list[int], count: int) -> list[int]:
    """What the device finds for a text."""
    out = torch.zeros(1, count, dtype=torch.int64)
    none, last = torch.zeros(1, dtype=torch.int32), torch.tensor([len(ids) - 1], dtype=torch.int32)
    sampling = kernels.family("sampling")
    sampling.lookup_drafts(torch.tensor([ids]), out.new_zeros(1, 0), none, last, out=out)
    return [int(token) for token in out[0]]


def test_a_lookup_finds_what_followed_and_follows_it() -> None:
    lookup = Lookup([1, 2, 3, 4, 5, 6, 9, 1, 2])
    assert lookup.draft(3) == [3, 4, 5]
    assert lookup.strength == 2
    lookup.add(3)
    assert lookup.strength == 3 and lookup.draft(2) == [4, 5]
    lookup.add(7)
    assert lookup.strength == 0 and lookup.draft(4) == []
    lookup.add(9)
    assert lookup.strength == 1 and lookup.draft(2) == [1, 2]


def test_a_lookup_runs_into_its_own_drafts_and_prefers_the_longer_match() -> None:
    assert Lookup([8, 1, 2, 3, 1, 2, 3]).draft(7) == [1, 2, 3, 1, 2, 3, 1]
    lookup = Lookup([1, 2, 3, 4, 50, 9, 3, 4, 60, 1, 2, 3, 4])
    assert lookup.draft(1) == [50] and lookup.strength == 4


def decode(prompt: list[int], answer: list[int], yields: Yields) -> tuple[int, int, float]:
    """Plain steps, verifications and their cost in plain steps, one step ahead of the host."""
    watch = Watch(prompt, yields)
    costs = {1: 1.0, **depth.FIRST_COSTS}
    flying, done, made = (0, answer[:1]), 1, [0, 0]
    spent = 0.0
    while done < len(answer):
        count = watch.choose(len(answer) - done - 1, in_flight=1)
        watch.took(flying[1], flying[0], costs[flying[0] + 1])
        found = drafts([*prompt, *answer[:done]], count) if count else []
        right = 0
        while right < count and found[right] == answer[done + right]:
            right += 1
        flying = (count, answer[done : done + right + 1])
        made[count > 0] += 1
        spent += costs[count + 1]
        done += right + 1
    return made[0], made[1], spent


def test_a_copy_takes_an_eighth_of_the_steps() -> None:
    source = list(range(100, 180))
    plain, verified, spent = decode([1, *source, 2], source, Yields())
    assert plain <= 2
    assert verified <= 12  # seven drafts and one token of its own each
    assert 79 / spent > 4.5


def test_an_edited_copy_is_taken_up_behind_every_edit() -> None:
    source = [100 + i if i % 16 else 7 for i in range(80)]
    answer = [token if token != 7 else 8 for token in source]
    yields = Yields()
    _, _, spent = decode([1, *source, 2], answer, yields)
    assert 79 / spent > 2.5
    again = decode([1, *source, 2], answer, yields)
    assert again[2] <= spent * 1.05


def test_text_that_does_not_repeat_is_decoded_plainly() -> None:
    draw = random.Random(2)
    answer = [draw.randrange(10**6) for _ in range(100)]
    assert decode([1, 2, 3], answer, Yields())[1] == 0


def test_drafts_that_mislead_are_given_up() -> None:
    draw = random.Random(3)
    # Every token has come before, and what follows it is another one each time.
    answer = [draw.randrange(12) for _ in range(150)]
    yields = Yields()
    for _ in range(3):
        plain, verified, spent = decode([1, 2, 3], answer, yields)
    assert plain > 4 * verified
    assert 149 / spent > 0.93


def test_a_watch_learns_of_plain_steps_too() -> None:
    yields = Yields()
    for _ in range(200):
        yields.saw(1, 0, wide=False)
        yields.saw(2, 0, wide=False)
    assert yields.choose(2, 7, wide=False) == 0
    source = list(range(100, 150))
    for _ in range(30):
        watch = Watch([*source, 1, *source[:2]], yields)
        for token in source[2:12]:
            watch.choose(0, in_flight=0)  # no room: plain
            watch.took([token], 0, None)
    assert yields.choose(2, 7, wide=False) == 7


def test_yields_keep_steps_behind_a_verification_apart() -> None:
    yields = Yields()
    for _ in range(100):
        yields.saw(4, 7, wide=False)
        yields.saw(4, 0, wide=True)
    assert yields.choose(4, 7, wide=False) == 7
    assert yields.choose(4, 6, wide=False) == 3
    assert yields.choose(4, 0, wide=False) == 0
    assert yields.choose(4, 7, wide=True) == 0
    assert yields.choose(40, 7, wide=True) == yields.choose(depth.STRONGEST, 7, wide=True)


def test_depth_follows_truth_and_cost() -> None:
    costs = Depth()
    costs.took(1, 1.0)
    for width in depth.WIDTHS * 20:
        costs.took(width, 1.2)
    for _ in range(60):
        costs.saw_verified(7, 7)
    assert [costs.choose(room) for room in (20, 5, 1, 0)] == [7, 3, 1, 0]
    for _ in range(100):
        costs.saw_verified(7, 0)
    assert costs.choose(20) == 0
    for _ in range(100):
        costs.saw_verified(1, 1)
    assert costs.choose(20) > 0
    for width in depth.WIDTHS:
        for _ in range(100):
            costs.took(width, 20.0)
    assert costs.choose(20) == 0
    for _ in range(2000):
        costs.took(1, 1.0)
    assert costs.choose(20) > 0


def test_a_single_odd_time_decides_nothing() -> None:
    costs = Yields()
    for _ in range(20):
        costs.took(1, 1.0)
        for width in depth.WIDTHS:
            costs.took(width, 1.3)
    costs.took(8, 3.0)
    costs.took(1, 1000.0)
    assert 1.0 <= costs.cost(8) < 1.7
    assert costs.choose(12, 20, wide=False) == 7
    assert costs.cost(2) >= 1.0
