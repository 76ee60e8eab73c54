"""BlockTable: rows of one length, blocks shared until they are written."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch

from kvdock.errors import ArgumentTypeError, ArgumentValueError, IndexRangeError, KVDockError, OutOfBlocksError
from kvdock.scheduler import BlockAllocator, BlockTable


def make(rows: int = 2, *, length: int = 0, block_size: int = 4, num_blocks: int = 64) -> tuple[BlockAllocator, BlockTable]:
    allocator = BlockAllocator(num_blocks)
    table = BlockTable(allocator, block_size, rows)
    if length:
        table.grow(length)
    return allocator, table


def state(allocator: BlockAllocator, table: BlockTable) -> tuple[Any, ...]:
    counts = allocator.ref_counts(range(allocator.num_blocks))
    return table.batch_size, table.length, table.block_ids.tolist(), allocator.num_free, counts.tolist()


def test_a_new_table_is_empty() -> None:
    allocator, table = make(3)
    assert (table.batch_size, table.length, table.block_size, table.num_blocks) == (3, 0, 4, 0)
    assert table.block_ids.shape == (3, 0)
    assert table.slot_mapping(0, 0).shape == (3, 0)
    assert allocator.num_used == 0


def test_blocks_are_taken_only_when_the_last_one_is_full() -> None:
    allocator, table = make(2)
    used = []
    for _ in range(9):
        assert table.grow(1).shape == (0, 2)
        used.append(allocator.num_used)
    assert used == [2, 2, 2, 2, 4, 4, 4, 4, 6]
    assert table.length == 9


def test_slots_are_blocks_times_size_plus_offset() -> None:
    _, table = make(2, length=6)
    assert table.block_ids.tolist() == [[0, 1], [2, 3]]
    slots = table.slot_mapping(0, 6)
    assert slots.tolist() == [[0, 1, 2, 3, 4, 5], [8, 9, 10, 11, 12, 13]]
    assert slots.dtype == np.int64
    assert table.slot_mapping(3, 5).tolist() == [[3, 4], [11, 12]]


@pytest.mark.parametrize("block_size", [1, 3, 16, 512])
def test_every_token_of_every_row_has_its_own_slot(block_size: int) -> None:
    _, table = make(3, length=50, block_size=block_size, num_blocks=180)
    table.grow(7)
    slots = table.slot_mapping(0, 57)
    assert np.unique(slots).size == 3 * 57
    assert slots.max() < 180 * block_size


def test_the_ids_are_a_view_that_cannot_be_written() -> None:
    _, table = make(2, length=5)
    with pytest.raises(ValueError, match="read-only"):
        table.block_ids[0, 0] = 3


def test_growing_past_the_pool_changes_nothing() -> None:
    allocator, table = make(2, length=5, num_blocks=5)
    before = state(allocator, table)
    with pytest.raises(OutOfBlocksError):
        table.grow(4)
    assert state(allocator, table) == before
    table.grow(3)
    assert table.length == 8


def test_growing_past_the_pool_with_a_copy_due_changes_nothing() -> None:
    allocator, table = make(1, length=5, num_blocks=2)
    other = table.fork()
    before = state(allocator, table)
    with pytest.raises(OutOfBlocksError):
        table.grow(1)
    assert state(allocator, table) == before
    del other
    gc.collect()
    assert table.grow(1).shape == (0, 2), "nobody else holds the block any more"


def test_a_fork_shares_all_blocks_and_takes_none() -> None:
    allocator, table = make(2, length=6)
    other = table.fork()
    assert other.block_ids.tolist() == table.block_ids.tolist()
    assert other.length == 6
    assert allocator.num_used == 4
    assert allocator.ref_counts(table.block_ids).tolist() == [2, 2, 2, 2]


def test_only_the_partly_filled_shared_block_is_copied_and_only_once() -> None:
    allocator, table = make(1, length=6)
    other = table.fork()
    pairs = other.grow(1)
    assert pairs.tolist() == [[1, 2]]
    assert other.block_ids.tolist() == [[0, 2]]
    assert table.block_ids.tolist() == [[0, 1]]
    assert table.grow(1).tolist() == [], "the other one has its own copy now"
    assert other.grow(1).tolist() == []
    assert allocator.ref_counts([0, 1, 2]).tolist() == [2, 1, 1]


def test_full_blocks_are_never_copied() -> None:
    allocator, table = make(1, length=8)
    other = table.fork()
    assert other.grow(5).tolist() == []
    assert table.grow(5).tolist() == []
    assert allocator.num_used == 6


def test_growing_by_nothing_copies_nothing() -> None:
    allocator, table = make(1, length=6)
    other = table.fork()
    assert other.grow(0).shape == (0, 2)
    assert allocator.num_used == 2


def test_a_copy_and_new_blocks_come_in_one_step() -> None:
    _, table = make(2, length=6)
    other = table.fork()
    pairs = other.grow(7)
    assert pairs[:, 0].tolist() == [1, 3]
    assert np.unique(other.block_ids).size == 2 * 4
    assert (other.block_ids[:, :1] == table.block_ids[:, :1]).all()
    assert pairs[:, 1].tolist() == other.block_ids[:, 1].tolist()


def test_one_of_the_rows_that_share_a_block_keeps_it() -> None:
    allocator, table = make(1, length=6)
    table.select([0, 0, 0])
    pairs = table.grow(1)
    assert pairs[:, 0].tolist() == [1, 1], "three rows, two copies"
    assert table.block_ids[0].tolist() == [0, 1]
    assert np.unique(table.block_ids[:, 1]).size == 3
    assert allocator.ref_counts([0, 1]).tolist() == [3, 1]


def test_no_row_keeps_a_block_that_another_table_holds() -> None:
    _, table = make(1, length=6)
    other = table.fork()
    other.select([0, 0])
    assert other.grow(1)[:, 0].tolist() == [1, 1]
    assert table.block_ids.tolist() == [[0, 1]]


def test_select_reorders_repeats_and_drops_rows() -> None:
    allocator, table = make(3, length=6)
    ids = table.block_ids.copy()
    table.select([2, 0, 2, 2])
    assert table.block_ids.tolist() == ids[[2, 0, 2, 2]].tolist()
    assert table.batch_size == 4
    assert allocator.num_used == 4, "row 1 is gone"
    assert allocator.ref_counts(ids).tolist() == [1, 1, 0, 0, 3, 3]
    allocator.check_integrity()


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_rows_come_as_lists_arrays_and_tensors(kind: Any) -> None:
    _, table = make(2, length=3)
    ids = table.block_ids.copy()
    table.select(kind([1, 0]))
    assert table.block_ids.tolist() == ids[::-1].tolist()


@pytest.mark.parametrize(
    ("rows", "error", "text"),
    [
        ([0, 2], IndexRangeError, r"rows from 0 to 1, got \[0, 2\]"),
        ([-1], IndexRangeError, "rows from 0 to 1"),
        ([], ArgumentValueError, "at least one row"),
        ([[0, 1]], ArgumentValueError, r"got shape \(1, 2\)"),
        (0, ArgumentValueError, r"got shape \(\)"),
        ([0.0, 1.0], ArgumentTypeError, "expected integers, got float64"),
        ([True, False], ArgumentTypeError, "expected integers, got bool"),
    ],
)
def test_bad_rows_change_nothing(rows: Any, error: type[KVDockError], text: str) -> None:
    allocator, table = make(2, length=6)
    before = state(allocator, table)
    with pytest.raises(error, match=text):
        table.select(rows)
    assert state(allocator, table) == before


def test_a_table_begins_with_blocks_of_others() -> None:
    allocator = BlockAllocator(8)
    blocks = allocator.allocate(3)
    table = BlockTable(allocator, 2)
    table.adopt([[0, 1], [0, 2]])
    assert (table.batch_size, table.length, table.num_blocks) == (2, 4, 3)
    assert allocator.ref_counts(blocks).tolist() == [3, 2, 2]
    assert table.slot_mapping(0, 4).tolist() == [[0, 1, 2, 3], [0, 1, 4, 5]]
    assert table.grow(1).tolist() == [], "whole blocks are never copied"
    assert table.block_ids.tolist() == [[0, 1, 3], [0, 2, 4]]
    table.truncate(3)
    assert table.grow(1).tolist() == [[1, 3], [2, 4]], "but one that is written again is"
    table.clear()
    assert allocator.ref_counts(range(8)).tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


def test_adopting_no_blocks_gives_rows() -> None:
    table = BlockTable(BlockAllocator(4), 2)
    table.adopt(np.empty((3, 0), dtype=np.int64))
    assert (table.batch_size, table.length) == (3, 0)
    assert table.grow(1).tolist() == []
    assert table.num_blocks == 3


def test_what_is_adopted_is_not_aliased_and_given_back_when_dropped() -> None:
    allocator = BlockAllocator(4)
    ids = allocator.allocate(2)[None]
    table = BlockTable(allocator, 2)
    table.adopt(ids)
    ids[:] = 99
    assert table.block_ids.tolist() == [[0, 1]]
    del table
    gc.collect(0)
    assert allocator.ref_counts([0, 1]).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("blocks", "error", "text"),
    [
        ([0, 1], ArgumentValueError, r"ids of \[rows, blocks\], at least one row, got 0 tokens, and ids of shape \(2,\)"),
        (np.empty((0, 2), dtype=np.int64), ArgumentValueError, r"ids of shape \(0, 2\). Fix: "),
        ([[0, 3]], ArgumentValueError, r"expected blocks in use, got free blocks \[3\]"),
        ([[0, 4]], IndexRangeError, r"expected ids from 0 to 3, got \[4\]"),
        ([[0.0]], ArgumentTypeError, "expected integers"),
    ],
)
def test_blocks_that_cannot_be_adopted_change_nothing(blocks: Any, error: type[KVDockError], text: str) -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(2)
    table = BlockTable(allocator, 2)
    with pytest.raises(error, match=text):
        table.adopt(blocks)
    assert (table.length, table.batch_size, allocator.ref_counts(range(4)).tolist()) == (0, 1, [1, 1, 0, 0])


def test_a_table_with_tokens_adopts_nothing() -> None:
    allocator = BlockAllocator(4)
    table = BlockTable(allocator, 2)
    table.grow(1)
    with pytest.raises(ArgumentValueError, match=r"an empty table, .*got 1 tokens.*Fix: clear\(\)"):
        table.adopt([[0]])
    assert allocator.ref_count(0) == 1


def test_truncate_gives_back_whole_blocks() -> None:
    allocator, table = make(2, length=14)
    ids = table.block_ids.copy()
    table.truncate(14)
    assert allocator.num_used == 8
    table.truncate(9)
    assert (table.length, allocator.num_used) == (9, 6)
    table.truncate(8)
    assert (table.length, allocator.num_used) == (8, 4)
    assert table.block_ids.tolist() == ids[:, :2].tolist()
    table.truncate(0)
    assert allocator.num_used == 0
    table.grow(5)
    assert table.block_ids.shape == (2, 2)


def test_truncating_into_a_shared_block_copies_it_at_the_next_write() -> None:
    allocator, table = make(1, length=8)
    other = table.fork()
    other.truncate(5)
    assert other.grow(1).tolist() == [[1, 2]]
    assert table.block_ids.tolist() == [[0, 1]]
    assert allocator.ref_count(1) == 1


@pytest.mark.parametrize(("length", "text"), [(7, "at most the 6 tokens there are, got 7"), (-1, "at least 0"), (2.0, "an int")])
def test_bad_lengths_change_nothing(length: Any, text: str) -> None:
    allocator, table = make(2, length=6)
    before = state(allocator, table)
    with pytest.raises(KVDockError, match=text):
        table.truncate(length)
    assert state(allocator, table) == before


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 7)])
def test_slots_exist_only_for_tokens_that_are_there(start: int, stop: int) -> None:
    _, table = make(2, length=6)
    with pytest.raises(IndexRangeError, match=rf"0 <= start <= stop <= 6, got start={start}, stop={stop}"):
        table.slot_mapping(start, stop)


def test_clear_starts_anew_with_any_number_of_rows() -> None:
    allocator, table = make(2, length=6)
    table.clear(5)
    assert (table.batch_size, table.length, allocator.num_used) == (5, 0, 0)
    table.grow(1)
    table.clear()
    assert (table.batch_size, allocator.num_used) == (5, 0)


def test_a_table_that_is_dropped_gives_its_blocks_back() -> None:
    allocator, table = make(2, length=6)
    other = table.fork()
    other.grow(3)
    del other
    gc.collect()
    assert allocator.num_used == 4
    assert allocator.ref_counts(table.block_ids).tolist() == [1, 1, 1, 1]
    del table
    gc.collect()
    assert allocator.num_free == allocator.num_blocks
    allocator.check_integrity()


def test_a_dropped_table_gives_back_what_it_held_last() -> None:
    """Not what it held when it was made: rows are exchanged and grow meanwhile."""
    allocator, table = make(1, length=3)
    table.select([0, 0])
    table.grow(20)
    table.truncate(9)
    assert allocator.num_used == 6
    del table
    gc.collect()
    assert allocator.num_used == 0


@pytest.mark.parametrize(("size", "rows", "text"), [(0, 1, "block_size"), (4, 0, "batch_size"), (4.0, 1, "block_size")])
def test_sizes_are_at_least_one(size: Any, rows: Any, text: str) -> None:
    with pytest.raises(KVDockError, match=f"BlockTable: {text}: expected"):
        BlockTable(BlockAllocator(4), size, rows)
