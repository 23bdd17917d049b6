"""Which drafts a text gives, and when they are worth a step: on ids alone."""

from __future__ import annotations

import random

import pytest
import torch

from flash_rt.structures.loops import depth
from flash_rt.structures.loops.cache import NO_TOKEN
from flash_rt.structures.loops.depth import MOST, Depth, Yields
from flash_rt.structures.loops.lookup import Lookup, Watch
from flash_rt.structures.loops.repeats import (
    AGEING,
    BEFORE_ALL,
    CONTEXT,
    NEWEST,
    search,
    similarity_weights,
)

SLOTS = 256
NONE = [NO_TOKEN] * (MOST - 1)
PLACES = torch.arange(SLOTS)
WEIGHTS = torch.tensor(similarity_weights(), dtype=torch.int32)


def drafts(ids: list[int], behind: int = 0) -> list[int]:
    """What ``search`` finds for a text, in slots that hold ``behind`` from its end on."""
    text = torch.full((CONTEXT + SLOTS,), behind)
    text[:CONTEXT] = torch.tensor(BEFORE_ALL)
    text[CONTEXT : CONTEXT + len(ids)] = torch.tensor(ids)
    newest = torch.tensor([len(ids) - 1], dtype=torch.int32)
    found = search(text, newest, weights=WEIGHTS, places=PLACES, ramp=PLACES[: MOST - 1])
    return [int(token) for token in found]


def by_definition(ids: list[int]) -> list[int]:
    """The same, from the formulas of ``similarity_weights`` and ``search``."""

    def agreement(place: int) -> int:
        ages = range(min(CONTEXT, place))
        same = (age for age in ages if ids[place - 1 - age] == ids[-1 - age])
        return sum(round(NEWEST * AGEING**age) for age in same)

    best = max(range(1, len(ids)), key=lambda place: (agreement(place), place), default=0)
    if best == 0 or agreement(best) < NEWEST:
        return NONE
    return [ids[best + j % (len(ids) - best)] for j in range(MOST - 1)]


def test_weights_fall_with_age() -> None:
    assert similarity_weights() == [82, 118, 168, 240, 343, 490, 700, 1000]


def test_drafts_are_what_followed() -> None:
    assert drafts([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]) == [3, 4, 5, 6, 7, 8, 9]


def test_drafts_run_into_themselves() -> None:
    assert drafts([8, 1, 2, 3, 1, 2, 3]) == [1, 2, 3, 1, 2, 3, 1]
    assert drafts([5, 5]) == [5] * 7


def test_of_equals_the_latest_is_followed_and_a_longer_match_before_it() -> None:
    assert drafts([1, 2, 50, 3, 1, 2, 60, 4, 1, 2])[0] == 60
    assert drafts([1, 2, 3, 4, 50, 9, 3, 4, 60, 1, 2, 3, 4])[0] == 50


@pytest.mark.parametrize("replaced", [[30], [30, 31], [30, 31, 32]])
def test_a_copy_goes_on_behind_replaced_tokens(replaced: list[int]) -> None:
    source = list(range(1, 20))
    kept = len(replaced)
    edited = [*source[:8], *replaced]
    ids = [*source, 90, *edited]
    wanted = source[8 + kept : 8 + kept + 7]
    assert drafts(ids) == (wanted if kept < 3 else NONE)
    # One more token of the copy is enough, however many were replaced before it.
    assert drafts([*ids, wanted[0]]) == source[9 + kept : 16 + kept]


@pytest.mark.parametrize("ids", [[1], [1, 2], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [0, 1]])
def test_nothing_that_repeats_gives_no_drafts(ids: list[int]) -> None:
    assert drafts(ids) == NONE


def test_what_lies_behind_the_text_is_not_looked_at() -> None:
    for behind in (0, 1, 2, 3):
        assert drafts([1, 2, 3], behind) == NONE
        assert drafts([1, 2, 3, 1], behind) == [2, 3, 1, 2, 3, 1, 2]


def test_every_search_is_by_the_definition() -> None:
    draw = random.Random(1)
    for count in (*range(1, 24), 100, SLOTS - 1, SLOTS):
        for kinds in (2, 5, 40):
            ids = [draw.randrange(kinds) for _ in range(count)]
            assert drafts(ids) == by_definition(ids)


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
        found = drafts([*prompt, *answer[:done]])[:count] if count else []
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
