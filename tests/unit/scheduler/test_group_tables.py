"""The block tables of layer groups, and batches over them: each slot and block against a loop over units, tokens and spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvdock.errors import ArgumentValueError, IndexRangeError, OutOfBlocksError, StaleHandleError
from kvdock.layers import KeepAll, KeepChunk, KeepState, KeepWindow, Retention
from kvdock.scheduler import CacheManager, CacheSequence, SequenceBatch
from kvdock.scheduler.passing import Passing
from kvdock.scheduler.tables import StateTable, TokenTable
from kvdock_conformance.checking.group_engine import group_of as group

FULL, WINDOW, STATE = group(KeepAll(), 4), group(KeepWindow(8), 2), group(KeepState(), 1)
SINKS, CHUNK = group(KeepWindow(5, sinks=3), 2), group(KeepChunk(8), 4)
UNLIKE = (group(KeepAll(), 6), group(KeepWindow(5), 2), group(KeepWindow(9), 3))
MODELS = {
    "full and a window": (FULL, WINDOW),
    "sinks": (FULL, SINKS),
    "chunks": (FULL, CHUNK),
    "unlike blocks": UNLIKE,
    "a window alone": (WINDOW,),
    "full, sinks and a state": (FULL, SINKS, STATE),
}


def manager_of(*groups: Any, num_blocks: int = 200, **how: Any) -> CacheManager:
    return CacheManager(num_blocks, groups=groups, prefix="naive", **how)


def run(manager: CacheManager, length: int, at_most: int = 5) -> CacheSequence:
    """Compute so many tokens in chunks."""
    seq = manager.begin(range(length), at_most=at_most)
    while True:
        manager.commit(seq, [], computed=seq.num_tokens)
        if seq.num_tokens >= length:
            return seq
        manager.extend(seq, min(at_most, length - seq.num_tokens))


def unit_table(manager: CacheManager, seq: CacheSequence) -> list[list[int]]:
    """Return the blocks of each unit of a sequence, in all columns."""
    found: list[list[int]] = manager._pool.units.table[seq._rows.blocks(seq._row)].tolist()
    return found


def block_of(manager: CacheManager, seq: CacheSequence, at: int, place: int) -> int:
    """Return a block of a group by its place in the sequence; -1 if it is gone."""
    groups, unit = manager._pool.units.groups, manager.block_size
    widths = [1 if each.retention.is_state else unit // each.block_size for each in groups]
    return unit_table(manager, seq)[place // widths[at]][sum(widths[:at]) + place % widths[at]]


def needed(rule: Retention, size: int, written: int, stop: int) -> list[int]:
    """Return which of the first blocks have a token that is read by the next one, or is yet to be written."""
    read = {position for span in rule.spans(written) for position in span}
    return [at for at in range(stop) if any(each >= written or each in read for each in range(at * size, (at + 1) * size))]


def expected_blocks(manager: CacheManager, seq: CacheSequence, at: int, written: int) -> list[int]:
    of = manager._pool.units.groups[at]
    stop = sum(1 for start in range(0, seq.num_tokens, of.block_size) if start < seq.num_tokens)
    keep = needed(of.retention, of.block_size, written, stop)
    return [block_of(manager, seq, at, place) if place in keep else 0 for place in range(stop)]


def expected_slots(manager: CacheManager, seq: CacheSequence, at: int, positions: Sequence[int]) -> list[int]:
    size = manager._pool.units.groups[at].block_size
    found = []
    for position in positions:
        block = block_of(manager, seq, at, position // size)
        found.append(block * size + position % size if block >= 0 else -1)
    return found


def of_tokens(manager: CacheManager) -> list[int]:
    return [at for at, each in enumerate(manager._pool.units.groups) if not each.retention.is_state]


# What a group lets go, in blocks.


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "rule", [KeepWindow(1), KeepWindow(2), KeepWindow(5), KeepWindow(5, sinks=3), KeepWindow(4, sinks=8), KeepChunk(6)]
)
def test_the_blocks_that_are_needed_are_those_of_tokens_that_are_read_or_to_come(rule: Retention, size: int) -> None:
    passing = Passing(0, 1, size, rule)
    for written in range(26):
        for stop in range(-(-written // size), -(-written // size) + 3):
            expected = needed(rule, size, written, stop)
            assert passing.needed(int(passing.first(written)), stop).tolist() == expected, (written, stop)


@pytest.mark.parametrize(("sinks", "size", "expected"), [(0, 2, 0), (1, 2, 1), (2, 2, 1), (3, 2, 2), (4, 4, 1), (5, 4, 2), (1, 1, 1)])
def test_leading_blocks_are_those_that_have_a_sink(sinks: int, size: int, expected: int) -> None:
    assert Passing(0, 1, size, KeepWindow(4, sinks=sinks)).leading == expected


def test_the_first_block_that_is_kept_is_told_for_many_rows_at_once() -> None:
    passing = Passing(0, 2, 2, KeepWindow(4))
    assert passing.first(np.arange(12)).tolist() == [max(count - 3, 0) // 2 for count in range(12)]
    assert Passing(0, 2, 4, KeepChunk(8)).first(np.array([0, 7, 8, 9, 15, 16])).tolist() == [0, 0, 2, 2, 2, 4]


def test_places_are_those_of_the_column_of_the_group() -> None:
    passing = Passing(start=1, width=3, block_size=2, retention=KeepWindow(4))
    units, blocks = np.array([7, 7, 7, 2, 0], dtype=np.int32), np.array([0, 1, 2, 4, 8])
    expected = [unit * 5 + 1 + block % 3 for unit, block in zip([7, 7, 7, 2, 0], [0, 1, 2, 4, 8], strict=True)]
    assert passing.places_of(units, blocks, 5).tolist() == expected == [36, 37, 38, 12, 3]


def test_places_of_many_units_are_not_cut_down_to_the_type_of_a_unit() -> None:
    passing = Passing(start=1, width=2, block_size=2, retention=KeepWindow(4))
    assert passing.places_of(np.array([2**31 - 1], dtype=np.int32), np.array([3]), 9).tolist() == [(2**31 - 1) * 9 + 2]


# Tables of one sequence.


@pytest.mark.parametrize("name", MODELS)
def test_tables_have_what_is_needed_and_0_for_the_rest_at_each_length(name: str) -> None:
    manager = manager_of(*MODELS[name])
    seq = manager.begin([0])
    for length in range(1, 2 * manager.block_size + 14):
        manager.commit(seq, [] if length == 1 else [length], computed=length)
        for at in of_tokens(manager):
            table = seq.block_table(at)
            assert table.tolist() == expected_blocks(manager, seq, at, length), (length, at)
            assert -1 not in table.tolist(), "what is needed has a block"
            positions = range(length)
            assert seq.slot_mapping(0, length, group=at).tolist() == expected_slots(manager, seq, at, positions)
        manager.extend(seq, 1)
    manager.check_integrity()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [1, 11, 12, 13, 24, 37])
def test_what_is_gone_has_no_slot_and_what_the_next_token_reads_has(name: str, length: int) -> None:
    manager = manager_of(*MODELS[name])
    seq = run(manager, length)
    for at in of_tokens(manager):
        of = manager._pool.units.groups[at]
        keep = needed(of.retention, of.block_size, length, -(-length // of.block_size))
        there = np.flatnonzero(seq.slot_mapping(0, length, group=at) >= 0).tolist()
        assert there == [position for position in range(length) if position // of.block_size in keep]
        assert {position for span in of.retention.spans(length) for position in span} <= set(there)


def test_a_table_is_the_callers_own() -> None:
    for groups in ((FULL, WINDOW), (FULL, STATE)):
        manager = manager_of(*groups)
        seq = run(manager, 9)
        for at in (0, 1):
            before = seq.block_table(at).tolist()
            seq.block_table(at)[:] = 77
            assert seq.block_table(at).tolist() == before
            assert 77 not in before


@pytest.mark.parametrize("name", MODELS)
def test_tables_of_several_rows_are_as_each_row_says(name: str) -> None:
    manager = manager_of(*MODELS[name])
    seqs = [run(manager, length) for length in (1, 12, 13, 25)]
    rows = np.array([seq._row for seq in seqs])
    for at in of_tokens(manager):
        table, size = manager._pool.tables[at], manager._pool.units.groups[at].block_size
        widths = [-(-seq.num_tokens // size) for seq in seqs]
        assert table.widths(rows).tolist() == widths
        for columns in (1, 2, 3, max(widths)):
            shown = table.dense(rows, columns).tolist()
            for seq, width, line in zip(seqs, widths, shown, strict=True):
                expected = [max(block_of(manager, seq, at, place), 0) if place < width else 0 for place in range(len(line))]
                assert len(line) <= columns
                assert line == expected
        lasts = np.array([width - 1 for width in widths])
        assert table.at(rows, lasts).tolist() == [block_of(manager, seq, at, width - 1) for seq, width in zip(seqs, widths, strict=True)]
        first = [max(block_of(manager, seq, at, 0), 0) for seq in seqs]
        assert table.at(rows, np.zeros(4, dtype=np.intp)).tolist() == first


@pytest.mark.parametrize("name", MODELS)
def test_slots_of_ranges_come_one_row_behind_the_other(name: str) -> None:
    manager = manager_of(*MODELS[name])
    seqs = [run(manager, length) for length in (3, 12, 26)]
    rows = np.array([seq._row for seq in seqs])
    for at in of_tokens(manager):
        table = manager._pool.tables[at]
        for starts, counts in (([0, 0, 0], [3, 12, 26]), ([1, 11, 13], [1, 1, 1]), ([2, 4, 5], [0, 8, 7]), ([0, 0, 0], [0, 0, 0])):
            expected = []
            for seq, start, count in zip(seqs, starts, counts, strict=True):
                expected += expected_slots(manager, seq, at, range(start, start + count))
            assert table.slots(rows, np.array(starts), np.array(counts)).tolist() == expected


def test_a_table_of_no_tokens_is_empty() -> None:
    manager = manager_of(FULL, SINKS, STATE)
    seq = manager.open_empty()
    assert [seq.block_table(at).size for at in range(3)] == [0, 0, 1]
    assert seq.slot_mapping(0, 0, group=1).tolist() == []
    rows = np.array([seq._row])
    assert [table.widths(rows).tolist() for table in manager._pool.tables] == [[0], [0], [1]]
    assert [table.held(seq._row).size for table in manager._pool.tables] == [0, 0, 1]


@pytest.mark.parametrize(("length", "held"), [(1, (1, 2)), (4, (1, 2)), (5, (2, 4)), (12, (3, 4)), (13, (4, 5))])
def test_held_has_the_rest_of_the_last_unit_too(length: int, held: tuple[int, int]) -> None:
    """A window of 8 behind n tokens begins at block (n - 7) // 2, and units of 4 tokens have two blocks of the window."""
    manager = manager_of(FULL, WINDOW)
    seq = run(manager, length)
    units = -(-length // 4)
    assert held == (units, 2 * units - max(length - 7, 0) // 2)
    assert tuple(table.held(seq._row).size for table in manager._pool.tables) == held
    assert manager.blocks_used == sum(held)


def test_groups_have_tables_of_their_kind_and_two_states_have_two_blocks() -> None:
    manager = manager_of(STATE, FULL, STATE, WINDOW)
    tables = manager._pool.tables
    assert [type(table) for table in tables] == [StateTable, TokenTable, StateTable, TokenTable]
    assert [(table.block_size, table.is_state) for table in tables] == [(1, True), (4, False), (1, True), (2, False)]
    seqs = [run(manager, 9), run(manager, 1)]
    rows = np.array([seq._row for seq in seqs])
    expected = manager._pool.states.blocks[rows].tolist()
    assert len({*expected[0], *expected[1]}) == 4
    for number, at in enumerate((0, 2)):
        column = [line[number] for line in expected]
        assert [seq.block_table(at).tolist() for seq in seqs] == [[block] for block in column]
        assert tables[at].dense(rows, 1).tolist() == [[block] for block in column]
        assert tables[at].at(rows, np.zeros(2, dtype=np.intp)).tolist() == column
        assert tables[at].widths(rows).tolist() == [1, 1]


def test_a_state_has_no_slots() -> None:
    seq = run(manager_of(FULL, STATE), 5)
    text = r"slot_mapping: group: expected a group that keeps tokens, got one that keeps a state. Fix: read block_table\(group=\.\.\.\)"
    with pytest.raises(ArgumentValueError, match=text):
        seq.slot_mapping(0, 5, group=1)


@pytest.mark.parametrize("at", [-1, 2, True, 0.0, None])
def test_there_is_no_such_group(at: Any) -> None:
    manager = manager_of(FULL, WINDOW)
    seq = run(manager, 5)
    with pytest.raises(IndexRangeError, match=r"CacheSequence.block_table: group: expected 0 to 1, a layer group of the manager, got"):
        seq.block_table(at)
    batch = SequenceBatch(manager, [seq], length=5)
    with pytest.raises(IndexRangeError, match=r"SequenceBatch.slot_mapping: group: expected 0 to 1, a layer group of the manager, got"):
        batch.slot_mapping(0, 5, group=at)


# Batches.


def look_at(batch: SequenceBatch, manager: CacheManager, written: int) -> None:
    """Compare all that a batch shows with loops over its rows, of which so many places were said to be written."""
    held = set()
    for at, of in enumerate(manager._pool.units.groups):
        shown = batch.block_table(at)
        if of.retention.is_state:
            assert shown.tolist() == [seq.block_table(at).tolist() for seq in batch.sequences]
            held |= {int(block) for block in shown[:, 0]}
            continue
        slots = batch.slot_mapping(0, batch.length, group=at)
        assert slots.shape == (batch.batch_size, batch.length)
        for line, blocks, seq, pad in zip(slots.tolist(), shown.tolist(), batch.sequences, batch.pads.tolist(), strict=True):
            places = min(pad, batch.length)
            assert line == [-1] * places + expected_slots(manager, seq, at, range(batch.length - places))
            count = -(-seq.num_tokens // of.block_size)
            assert blocks[:count] == [max(block_of(manager, seq, at, place), 0) for place in range(count)]
            assert not any(blocks[count:])
            stop = len(unit_table(manager, seq)) * (manager.block_size // of.block_size)
            keep = needed(of.retention, of.block_size, max(written - pad, 0), stop)
            held |= {block_of(manager, seq, at, place) for place in keep}
        assert shown.shape[1] == max(-(-seq.num_tokens // of.block_size) for seq in batch.sequences)
    assert batch.num_blocks == len(held)
    manager.check_integrity()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pads", [(0, 0, 0), (0, 1, 5), (3, 12, 13)])
def test_a_batch_grows_and_shows_each_place_of_each_group(name: str, pads: tuple[int, ...]) -> None:
    manager = manager_of(*MODELS[name])
    batch = SequenceBatch(manager, [manager.open_empty() for _ in pads], pads=pads)
    look_at(batch, manager, 0)
    length = 0
    for n in (1, 3, 0, 8, 12, 1, 1):
        assert batch.grow(n).shape == (0, 2)
        length += n
        assert batch.length == length
        assert [seq.num_tokens for seq in batch.sequences] == [max(length - pad, 0) for pad in pads]
        look_at(batch, manager, length - n)
        batch.written()
        look_at(batch, manager, length)
    batch.close()
    assert manager.blocks_used == 0


def test_room_that_is_reserved_is_used_by_the_next_grow_or_given_back() -> None:
    manager = manager_of(FULL, WINDOW)
    batch = SequenceBatch.empty(manager, 2)
    batch.grow(4)
    batch.reserve(5)
    assert (batch.length, [seq.num_tokens for seq in batch.sequences], batch.num_blocks) == (4, [9, 9], 2 * 3 * 3)
    batch.truncate(4)
    assert (batch.length, [seq.num_tokens for seq in batch.sequences], batch.num_blocks) == (4, [4, 4], 2 * 3)
    batch.reserve(5)
    batch.grow(2)
    assert (batch.length, [seq.num_tokens for seq in batch.sequences]) == (6, [9, 9])
    look_at(batch, manager, 0)


@pytest.mark.parametrize("name", [name for name in MODELS if "state" not in name])
def test_a_batch_is_cut_where_nothing_was_written(name: str) -> None:
    manager = manager_of(*MODELS[name])
    batch = SequenceBatch(manager, [manager.open_empty() for _ in range(2)], pads=(0, 2))
    batch.grow(30)
    for length in (30, 29, 25, 24, 13, 12, 1, 0):
        batch.truncate(length)
        assert (batch.length, [seq.num_tokens for seq in batch.sequences]) == (length, [length, max(length - 2, 0)])
        look_at(batch, manager, 0)
    assert (batch.num_blocks, manager.blocks_used) == (0, 0)


def test_a_batch_is_cut_behind_what_was_written_while_nobody_wants_the_room_but_not_before() -> None:
    manager = manager_of(FULL, WINDOW, num_blocks=20)
    batch = SequenceBatch.empty(manager, 1)
    batch.grow(20)
    batch.written()
    assert manager.blocks_used == 5 + 10 - (20 - 7) // 2
    batch.truncate(13)  # spared: it is there still
    look_at(batch, manager, 13)
    batch.grow(7)
    batch.written()
    other = manager.begin(range(12))  # 9 blocks of the 11 that are free or spared
    assert other.num_tokens == 12
    (seq,) = batch.sequences
    shortest = seq.shortest
    assert 13 < shortest <= 20
    what = rf"expected at least {shortest}: what was before is let go, came in part, or is in a state, got {shortest - 1}"
    text = f"SequenceBatch.truncate: length: {what}"
    with pytest.raises(IndexRangeError, match=text):
        batch.truncate(shortest - 1)
    assert (batch.length, seq.num_tokens) == (20, 20)
    batch.truncate(shortest)
    assert batch.length == shortest
    manager.check_integrity()


def test_a_batch_with_states_is_not_cut_before_what_was_written() -> None:
    manager = manager_of(FULL, WINDOW, STATE)
    batch = SequenceBatch.empty(manager, 2)
    batch.grow(9)
    batch.written()
    batch.grow(3)
    batch.truncate(9)
    text = r"expected at least 9: what was before is let go, came in part, or is in a state, got 8"
    with pytest.raises(IndexRangeError, match=text):
        batch.truncate(8)
    assert [seq.num_tokens for seq in batch.sequences] == [9, 9]
    with pytest.raises(IndexRangeError, match=r"SequenceBatch.truncate: length: expected at most the 9 places there are, got 10"):
        batch.truncate(10)


@pytest.mark.parametrize("chosen", [[0], [2, 1, 0], [1, 1, 1], [0, 2, 0, 1, 2]])
def test_rows_that_are_chosen_share_their_blocks_until_they_are_written(chosen: list[int]) -> None:
    manager = manager_of(FULL, SINKS, STATE)
    batch = SequenceBatch(manager, [manager.open_empty() for _ in range(3)], pads=(0, 1, 6))
    batch.grow(15)
    batch.written()
    before = [(batch.slot_mapping(0, 15, group=at).tolist()) for at in (0, 1)]
    sequences = batch.sequences
    batch.select(chosen)
    assert batch.pads.tolist() == [(0, 1, 6)[row] for row in chosen]
    assert [batch.slot_mapping(0, 15, group=at).tolist() for at in (0, 1)] == [[lines[row] for row in chosen] for lines in before]
    assert [seq.is_open for seq in sequences] == [row in chosen for row in range(3)]
    look_at(batch, manager, 15)
    pairs = batch.grow(1)
    last = [block_of(manager, seq, 0, (15 - pad) // 4) for seq, pad in zip(batch.sequences, batch.pads.tolist(), strict=True)]
    assert len(set(last)) == len(chosen), "each writes into a block of its own"
    assert len({target for _, target in pairs.tolist()}) == len(pairs)
    look_at(batch, manager, 15)
    batch.close()
    assert manager.blocks_used == 0


@pytest.mark.parametrize(
    ("chosen", "error", "text"),
    [
        ([], ArgumentValueError, "SequenceBatch.select: rows: expected at least one row, got none"),
        ([0, 2], IndexRangeError, r"SequenceBatch.select: rows: expected rows from 0 to 1, got \[0, 2\]"),
        ([-1], IndexRangeError, r"SequenceBatch.select: rows: expected rows from 0 to 1, got \[-1\]"),
    ],
)
def test_rows_that_do_not_exist_change_nothing(chosen: list[int], error: type[Exception], text: str) -> None:
    manager = manager_of(FULL, WINDOW)
    batch = SequenceBatch.empty(manager, 2)
    batch.grow(5)
    before = batch.sequences, batch.block_table(1).tolist()
    with pytest.raises(error, match=text):
        batch.select(np.array(chosen, dtype=np.intp))
    assert (batch.sequences, batch.block_table(1).tolist()) == before


def test_a_fork_has_the_same_places_and_its_own_state() -> None:
    manager = manager_of(FULL, WINDOW, STATE)
    batch = SequenceBatch(manager, [manager.open_empty() for _ in range(2)], pads=(0, 3))
    batch.grow(14)
    batch.written()
    fork, used = batch.fork(), manager.blocks_used
    assert (fork.length, fork.pads.tolist(), fork.batch_size) == (14, [0, 3], 2)
    for at in (0, 1):
        assert fork.slot_mapping(0, 14, group=at).tolist() == batch.slot_mapping(0, 14, group=at).tolist()
    assert not set(fork.block_table(2)[:, 0].tolist()) & set(batch.block_table(2)[:, 0].tolist())
    look_at(fork, manager, 14)
    batch.close()
    assert manager.blocks_used == used - 2, "the states of two rows"
    look_at(fork, manager, 14)


def test_a_batch_that_cannot_grow_is_as_it_was() -> None:
    manager = manager_of(FULL, WINDOW, num_blocks=12)
    batch = SequenceBatch.empty(manager, 2)
    batch.grow(8)
    before = batch.block_table(1).tolist()
    with pytest.raises(OutOfBlocksError, match="2 times 4 tokens in all groups"):
        batch.grow(1)
    assert (batch.length, [seq.num_tokens for seq in batch.sequences], batch.block_table(1).tolist()) == (8, [8, 8], before)
    batch.close()
    with pytest.raises(StaleHandleError, match=r"SequenceBatch.block_table: expected an open batch, got one that is closed"):
        batch.block_table(1)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 6)])
def test_places_beyond_the_length_have_no_slots_though_there_is_room(start: int, stop: int) -> None:
    manager = manager_of(FULL, WINDOW)
    batch = SequenceBatch.empty(manager, 1)
    batch.grow(5)
    batch.reserve(3)
    with pytest.raises(IndexRangeError, match=rf"expected 0 <= start <= stop <= 5, got start={start}, stop={stop}"):
        batch.slot_mapping(start, stop, group=1)
    assert batch.slot_mapping(5, 5, group=1).shape == (1, 0)
