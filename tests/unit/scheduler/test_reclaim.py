"""`BlockAllocator(reclaim=)`: blocks that can be done without are asked for before a request fails."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from kvdock.errors import OutOfBlocksError, WrongThreadError
from kvdock.prefix import RadixPrefixCache
from kvdock.prefix.inputs import slots_of
from kvdock.scheduler import BlockAllocator, BlockTable


class Spare:
    """Holds blocks that it can do without, and gives back as many as are asked for, or none."""

    def __init__(self, num_blocks: int, spare: int) -> None:
        self.allocator = BlockAllocator(num_blocks, reclaim=self.reclaim)
        self.blocks = self.allocator.allocate(spare).tolist()
        self.asked: list[int] = []

    def reclaim(self, n: int) -> None:
        self.asked.append(n)
        if n <= len(self.blocks):
            self.allocator.release(self.blocks[:n])
            del self.blocks[:n]


def test_only_what_lacks_is_asked_for() -> None:
    spare = Spare(8, 5)
    assert spare.allocator.allocate(3).tolist() == [5, 6, 7]
    assert spare.asked == []
    assert sorted(spare.allocator.allocate(2).tolist()) == [0, 1]
    spare.allocator.release([6])
    assert spare.allocator.allocate(3).size == 3
    assert (spare.asked, spare.blocks, spare.allocator.num_free) == ([2, 2], [4], 0)
    spare.allocator.check_integrity()


def test_nothing_is_asked_for_when_nothing_lacks() -> None:
    spare = Spare(4, 4)
    assert spare.allocator.allocate(0).size == 0
    assert spare.asked == []


def test_a_request_that_cannot_be_served_changes_nothing() -> None:
    spare = Spare(8, 5)
    with pytest.raises(OutOfBlocksError, match=r"at most 3 blocks \(free now, of 8 in the pool\), got a request for 9"):
        spare.allocator.allocate(9)
    assert (spare.asked, spare.blocks, spare.allocator.num_free) == ([6], [0, 1, 2, 3, 4], 3)
    assert spare.allocator.allocate(8).size == 8, "and it is asked again"


def test_one_that_frees_too_few_is_not_asked_twice() -> None:
    allocator = BlockAllocator(4, reclaim=lambda n: allocator.release(held[:1]))
    held = allocator.allocate(4)
    with pytest.raises(OutOfBlocksError, match="at most 1 blocks"):
        allocator.allocate(2)
    assert allocator.num_free == 1


def test_blocks_released_later_come_first() -> None:
    spare = Spare(6, 3)
    spare.allocator.release_later(spare.allocator.allocate(3))
    assert spare.allocator.allocate(3).size == 3
    assert spare.asked == []


def test_what_it_raises_is_raised_and_nothing_is_taken() -> None:
    def fail(n: int) -> None:
        raise RuntimeError(f"no {n} blocks today")

    allocator = BlockAllocator(4, reclaim=fail)
    allocator.allocate(3)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no 1 blocks today"):
            allocator.allocate(2)
    assert allocator.num_free == 1
    assert allocator.allocate(1).tolist() == [3]


def test_an_allocation_of_its_own_reclaims_nothing() -> None:
    """Else one that needs a block to free others would never end."""
    errors: list[Any] = []

    def reclaim(n: int) -> None:
        try:
            allocator.allocate(1)
        except OutOfBlocksError as error:
            errors.append(error)
        allocator.release(held)

    allocator = BlockAllocator(2, reclaim=reclaim)
    held = allocator.allocate(2)
    assert allocator.allocate(2).size == 2
    assert len(errors) == 1


def test_it_runs_outside_the_lock_and_only_for_the_owner() -> None:
    spare = Spare(4, 2)
    seen: list[Any] = []

    def other() -> None:
        seen.append(spare.allocator.num_free)
        try:
            spare.allocator.allocate(4)
        except WrongThreadError as error:
            seen.append(error)

    def reclaim(n: int) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(timeout=10)
        spare.reclaim(n)

    spare.allocator._reclaim = reclaim
    assert spare.allocator.allocate(3).size == 3
    assert seen[0] == 2, "other threads may look meanwhile"
    assert isinstance(seen[1], WrongThreadError)
    assert spare.asked == [1], "another thread's request reclaims nothing"


def test_a_table_grows_into_what_is_reclaimed() -> None:
    spare = Spare(6, 4)
    table = BlockTable(spare.allocator, block_size=2, batch_size=2)
    table.grow(2)
    assert (spare.asked, table.num_blocks) == ([], 2)
    table.grow(3)
    assert (spare.asked, table.num_blocks) == ([4], 6)
    with pytest.raises(OutOfBlocksError):
        table.grow(2)
    assert (table.length, table.num_blocks) == (5, 6)


def test_evicting_from_a_prefix_cache() -> None:
    """As a cache manager does it: each stored block has one holder for the tree."""
    prefix = RadixPrefixCache(block_size=4)

    def reclaim(n: int) -> None:
        if prefix.size_info.evictable_size >= n * 4:
            allocator.release(prefix.evict(n * 4)[::4] // 4)

    allocator = BlockAllocator(8, reclaim=reclaim)
    for first in (0, 100):
        blocks = allocator.allocate(3)
        prefix.insert_prefix(np.arange(first, first + 12), slots_of(blocks, 4))
    locked = prefix.match_prefix(np.arange(12)).handle
    prefix.lock_handle(locked)
    assert allocator.allocate(4).size == 4
    assert prefix.match_prefix(np.arange(100, 112)).handle.cached_len == 4
    with pytest.raises(OutOfBlocksError):
        allocator.allocate(2)
    assert prefix.size_info.total_size == 16, "one evictable block is not enough for two"
    assert allocator.allocate(1).size == 1
    assert prefix.stored_blocks().tolist() == [0, 1, 2]
    prefix.check_integrity()
    allocator.check_integrity()
