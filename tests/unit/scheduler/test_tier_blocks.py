"""What one tier holds, and what goes first."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdock.errors import IntegrityError
from kvdock.scheduler import NumberTier
from kvdock.scheduler.tier_blocks import TierBlocks, Turns
from opskit import PROPERTY

FREE = np.zeros(50, dtype=np.bool_)
ONE_EACH = np.ones(50, dtype=np.int64)


def units(*numbers: int) -> Any:
    return np.array(numbers, dtype=np.intp)


def popped(turns: Turns, missing: int, priority: int = 9, counts: Any = ONE_EACH, held: Any = FREE) -> list[tuple[list[int], int]]:
    return [(found.tolist(), value) for found, value in turns.pop(counts, missing, priority, held)]


def test_what_came_first_goes_first() -> None:
    turns = Turns(50)
    turns.push(units(4, 5, 6), 0)
    turns.push(units(1, 2), 0)
    assert popped(turns, 4) == [([4, 5, 6, 1], 0)]
    assert turns.waiting().tolist() == [2]
    assert popped(turns, 4) == [([2], 0)]
    assert popped(turns, 4) == []


def test_what_is_pushed_again_is_as_new() -> None:
    turns = Turns(50)
    turns.push(units(1, 2, 3), 0)
    turns.push(units(1), 0)
    assert turns.waiting().tolist() == [1, 2, 3]
    assert popped(turns, 2) == [([2, 3], 0)]
    turns.push(units(7), 0)
    turns.remove(units(1))
    assert popped(turns, 5) == [([7], 0)]


def test_the_lowest_priority_goes_first_whenever_it_came() -> None:
    turns = Turns(50)
    turns.push(units(1, 2), 5)
    turns.push(units(3), 0)
    turns.push(units(4), 5)
    assert popped(turns, 1) == [([3], 0)]
    assert popped(turns, 9, priority=4) == [], "not for what has a lower one"
    assert popped(turns, 9, priority=5) == [([1, 2, 4], 5)]


def test_a_unit_is_of_one_priority_the_last() -> None:
    turns = Turns(50)
    turns.push(units(1), 5)
    turns.push(units(1), 2)
    assert popped(turns, 9, priority=2) == [([1], 2)]
    assert turns.waiting().size == 0
    assert popped(turns, 9) == []


def test_what_is_held_stays_where_it_was() -> None:
    turns, held = Turns(50), FREE.copy()
    turns.push(units(1, 2, 3, 4), 0)
    held[[1, 3]] = True
    assert popped(turns, 2, held=held) == [([2, 4], 0)]
    assert popped(turns, 1) == [([1], 0)]
    assert popped(turns, 9, held=held) == []
    assert turns.waiting().tolist() == [3]


def test_blocks_are_counted_and_not_units() -> None:
    turns, counts = Turns(50), ONE_EACH.copy()
    counts[[1, 2, 3]] = 3, 2, 4
    turns.push(units(1, 2, 3), 0)
    assert popped(turns, 4, counts=counts) == [([1, 2], 0)]
    assert popped(turns, 4, counts=counts) == [([3], 0)]


def test_entries_that_do_not_count_are_dropped() -> None:
    turns = Turns(50)
    for _ in range(2000):
        turns.push(units(*range(20)), 0)
    assert turns._size <= 2 * 20 + 4096
    assert turns.waiting().tolist() == list(range(20))
    turns.clear()
    assert (turns._size, popped(turns, 3)) == (0, [])


@settings(PROPERTY, max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_turns_against_a_list(seed: int) -> None:
    rng, turns = random.Random(seed), Turns(50)  # noqa: S311 - nothing secret
    order: list[tuple[int, int]] = []  # unit and priority, what came first before the rest
    for _ in range(60):
        chosen = rng.sample(range(50), rng.randint(1, 6))
        action, priority = rng.random(), rng.randrange(3)
        if action < 0.5:
            turns.push(units(*chosen), priority)
            order = [each for each in order if each[0] not in chosen] + [(unit, priority) for unit in chosen]
        elif action < 0.6:
            turns.remove(units(*chosen))
            order = [each for each in order if each[0] not in chosen]
        else:
            held, missing = FREE.copy(), rng.randint(1, 8)
            held[chosen] = True
            may = sorted((each for each in order if each[1] <= priority and not held[each[0]]), key=lambda each: each[1])[:missing]
            found = turns.pop(ONE_EACH, missing, priority, held)
            assert [(unit, value) for part, value in found for unit in part.tolist()] == may
            order = [each for each in order if each not in may]
        assert turns.waiting().tolist() == sorted(unit for unit, _ in order)


def level(columns: int = 2) -> TierBlocks:
    return TierBlocks(NumberTier(10), 20, columns)


def test_units_have_blocks_in_columns() -> None:
    one = level()
    assert one.places(units(3, 5)).tolist() == [6, 7, 10, 11]
    one.put(units(6, 7, 11), one.blocks.allocate(3))
    one.turns.push(units(3, 5), 0)
    assert one.table[[3, 5]].tolist() == [[0, 1], [-1, 2]]
    assert one.counts[[3, 5]].tolist() == [2, 1]
    one.check_integrity(np.arange(20, dtype=np.int32))
    one.drop(units(3, 7))
    assert (one.blocks.num_used, one.counts[3], one.table[3].tolist()) == (1, 0, [-1, -1])
    assert one.turns.waiting().tolist() == [5]
    one.check_integrity(np.array([5], dtype=np.int32))
    one.clear()
    one.check_integrity(np.array([], dtype=np.int32))
    assert one.usage == (type(one.usage))(num_blocks=10, used=0, stored=3, loaded=0, lost=0)


def test_with_one_column_a_place_is_a_unit() -> None:
    one = level(columns=1)
    one.put(units(3, 5), one.blocks.allocate(2))
    one.turns.push(units(3, 5), 0)
    assert one.places(units(3, 5)).tolist() == [3, 5]
    assert one.counts.sum() == 2
    one.check_integrity(np.array([3, 5], dtype=np.int32))


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda one: one.table.__setitem__((4, 0), 0), "each block free, or of one unit"),
        (lambda one: one.blocks.allocate(1), "each block free, or of one unit"),
        (lambda one: one.turns.remove(units(3)), "one turn for each unit with blocks"),
        (lambda one: one.turns.push(units(9), 0), "one turn for each unit with blocks"),
        (lambda one: one.counts.__setitem__(3, 7), "as many blocks of each unit as are counted"),
    ],
)
def test_what_is_wrong_in_a_tier_is_said(spoil: Any, text: str) -> None:
    one = level()
    one.put(units(6, 7), one.blocks.allocate(2))
    one.turns.push(units(3), 0)
    spoil(one)
    with pytest.raises(IntegrityError, match=rf"NumberTier\(num_blocks=10\): .*{text}"):
        one.check_integrity(np.arange(20, dtype=np.int32))


def test_blocks_of_what_cannot_be_found_are_wrong() -> None:
    one = level()
    one.put(units(6), one.blocks.allocate(1))
    one.turns.push(units(3), 0)
    with pytest.raises(IntegrityError, match="blocks of units that can be found"):
        one.check_integrity(np.array([2], dtype=np.int32))
