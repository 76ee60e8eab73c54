from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvdock.errors import ArgumentValueError, IntegrityError
from kvdock.prefix import PrefixCache, create_prefix_cache
from kvdock.replay.pool import OPERATIONS, Begun, ReplayPool
from kvdock.replay.tokens import TokenIds
from kvdock.replay.trace import TraceRequest


def request(length: int, output: int = 0) -> TraceRequest:
    return TraceRequest(4, 0.0, length, output, None)


def ids(*values: int) -> TokenIds:
    return np.array(values, dtype=np.int32)


def pool_of(blocks: int, name: str = "radix", *, holds_output: bool = False) -> ReplayPool:
    """Return a pool of blocks of two tokens."""
    return ReplayPool(create_prefix_cache(name, block_size=2), blocks, holds_output=holds_output)


def begin(pool: ReplayPool, tokens: TokenIds, output: int = 0) -> Begun:
    begun = pool.begin(request(tokens.size, output), tokens)
    assert begun is not None
    return begun


def state(pool: ReplayPool) -> tuple[int, int, int]:
    """Return blocks in use, cached tokens and locks."""
    return pool.allocator.num_used, pool.prefix.size_info.total_size, pool.prefix.num_locks


def test_the_life_of_a_request() -> None:
    pool, tokens = pool_of(4), ids(1, 2, 3, 4, 5)
    begun = begin(pool, tokens)
    assert (begun.cached_len, begun.prefix.tolist(), begun.own.size) == (0, [], 3)
    assert state(pool) == (3, 0, 1)
    pool.store(begun, tokens)
    assert state(pool) == (3, 4, 1), "two whole blocks are the cache's, and the third is still the request's"
    assert begun.own.size == 1
    pool.finish(begun)
    assert state(pool) == (2, 4, 0)
    again = begin(pool, tokens)
    assert (again.cached_len, again.prefix.size, again.own.size) == (4, 2, 1)
    pool.store(again, tokens)
    pool.finish(again)
    pool.close()
    assert state(pool) == (0, 0, 0)


def test_output_takes_blocks_until_the_end_if_asked() -> None:
    for holds_output, blocks in ((False, 2), (True, 4)):
        pool, tokens = pool_of(8, holds_output=holds_output), ids(1, 2, 3)
        begun = begin(pool, tokens, output=4)
        assert pool.blocks_of(begun.request) == blocks == pool.allocator.num_used
        pool.store(begun, tokens)
        assert begun.own.size == blocks - 1
        pool.finish(begun)
        assert state(pool) == (1, 2, 0)


def test_just_what_is_missing_is_evicted() -> None:
    pool = pool_of(4)
    for tokens in (ids(1, 2), ids(3, 4), ids(5, 6)):
        begun = begin(pool, tokens)
        pool.store(begun, tokens)
        pool.finish(begun)
    begin(pool, ids(7, 8, 9, 10))
    assert pool.prefix.stats.evicted_tokens == 2
    assert [pool.prefix.match_prefix(tokens).handle.cached_len for tokens in (ids(1, 2), ids(3, 4), ids(5, 6))] == [0, 2, 2]
    assert pool.times.summary()["evict"].calls == 1


def test_one_that_does_not_fit_changes_nothing() -> None:
    pool = pool_of(4)
    first = begin(pool, ids(1, 2, 3, 4, 5))
    before, stats = state(pool), pool.prefix.stats
    assert pool.begin(request(4), ids(6, 7, 8, 9)) is None
    assert state(pool) == before
    assert pool.prefix.stats == stats, "and counts as no use"
    pool.finish(first)
    assert pool.begin(request(4), ids(6, 7, 8, 9)) is not None


def test_its_own_prefix_is_not_evicted_to_make_room() -> None:
    pool = pool_of(4)
    stored = begin(pool, ids(1, 2, 3, 4))
    pool.store(stored, ids(1, 2, 3, 4))
    pool.finish(stored)
    other = begin(pool, ids(8, 9))
    assert pool.begin(request(8), ids(1, 2, 3, 4, 5, 6, 7, 8)) is None, "two of four blocks are its own prefix, one the other's"
    pool.finish(other)
    longer = begin(pool, ids(1, 2, 3, 4, 5, 6, 7, 8))
    assert (longer.cached_len, pool.prefix.stats.evicted_tokens) == (4, 0)


def test_of_two_that_compute_the_same_one_frees_its_blocks() -> None:
    pool, tokens = pool_of(8), ids(1, 2, 3, 4)
    one, other = begin(pool, tokens), begin(pool, tokens)
    assert pool.allocator.num_used == 4
    pool.store(one, tokens)
    pool.store(other, tokens)
    assert state(pool) == (2, 4, 2)
    assert other.own.size == 0
    pool.finish(one)
    pool.finish(other)
    assert state(pool) == (2, 4, 0)
    pool.close()


def test_a_duplicate_in_part() -> None:
    pool = pool_of(8)
    one, other = begin(pool, ids(1, 2, 3, 4)), begin(pool, ids(1, 2, 5, 6, 7))
    pool.store(one, ids(1, 2, 3, 4))
    pool.store(other, ids(1, 2, 5, 6, 7))
    assert state(pool) == (4, 6, 2), "three cached, one with the odd token"
    pool.finish(other)
    pool.finish(one)
    pool.close()


def test_without_reuse_all_blocks_stay_the_requests() -> None:
    pool, tokens = pool_of(4, "naive"), ids(1, 2, 3, 4, 5)
    begun = begin(pool, tokens)
    pool.store(begun, tokens)
    assert (begun.own.size, pool.allocator.num_used) == (3, 3)
    pool.finish(begun)
    assert pool.allocator.num_used == 0
    pool.close()


def test_a_request_larger_than_the_pool() -> None:
    pool_of(4).check_fits(request(8, output=100))
    with pytest.raises(ArgumentValueError) as caught:
        pool_of(4).check_fits(request(9))
    assert str(caught.value) == (
        "trace: line 4: expected a request of at most the pool's 8 tokens (4 blocks of 2), "
        "got 9 input tokens, which need 5 blocks. Fix: replay it with a pool of at least 10 tokens"
    )
    with pytest.raises(ArgumentValueError, match="got 8 input tokens and 1 output tokens, which need 5 blocks"):
        pool_of(4, holds_output=True).check_fits(request(8, output=1))


def test_close_notices_a_request_that_is_not_done() -> None:
    pool = pool_of(4)
    begin(pool, ids(1, 2))
    with pytest.raises(IntegrityError, match="expected an empty pool at the end, got 1 blocks in use"):
        pool.close()


def test_every_operation_is_timed() -> None:
    pool, tokens = pool_of(2), ids(1, 2, 3, 4)
    for shift in range(3):
        begun = begin(pool, tokens + 10 * shift)
        pool.store(begun, tokens + 10 * shift)
        pool.finish(begun)
    calls = {name: times.calls for name, times in pool.times.summary().items()}
    assert tuple(calls) == OPERATIONS
    assert calls == {"match": 3, "record": 3, "lock": 6, "evict": 2, "insert": 3, "unlock": 6}


def test_slots_are_those_of_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, seen = pool_of(4), list[Any]()
    insert = pool.prefix.insert_prefix

    def spy(tokens: Any, slots: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(slots)
        return insert(tokens, slots, *args, **kwargs)

    monkeypatch.setattr(pool.prefix, "insert_prefix", spy)
    begun = begin(pool, ids(1, 2, 3, 4, 5))
    own = begun.own.tolist()
    pool.store(begun, ids(1, 2, 3, 4, 5))
    assert seen[0].tolist() == [2 * own[0], 2 * own[0] + 1, 2 * own[1], 2 * own[1] + 1]
    assert isinstance(pool.prefix, PrefixCache)
