"""What files ask of a manager: which blocks are cached, how much room there is, and what is not there of a sequence."""

from __future__ import annotations

import pytest

import kvdock
from kvdock.errors import ArgumentTypeError, StaleHandleError, WrongThreadError
from kvdock.scheduler.cached import block_sizes, cached_blocks, note_only_needed, num_blocks, unused_size, use_prefix
from support_files import KINDS, compute, pool

pytestmark = pytest.mark.backend

IDS = list(range(80))


def test_one_group() -> None:
    manager = kvdock.CacheManager(10, 4)
    assert (block_sizes(manager), num_blocks(manager), unused_size(manager)) == ((4,), 10, 40)
    seq = manager.begin(IDS[:9], reserve=4)
    blocks = seq.block_table()
    assert unused_size(manager) == 40 - 12 - 4, "what is promised is not there for others"
    assert cached_blocks(manager, IDS)[0] == 0
    manager.commit(seq, (), computed=9)
    length, (found,) = cached_blocks(manager, IDS)
    assert (length, found.tolist()) == (8, blocks[:2].tolist())
    manager.finish(seq)
    assert unused_size(manager) == 40 - 8, "what is cached could be evicted, and is in use all the same"
    assert cached_blocks(manager, IDS, ("a",))[0] == 0
    assert manager.prefix.stats.lookups == 1, "that of begin"


def test_a_null_block_is_no_room() -> None:
    manager = kvdock.CacheManager(10, 4, null_block=True)
    assert unused_size(manager) == 36


@pytest.mark.parametrize("kind", KINDS)
def test_groups(kind: str) -> None:
    cache, manager = pool(kind, num_blocks=200)
    assert block_sizes(manager) == tuple(group.block_size for group in cache.groups)
    assert num_blocks(manager) == 200
    before = unused_size(manager)
    compute(cache, manager, IDS)
    length, tables = cached_blocks(manager, IDS)
    assert length == len(IDS) // manager.block_size * manager.block_size
    assert [len(table) for table in tables] == [length // manager.block_size * group.width(manager.block_size) for group in cache.groups]
    there = [block for table in tables for block in table.tolist() if block >= 0]
    assert len(set(there)) == len(there) == manager.blocks_used
    assert unused_size(manager) < before
    assert manager.prefix.evict(0).size == 0


@pytest.mark.parametrize("spared", [False, True])
def test_what_was_never_written_is_not_found_before_the_end(spared: bool) -> None:
    _, manager = pool("windows", num_blocks=200)
    count = len(IDS) // manager.block_size * manager.block_size
    seq = manager.begin(IDS[:count])
    used = manager.blocks_used
    if spared:  # as `note_written` has it: these were written, and are there as long as there is room
        manager.note_written([seq], [count])
    else:
        note_only_needed(manager, seq, count)
        assert manager.blocks_used < used
    manager.commit(seq, (), computed=count)
    manager.finish(seq)
    ends = manager.can_go_on([*IDS[:count], 0])
    assert ends[count]
    assert bool(ends[1 : count // 2].any()) == spared
    manager.check_integrity()


def test_a_use_changes_the_order_and_nothing_else() -> None:
    manager = kvdock.CacheManager(10, 2)
    for start in (0, 10):
        seq = manager.begin([start, start + 1])
        manager.commit(seq, (), computed=2)
        manager.finish(seq)
    stats, size = manager.prefix.stats, manager.prefix.size_info
    use_prefix(manager, [0, 1, 5, 5])
    assert [each.tolist() for each, _ in manager.prefix.stored_prefixes()] == [[0, 1], [10, 11]]
    use_prefix(manager, [7, 7])
    assert (manager.prefix.stats, manager.prefix.size_info) == (stats, size)
    manager.check_integrity()


def test_what_is_refused() -> None:
    import threading

    manager = kvdock.CacheManager(10, 2)
    with pytest.raises(ArgumentTypeError, match="cached_blocks: tokens: expected integers"):
        cached_blocks(manager, [0.5])
    seq = manager.begin([1, 2])
    manager.abort(seq)
    with pytest.raises(StaleHandleError):
        note_only_needed(manager, seq, 1)
    errors: list[BaseException] = []

    def other() -> None:
        try:
            unused_size(manager)
        except WrongThreadError as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(errors) == 1
