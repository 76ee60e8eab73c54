"""What a manager does for a cache whose rows come and go: forgetting under open sequences, threads, padding that is longer than a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvdock.errors import ArgumentValueError, IndexRangeError, WrongThreadError
from kvdock.prefix import RadixPrefixCache
from kvdock.scheduler import CacheManager, SequenceBatch

TOKENS = list(range(18))


def computed(manager: CacheManager, tokens: list[int] = TOKENS) -> object:
    """Begin a sequence, and commit all of it."""
    seq = manager.begin(tokens)
    manager.commit(seq, [], computed=len(tokens))
    return seq


def test_open_sequences_keep_their_blocks_when_everything_is_forgotten() -> None:
    manager = CacheManager(32, 4)
    first = computed(manager)
    fork, second = manager.fork(first), manager.begin([*TOKENS, 5, 6])
    tables = [seq.block_table().tolist() for seq in (first, fork, second)]
    manager.reset(keep_open=True)
    manager.check_integrity()
    assert manager.prefix.size_info.total_size == 0
    assert [seq.block_table().tolist() for seq in (first, fork, second)] == tables
    assert manager.plan(TOKENS).cached_len == 0
    for seq in (first, fork, second):
        manager.finish(seq, keep=False)
        manager.check_integrity()
    assert manager.allocator.num_used == 0


def test_what_was_there_before_is_never_published_afterwards() -> None:
    manager = CacheManager(32, 4)
    first = computed(manager)
    half = manager.begin([*TOKENS, *TOKENS])
    manager.reset(keep_open=True)
    late = manager.fork(first)
    for seq in (first, late):
        manager.extend(seq, 6)
        manager.commit(seq, range(6), computed=24)
    manager.commit(half, [], computed=36)
    manager.truncate(half, 20)
    manager.check_integrity()
    assert manager.prefix.size_info.total_size == 0
    new = computed(manager)
    assert new.cached_len == 0
    manager.check_integrity()
    assert manager.prefix.size_info.total_size == 16
    assert not np.isin(new.block_table()[:4], np.concatenate([seq.block_table() for seq in (first, late, half)])).any()


def test_forgetting_is_refused_with_pins() -> None:
    manager = CacheManager(32, 4)
    computed(manager)
    with manager.pin(TOKENS), pytest.raises(ArgumentValueError, match="reset: expected no open sequences and no pins, got 1 open, 1 pins"):
        manager.reset(keep_open=True)
    with pytest.raises(ArgumentValueError, match="got 1 open, 0 pins"):
        manager.reset()
    manager.reset(keep_open=True)


CALLS: dict[str, Callable[[CacheManager, SequenceBatch], object]] = {
    "begin": lambda manager, batch: manager.begin(TOKENS),
    "truncate": lambda manager, batch: batch.truncate(3),
    "truncate all": lambda manager, batch: batch.truncate(0),
    "grow": lambda manager, batch: batch.grow(5),
    "close": lambda manager, batch: batch.close(),
    "commit": lambda manager, batch: manager.commit(batch.sequences[0], [1], computed=18),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_prefix_cache_that_another_thread_has_is_noticed_before_anything_changes(call: str) -> None:
    manager = CacheManager(32, 4)
    batch = SequenceBatch(manager, [computed(manager)], length=18)
    manager.hand_over()
    stay, has = threading.Event(), threading.Event()

    def look() -> None:
        manager.prefix.match_prefix([1])
        has.set()
        stay.wait()

    thread = threading.Thread(target=look)
    thread.start()
    has.wait()
    before = batch.length, batch.sequences[0]
    with pytest.raises(WrongThreadError, match=r"hand_over\(\)"):
        CALLS[call](manager, batch)
    stay.set()
    thread.join()
    assert (batch.length, batch.sequences[0]) == before
    manager.check_integrity()
    CALLS[call](manager, batch)
    manager.check_integrity()


def test_two_managers_cannot_have_one_prefix_cache() -> None:
    prefix = RadixPrefixCache(4)
    first, second = CacheManager(32, 4, prefix), CacheManager(32, 4, prefix)
    computed(first)
    first.hand_over()
    with pytest.raises(ArgumentValueError, match=r"prefix: expected the 0 tokens that were stored here, got 16. Fix: let nobody else"):
        second.begin(TOKENS)
    assert first.begin(TOKENS).cached_len == 16


def test_padding_may_be_longer_than_a_batch_so_far() -> None:
    manager = CacheManager(32, 4)
    rows = [manager.begin(TOKENS, at_most=0), manager.begin(TOKENS[:5], at_most=0)]
    batch = SequenceBatch(manager, rows, length=0, pads=[0, 13])
    batch.grow(10)
    assert [seq.num_tokens for seq in rows] == [10, 0]
    assert (batch.slot_mapping(0, 10)[1] == -1).all()
    batch.grow(8)
    assert [seq.num_tokens for seq in rows] == [18, 5]
    assert batch.slot_mapping(12, 15)[1].tolist() == [-1, *rows[1].slot_mapping(0, 2).tolist()]
    batch.truncate(0)
    assert batch.pads.tolist() == [0, 13]
    batch.grow(14)
    assert [seq.num_tokens for seq in rows] == [14, 1]
    manager.check_integrity()
    with pytest.raises(IndexRangeError, match="pads of at least 0, and room for what of the length, 9, is behind them"):
        SequenceBatch(manager, [manager.begin(TOKENS[:5])], length=9, pads=[3])
