"""What sequences of several layer groups need, what can be had beside it and its promises, and where one can go on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from kvdock.errors import ArgumentValueError, IndexRangeError, OutOfBlocksError, StaleHandleError
from kvdock.layers import KeepAll, KeepChunk, KeepState, KeepWindow
from kvdock.scheduler import CacheManager, CacheSequence
from kvdock.scheduler.grouped_blocks import GroupedBlocks
from kvdock_conformance.checking.group_engine import GROUPED
from kvdock_conformance.checking.group_engine import group_of as group
from support_group_model import Engine

FULL, WINDOW, STATE = group(KeepAll(), 4), group(KeepWindow(8), 2), group(KeepState(), 1)
SINKS, CHUNK = group(KeepWindow(5, sinks=3), 2), group(KeepChunk(8), 4)
UNLIKE = (group(KeepAll(), 6), group(KeepWindow(5), 2), group(KeepWindow(9), 3))
MODELS = {
    "full and a window": (FULL, WINDOW),
    "sinks": (FULL, SINKS),
    "chunks": (FULL, CHUNK),
    "unlike blocks": UNLIKE,
    "a window alone": (WINDOW,),
}


def manager_of(*groups: Any, num_blocks: int = 200, **how: Any) -> CacheManager:
    return CacheManager(num_blocks, groups=groups, **how)


def pool_of(manager: CacheManager) -> GroupedBlocks:
    pool = manager._pool
    assert isinstance(pool, GroupedBlocks)
    return pool


def run(manager: CacheManager, length: int, at_most: int = 5, first: int = 0) -> CacheSequence:
    """Compute so many tokens in chunks."""
    seq = manager.begin(range(first, first + length), at_most=at_most)
    while True:
        manager.commit(seq, [], computed=seq.num_tokens)
        if seq.num_tokens >= length:
            return seq
        manager.extend(seq, min(at_most, length - seq.num_tokens))


def can(manager: CacheManager, units: list[int], count: int) -> bool:
    """Say whether all is there that is read behind a number of tokens, and what the rest of their last unit is written to."""
    pool, size = pool_of(manager), manager.block_size
    column = 0
    for of in pool.units.groups:
        if of.retention.is_state:
            column += 1
            continue
        touched = {position for span in of.retention.spans(count) for position in span} | {*range(count, -(-count // size) * size)}
        for position in touched:
            if pool.units.table[units[position // size], column + position % size // of.block_size] < 0:
                return False
        column += size // of.block_size
    return True


def needs_of(manager: CacheManager, seq: CacheSequence, written: int) -> Counter[int]:
    """Return the places of what a sequence needs, of groups that let something go."""
    pool, size = pool_of(manager), manager.block_size
    units, columns, found, column = seq._rows.blocks(seq._row).tolist(), pool.units.table.shape[1], Counter[int](), 0
    for of in pool.units.groups:
        if of.retention.is_state:
            column += 1
            continue
        read = {position for span in of.retention.spans(written) for position in span} | {*range(written, len(units) * size)}
        if not of.retention.keeps_all:
            found.update({units[at // size] * columns + column + at % size // of.block_size for at in read})
        column += size // of.block_size
    return found


def check_needs(manager: CacheManager, written: dict[CacheSequence, int]) -> None:
    """Compare what is counted with the sum of what each sequence needs."""
    pool, total = pool_of(manager), Counter[int]()
    for seq, count in written.items():
        each = needs_of(manager, seq, count)
        assert Counter(pool.needs.of_row(seq._row).tolist()) == each
        total += each
    counted = pool.units.needs.reshape(-1)
    assert {int(at): int(counted[at]) for at in np.flatnonzero(counted)} == dict(total)
    assert Counter(pool.needs.of_all().tolist()) == total
    assert all(pool.units.table.reshape(-1)[place] >= 0 for place in total)
    manager.check_integrity()


# What rows need.


@pytest.mark.parametrize("prefix", ["naive", "radix"])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_needed_follows_from_what_is_computed(name: str, prefix: str) -> None:
    manager = manager_of(*MODELS[name], prefix=prefix)
    one, other = manager.begin(range(3)), manager.begin(range(100, 117))
    check_needs(manager, {one: 0, other: 0})
    manager.commit(other, [], computed=17)
    done, next_id = 0, 3
    for n in (0, 1, 2, 1, 5, 12, 1, 7):
        manager.extend(one, n)  # what it needs of new units is told when it is committed
        done += n + (0 if done else 3)  # first the three of the prompt
        manager.commit(one, list(range(next_id, next_id + n)), computed=done)
        next_id += n
        check_needs(manager, {one: done, other: 17})
    manager.finish(other)
    check_needs(manager, {one: done})
    manager.finish(one)
    check_needs(manager, {})


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_a_batch_that_share_their_units_count_each(name: str) -> None:
    manager = manager_of(*MODELS[name], prefix="naive")
    seq = run(manager, 14)
    forks = [manager.fork(seq), manager.fork(seq)]
    check_needs(manager, {seq: 14, forks[0]: 14, forks[1]: 14})
    manager.extend([seq, *forks], [1, 9, 20])
    manager.commit([seq, *forks], [[1], list(range(9)), list(range(20))], computed=[15, 23, 34])
    check_needs(manager, {seq: 15, forks[0]: 23, forks[1]: 34})
    manager.abort(seq)
    check_needs(manager, {forks[0]: 23, forks[1]: 34})


@pytest.mark.parametrize("name", MODELS)
def test_what_is_cut_is_needed_no_more_and_what_comes_again_is(name: str) -> None:
    manager = manager_of(*MODELS[name])
    seq = run(manager, 30)
    lowest = seq.shortest
    for length in range(29, lowest - 1, -1):
        manager.truncate(seq, length)
        check_needs(manager, {seq: length})
    assert lowest < 30


def test_a_sequence_that_goes_on_behind_units_needs_the_last_of_them() -> None:
    manager = manager_of(FULL, SINKS)
    needs, columns = pool_of(manager).needs, 3
    units = np.array([5, 9, 2, 7], dtype=np.int32)  # 16 tokens: sinks in 0 to 3, the window from 12 on
    assert sorted(needs.of_units(units).tolist()) == sorted([5 * columns + 1, 5 * columns + 2, 7 * columns + 1, 7 * columns + 2])
    assert needs.last_of(units).tolist() == [5, 7]
    assert needs.of_units(units[:0]).size == 0
    assert needs.last_of(units[:0]).size == 0
    assert sorted(needs.of_units(units[:1]).tolist()) == [16, 17]


def test_of_states_the_checkpoint_of_the_last_unit_is_needed() -> None:
    needs = pool_of(manager_of(FULL, STATE, WINDOW, STATE)).needs
    units = np.array([4, 1, 3], dtype=np.int32)  # five columns; 12 tokens, of which the window reads from 5 on: block 2
    expected = [3 * 5 + 1, 3 * 5 + 4, 1 * 5 + 2, 1 * 5 + 3, 3 * 5 + 2, 3 * 5 + 3]
    assert sorted(needs.of_units(units).tolist()) == sorted(expected)
    assert sorted(needs.passing) == [2]


def test_what_nothing_passes_of_needs_nothing() -> None:
    manager = manager_of(FULL, group(KeepAll(), 2))
    seq = run(manager, 11)
    pool = pool_of(manager)
    assert (pool.lets_go, pool.needs.passing, pool.needs.of_all().size, seq.shortest) == (False, {}, 0, 0)
    assert pool.needs.can_go_on(seq._rows.blocks(seq._row), np.arange(11)).all()


# Where one can go on.


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dropped", [0, 1, 3, 6, 100])
def test_prompts_go_on_where_each_group_has_what_it_reads(name: str, dropped: int) -> None:
    manager = manager_of(*MODELS[name])
    manager.finish(run(manager, 36))
    pool, size = pool_of(manager), manager.block_size
    pool.units.drop(dropped, ends=False)
    units = manager.prefix.match_prefix(range(36), record=False).blocks.tolist()
    for length in (1, size, size + 1, 25, 36, 37, 50):
        most = min((length - 1) // size, len(units))
        hit = next(count for count in range(most, -1, -1) if can(manager, units, count * size)) * size
        expected = [count <= hit and can(manager, units, count) for count in range(length)]
        assert manager.can_go_on(range(length)).tolist() == expected
        assert expected[0]
        assert manager.plan(range(length)).cached_len == hit


def test_a_prompt_of_no_tokens_goes_on_nowhere_and_another_one_at_its_beginning() -> None:
    manager = manager_of(FULL, WINDOW)
    manager.finish(run(manager, 20))
    assert manager.can_go_on([]).tolist() == []
    assert manager.can_go_on(range(100, 120)).tolist() == [True] + [False] * 19
    assert manager.can_go_on(range(20), ("tenant",)).tolist() == [True] + [False] * 19


@pytest.mark.parametrize(("length", "expected"), [(4, [0]), (5, [0, 4]), (12, [0, 8]), (13, [0, 12]), (14, [0, 12])])
def test_with_a_state_prompts_go_on_at_its_checkpoint_alone(length: int, expected: list[int]) -> None:
    manager = manager_of(FULL, STATE, state_interval=1)
    manager.finish(run(manager, 14, at_most=4))
    assert np.flatnonzero(manager.can_go_on(range(length))).tolist() == expected


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("prefix", ["naive", "radix"])
def test_from_the_shortest_on_all_lengths_are_kept_and_the_one_before_is_not(name: str, prefix: str) -> None:
    manager = manager_of(*MODELS[name], prefix=prefix)
    for length in (1, 2, 11, 12, 13, 30, 36):
        seq = run(manager, length, first=1000 * length)
        pool_of(manager).units.drop(100, ends=True)
        units = seq._rows.blocks(seq._row).tolist()
        kept = [can(manager, units, count) for count in range(length)]
        shortest = max((count + 1 for count in range(length) if not kept[count]), default=0)
        assert seq.shortest == shortest
        assert [pool_of(manager).keeps(seq._row, count) for count in range(length)] == kept
        if shortest:
            with pytest.raises(IndexRangeError, match=rf"expected at least {shortest}: what was before is let go, .* got {shortest - 1}"):
                manager.truncate(seq, shortest - 1)
            with pytest.raises(IndexRangeError, match=rf"CacheManager.fork: num_tokens: expected at least {shortest}"):
                manager.fork(seq, shortest - 1)
        fork = manager.fork(seq, shortest)
        assert (fork.num_tokens, seq.num_tokens) == (shortest, length)
        manager.abort(fork)
        manager.abort(seq)
        manager.check_integrity()


def test_with_a_state_the_shortest_is_what_is_computed() -> None:
    manager = manager_of(FULL, WINDOW, STATE)
    seq = manager.open_empty()
    manager.extend(seq, 11)
    assert seq.shortest == 0
    manager.note_written([seq], [7])
    assert (seq.shortest, seq.computed) == (7, 0)
    assert [pool_of(manager).keeps(seq._row, count) for count in (6, 7, 11)] == [False, True, True]


# What is noted as written.


def test_what_is_noted_is_let_go_when_its_room_is_wanted_and_what_is_computed_at_once() -> None:
    manager = manager_of(FULL, WINDOW, num_blocks=30, prefix="naive")
    one, other = manager.open_empty(), manager.open_empty()
    manager.extend([one, other], [16, 12])
    assert manager.blocks_used == 3 * 4 + 3 * 3
    manager.note_written([one, other], [16, 9])
    # Behind 16 tokens the window reads from 9 on, and behind 9 from 2 on: four blocks and one go.
    assert manager.blocks_used == 3 * 4 + 3 * 3 - 4 - 1
    assert (one.computed, other.computed) == (0, 0)
    assert int(pool_of(manager).units.spared.sum()) == 5
    check_needs(manager, {one: 16, other: 9})
    assert one.slot_mapping(0, 8, group=1).min() >= 0, "they are there still"
    manager.truncate(one, 3)
    check_needs(manager, {one: 3, other: 9})
    assert int(pool_of(manager).units.spared.sum()) == 1
    manager.note_written([one], [0])
    check_needs(manager, {one: 0, other: 9})


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (
            [4, 8],
            r"CacheManager.note_written: written: expected \[5, 0\], what is computed, to \[5, 7\], the room, got \[4, 8\]. Fix: make room",
        ),
        ([5, 8], r"to \[5, 7\], the room, got \[5, 8\]"),
        ([4, 7], r"expected \[5, 0\], what is computed, .* got \[4, 7\]"),
    ],
)
def test_neither_more_than_there_is_room_for_is_written_nor_less_than_is_computed(written: list[int], text: str) -> None:
    manager = manager_of(FULL, WINDOW)
    seqs = [run(manager, 5), manager.begin(range(50, 57))]
    with pytest.raises(IndexRangeError, match=text):
        manager.note_written(seqs, written)
    check_needs(manager, {seqs[0]: 5, seqs[1]: 0})
    manager.note_written(seqs, [5, 7])
    check_needs(manager, {seqs[0]: 5, seqs[1]: 7})


def test_written_is_one_number_for_each_open_sequence() -> None:
    manager = manager_of(FULL, WINDOW)
    seq = run(manager, 5)
    with pytest.raises(ArgumentValueError, match=r"CacheManager.note_written: written: expected one number, or 1"):
        manager.note_written([seq], [5, 5])
    with pytest.raises(ArgumentValueError, match="got one that is there twice"):
        manager.note_written([seq, seq], [5, 5])
    manager.finish(seq)
    with pytest.raises(StaleHandleError, match=r"CacheManager.note_written: seq: expected an open sequence"):
        manager.note_written([seq], [5])


# What can be had.


@pytest.mark.parametrize("num_blocks", [9, 10, 11, 12])
def test_as_many_units_can_be_had_as_have_all_their_blocks(num_blocks: int) -> None:
    manager = manager_of(FULL, WINDOW, num_blocks=num_blocks, prefix="naive")
    pool = pool_of(manager)
    assert pool.capacity == pool.available == num_blocks // 3
    assert manager.available_size == num_blocks // 3 * 4
    assert [pool.has(n) for n in range(6)] == [3 * n <= num_blocks for n in range(6)]
    seq = manager.begin(range(5))
    assert (pool.available, pool.capacity) == ((num_blocks - 6) // 3, num_blocks // 3)
    manager.finish(seq)
    assert pool.available == num_blocks // 3


@pytest.mark.parametrize(("reserve", "promised"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (15, 3)])
def test_what_is_promised_cannot_be_had(reserve: int, promised: int) -> None:
    manager = manager_of(FULL, WINDOW, num_blocks=24, prefix="naive")
    pool = pool_of(manager)
    seq = manager.begin(range(5), reserve=reserve)
    assert pool.promised == promised
    assert pool.available == 8 - 2 - promised
    assert manager.available_size == 4 * (6 - promised)
    assert [pool.has(n) for n in range(8)] == [n + promised <= 6 for n in range(8)]
    assert [manager.plan(range(50, 50 + 4 * n)).fits for n in range(1, 8)] == [n + promised <= 6 for n in range(1, 8)]
    with pytest.raises(OutOfBlocksError, match=f"18 free and 0 evictable, {3 * promised} of them promised, of 24 in the pool"):
        manager.begin(range(50, 50 + 4 * (7 - promised)))
    other = manager.begin(range(50, 50 + 4 * (6 - promised)))
    assert pool.available == 0
    manager.extend(seq, min(reserve, 3 + 4 * promised))
    assert pool.promised == 0
    assert pool.available == 0
    manager.finish(other)
    assert pool.available == 6 - promised


def test_where_no_tokens_are_kept_there_are_as_many_units_as_have_numbers() -> None:
    manager = manager_of(STATE, num_blocks=2, prefix="naive", block_size=4)
    pool = pool_of(manager)
    assert pool.available == pool.capacity == 128
    assert [pool.has(n) for n in (0, 127, 128, 129)] == [True, True, True, False]
    assert [pool.has(128, states) for states in (0, 1, 2, 3)] == [True, True, True, False]
    seq = manager.begin(range(9), reserve=7)
    assert (pool.promised, pool.available) == (1, 128 - 3 - 1)
    assert [pool.has(n, 1) for n in (123, 124, 125)] == [True, True, False]
    assert [pool.has(1, states) for states in (0, 1, 2)] == [True, True, False]
    assert (pool.could_hold(0, 128), pool.could_hold(1, 127), pool.could_hold(1, 128)) == (True, True, False)
    with pytest.raises(OutOfBlocksError):
        manager.extend(seq, 128 * 4)


def test_a_window_alone_may_have_used_up_the_numbers_of_units_before_the_blocks() -> None:
    manager = manager_of(group(KeepWindow(2), 2), num_blocks=4, prefix="naive")
    pool = pool_of(manager)
    assert (pool.allocator.num_blocks, pool.capacity, pool.available) == (256, 4, 4)
    seq = run(manager, 2 * 254, at_most=2)
    assert (manager.blocks_used, pool.allocator.num_free) == (1, 2)
    assert pool.available == 2, "though three blocks are free"
    assert [pool.has(n) for n in (1, 2, 3)] == [True, True, False]
    manager.finish(seq)
    assert pool.available == 4


def test_what_is_cached_can_be_had_and_what_goes_on_behind_it_needs_it() -> None:
    manager = manager_of(FULL, WINDOW, num_blocks=15)
    pool = pool_of(manager)
    manager.finish(run(manager, 12, at_most=4))
    units = manager.prefix.match_prefix(range(12), record=False).blocks
    idle = pool.units.num_idle
    assert idle == int((pool.units.table[units, 1:] >= 0).sum())
    assert pool.available == (pool.units.blocks.num_free + idle + 3) // 3 == 5
    again = sum(int(pool.units.table[unit, column] >= 0) for unit, column in ((units[1], 1), (units[1], 2), (units[2], 1), (units[2], 2)))
    assert again == 4
    assert [pool.has(n, 0, units) for n in range(6)] == [3 * n + again <= 15 for n in range(6)]
    assert pool.has(5)
    assert not pool.has(6)


@pytest.mark.parametrize(
    ("groups", "null_block", "capacity"),
    [
        ((FULL, WINDOW), False, 20 // 3),
        ((FULL, WINDOW), True, 19 // 3),
        ((FULL, WINDOW, STATE), False, 19 // 3),
        ((FULL, WINDOW, STATE, STATE), True, 17 // 3),
        (UNLIKE, False, 20 // 6),
        ((FULL, group(KeepAll(), 2)), True, 19 // 3),
        ((FULL, STATE), False, 19),
        ((FULL, STATE), True, 18),
    ],
)
def test_one_sequence_has_its_states_and_units_and_never_the_null_block(groups: Any, null_block: bool, capacity: int) -> None:
    manager = manager_of(*groups, num_blocks=20, null_block=null_block)
    pool = pool_of(manager)
    assert pool.capacity == capacity
    assert pool.could_hold(0, capacity)
    assert not pool.could_hold(0, capacity + 1)
    tokens = capacity * manager.block_size
    assert manager.plan(range(tokens)).fits
    with pytest.raises(OutOfBlocksError):
        manager.begin(range(tokens + 1))
    seq = manager.begin(range(tokens))
    assert seq.num_tokens == tokens
    handed_out = {block for at in range(len(groups)) for block in seq.block_table(at).tolist()}
    assert len(handed_out) == capacity * pool.units.per_unit + pool.states.per_sequence
    assert not (null_block and 0 in handed_out)


def test_of_cached_units_only_what_lasts_has_to_be_held() -> None:
    pool = pool_of(manager_of(FULL, WINDOW, STATE, num_blocks=20))
    for cached in range(22):
        for new in range(8):
            assert pool.could_hold(cached, new) == (cached + 3 * new + 1 <= 20 and cached + new <= 20), (cached, new)


def test_promises_are_kept_when_a_sequence_is_cut_and_over() -> None:
    manager = manager_of(FULL, WINDOW, num_blocks=30, prefix="naive")
    pool = pool_of(manager)
    seq = manager.begin(range(4), reserve=12)
    assert (pool.promised, pool.available) == (3, 10 - 4)
    manager.extend(seq, 9)
    assert (pool.promised, pool.available) == (0, 6)
    manager.truncate(seq, 5)
    assert (pool.promised, pool.available) == (2, 6)
    manager.abort(seq)
    assert (pool.promised, pool.available) == (0, 10)


@pytest.mark.parametrize("name", GROUPED)
def test_an_engine_reads_what_it_wrote_at_the_boundaries_of_units(name: str) -> None:
    engine = Engine(name, 200)
    size = engine.manager.block_size
    for length in sorted({1, max(size - 1, 1), size, size + 1, 3 * size}):
        request = engine.begin(list(range(length)))
        assert request is not None
        assert request.seq.num_tokens == length
        engine.compute(request, length)
        engine.check()
