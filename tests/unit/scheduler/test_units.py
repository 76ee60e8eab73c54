"""The blocks of units: who needs them, what is idle, and in which order it is given up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvdock.errors import ArgumentValueError, IntegrityError
from kvdock.layers import KeepAll, KeepState, KeepWindow
from kvdock.scheduler.units import UnitBlocks
from kvdock.scheduler.units_integrity import check_units
from kvdock_conformance.checking.group_engine import group_of as group

FULL, WINDOW, STATE = group(KeepAll(), 4), group(KeepWindow(4), 2), group(KeepState(), 1)
NO_STATES = np.empty(0, dtype=np.int32)


def made(*groups: object, num_blocks: int = 40, null_block: bool = False) -> UnitBlocks:
    return UnitBlocks(groups, num_blocks, 16, null_block=null_block)  # type: ignore[arg-type]


def units_of(units: UnitBlocks, count: int) -> list[int]:
    """Take units with their blocks, as a sequence does."""
    ids = units.ids.allocate(count)
    units.add(ids)
    found: list[int] = ids.tolist()
    return found


def places(units: UnitBlocks, unit: int, *columns: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    return np.array([unit * units.table.shape[1] + column for column in columns], dtype=np.intp)


def as_ids(*units: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(units, dtype=np.int32)


def check(units: UnitBlocks, needs: Sequence[np.ndarray[tuple[int], np.dtype[np.intp]]] = (), states: object = NO_STATES) -> None:
    check_units(units, np.concatenate([np.empty(0, dtype=np.intp), *needs]), states)  # type: ignore[arg-type]


def test_a_unit_is_so_many_tokens_that_blocks_of_all_groups_end_together() -> None:
    units = made(group(KeepAll(), 6), group(KeepWindow(3), 4), STATE)
    assert (units.num_tokens, units.widths, units.starts) == (12, (2, 3, 1), (0, 2, 5))
    assert (units.per_unit, units.num_lasting, units.states.tolist()) == (5, 2, [5])
    assert units.passing.tolist() == [False, False, True, True, True, True]
    assert made(STATE).num_tokens == 16, "where nothing keeps tokens, what the caller says"


def test_each_unit_has_blocks_of_its_own_and_no_state() -> None:
    units = made(FULL, WINDOW, STATE)
    one, other = units_of(units, 2)
    assert (units.table[[one, other], :3] >= 0).all()
    assert np.unique(units.table[[one, other], :3]).size == 6
    assert (units.table[[one, other], 3] == -1).all()
    assert units.blocks.num_used == 6
    check(units)
    units.ids.release([one, other])
    assert units.blocks.num_used == 0
    assert (units.table == -1).all()
    check(units)


def test_what_nobody_needs_goes_at_once_where_it_is_not_cached() -> None:
    units = made(FULL, WINDOW)
    (unit,) = units_of(units, 1)
    both = places(units, unit, 1, 2)
    units.hold(both)
    units.hold(both[:1])
    check(units, [both, both[:1]])
    units.unhold(both)
    assert (units.table[unit] >= 0).tolist() == [True, True, False]
    units.unhold(both[:1])
    assert (units.table[unit] >= 0).tolist() == [True, False, False]
    assert (units.blocks.num_used, units.num_idle) == (1, 0)
    check(units)


def test_two_that_let_go_of_one_block_at_once_free_it_once() -> None:
    units = made(FULL, WINDOW)
    (unit,) = units_of(units, 1)
    for _ in range(2):
        units.hold(places(units, unit, 1))
    units.unhold(places(units, unit, 1, 1))
    assert units.blocks.num_used == 2
    check(units)


def test_what_is_cached_waits_and_what_was_let_go_longest_ago_goes_first() -> None:
    units = made(FULL, WINDOW)
    first, second, third = units_of(units, 3)
    for unit in (first, second, third):
        units.hold(places(units, unit, 1, 2))
    units.cache(as_ids(first, second, third))
    assert units.num_idle == 0
    for unit in (second, first, third):
        units.unhold(places(units, unit, 1, 2))
    assert units.num_idle == 6
    check(units)
    units.drop(3, ends=False)
    assert [(units.table[unit, 1:] >= 0).tolist() for unit in (first, second, third)] == [[False, True], [False, False], [True, True]]
    units.hold(places(units, first, 2))
    units.unhold(places(units, first, 2))  # in use again: it goes last now
    units.drop(2, ends=False)
    assert [(units.table[unit, 1:] >= 0).tolist() for unit in (first, third)] == [[False, True], [False, False]]
    assert units.num_idle == 1
    check(units)


def test_where_prompts_end_is_given_up_by_itself() -> None:
    units = made(FULL, WINDOW)
    first, second = units_of(units, 2)
    units.mark_ends(as_ids(first))
    units.cache(as_ids(first, second))
    units.drop(100, ends=False)
    assert [(units.table[unit, 1:] >= 0).all() for unit in (first, second)] == [True, False]
    units.drop(100, ends=True)
    assert not (units.table[[first, second], 1:] >= 0).any()
    check(units)


def test_a_unit_that_is_cached_no_longer_keeps_what_is_needed() -> None:
    units = made(FULL, WINDOW)
    (unit,) = units_of(units, 1)
    units.hold(places(units, unit, 1))
    units.cache(as_ids(unit))
    assert units.num_idle == 1
    units.uncache(as_ids(unit))
    assert (units.table[unit] >= 0).tolist() == [True, True, False]
    assert units.num_idle == 0
    check(units, [places(units, unit, 1)])
    units.unhold(places(units, unit, 1))
    units.ids.release([unit])
    assert units.blocks.num_used == 0


def test_a_unit_that_is_somebody_elses_by_now_waits_no_more() -> None:
    """A sequence that has just got room needs none of it yet."""
    units = made(FULL, WINDOW)
    (unit,) = units_of(units, 1)
    units.cache(as_ids(unit))
    units.uncache(as_ids(unit))
    units.ids.release([unit])
    assert units_of(units, 1) == [unit]
    units.drop(10, ends=False)
    assert (units.table[unit] >= 0).all()
    assert units.idle_of(places(units, unit, 1, 2)) == 0
    check(units)


def test_a_cached_unit_gets_what_it_lacks_from_an_equal_one() -> None:
    units = made(FULL, WINDOW)
    cached, own = units_of(units, 2)
    units.cache(as_ids(cached))
    units.drop(1, ends=False)
    lacking, given = int(np.flatnonzero(units.table[cached] < 0)[0]), units.table[own].copy()
    units.replace(as_ids(own), as_ids(cached))
    assert units.table[cached, lacking] == given[lacking]
    assert (units.table[own] >= 0).tolist() == [column != lacking for column in range(3)], "the others are released with the unit"
    assert units.num_idle == 2
    check(units)


def test_a_copy_has_no_blocks_that_its_source_has_not() -> None:
    units = made(FULL, WINDOW)
    source, copy = units_of(units, 2)
    units.hold(places(units, source, 1))
    units.unhold(places(units, source, 1))
    pairs = units.copies(np.array([[source, copy]]))
    assert pairs.tolist() == [[units.table[source, column], units.table[copy, column]] for column in (0, 2)]
    assert units.table[copy, 1] == -1
    check(units)


def test_a_checkpoint_goes_with_its_unit_or_before_it() -> None:
    units = made(FULL, STATE, STATE)
    (unit,) = units_of(units, 1)
    units.cache(as_ids(unit))
    states = units.blocks.allocate(2)
    assert units.attach(unit, states)
    assert units.num_idle == 2
    other = units.blocks.allocate(2)
    assert not units.attach(unit, other), "it has one, and what was offered stays the caller's"
    units.blocks.release(other)
    check(units)
    units.drop(1, ends=False)
    assert (units.table[unit, 1:] >= 0).sum() == 1
    units.uncache(as_ids(unit))
    units.ids.release([unit])
    assert units.blocks.num_used == 0
    check(units)


def test_a_checkpoint_of_which_a_part_was_given_up_is_none() -> None:
    """The part that is left is given back when another takes its place, and counts as no checkpoint until then."""
    units = made(FULL, STATE, STATE)
    (unit,) = units_of(units, 1)
    units.cache(as_ids(unit))
    units.attach(unit, units.blocks.allocate(2))
    units.drop(1, ends=False)
    states = units.blocks.allocate(2)
    assert units.attach(unit, states)
    assert units.table[unit, 1:].tolist() == states.tolist()
    assert (units.num_idle, units.blocks.num_used) == (2, 3)
    check(units)


def test_a_checkpoint_can_be_taken_back_by_the_only_one_who_needs_it() -> None:
    units = made(FULL, STATE)
    (unit,) = units_of(units, 1)
    units.cache(as_ids(unit))
    state = units.blocks.allocate(1)
    units.attach(unit, state)
    place = places(units, unit, 1)
    units.hold(place)
    assert units.is_needed_once(place)
    units.hold(place)
    assert not units.is_needed_once(place)
    units.unhold(place)
    units.detach(place)
    assert (units.table[unit, 1], units.num_idle, units.blocks.num_used) == (-1, 0, 2)
    check(units, states=state)


def test_a_unit_that_somebody_needs_cannot_be_freed() -> None:
    units = made(FULL, WINDOW)
    (unit,) = units_of(units, 1)
    units.hold(places(units, unit, 2))
    with pytest.raises(IntegrityError, match="no sequence that needs a unit without holders"):
        units.ids.release([unit])


def test_the_queue_does_not_grow_with_what_comes_and_goes() -> None:
    units = made(FULL, WINDOW)
    (unit,) = units_of(units, 1)
    units.cache(as_ids(unit))
    both = places(units, unit, 1, 2)
    for _ in range(20_000):
        units.hold(both)
        units.unhold(both)
    assert sum(entry[0].size for queue in units._idle for entry in queue) < 10_000
    assert units.waiting() == set(both.tolist())
    units.drop(5, ends=False)
    assert units.num_idle == 0
    check(units)


def test_there_are_numbers_for_long_sequences_where_nothing_lasts() -> None:
    assert made(WINDOW, num_blocks=10).ids.num_blocks == 640
    assert made(FULL, WINDOW, num_blocks=10).ids.num_blocks == 10
    assert made(group(KeepAll(), 2), group(KeepAll(), 4), num_blocks=10).ids.num_blocks == 3, "each has three blocks"


def test_the_null_block_is_nobodys() -> None:
    units = made(FULL, null_block=True, num_blocks=5)
    assert units.null_block == 0
    assert 0 not in units.table[units_of(units, 4)]
    check(units)


def test_more_slots_than_there_are_numbers_for_are_refused_before_memory_is_taken() -> None:
    with pytest.raises(ArgumentValueError, match="CacheManager: num_blocks: expected at most"):
        made(group(KeepAll(), 512), WINDOW, num_blocks=2**23)
