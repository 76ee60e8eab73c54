from __future__ import annotations

import numpy as np
import pytest

from kvdock.errors import ArgumentValueError
from kvdock.replay.pool import OPERATIONS, Begun, ReplayPool
from kvdock.replay.tokens import TokenIds
from kvdock.replay.trace import TraceRequest
from kvdock.scheduler import CacheManager


def request(length: int, output: int = 0) -> TraceRequest:
    return TraceRequest(4, 0.0, length, output, None)


def ids(*values: int) -> TokenIds:
    return np.array(values, dtype=np.int32)


def pool_of(blocks: int, name: str = "radix", *, holds_output: bool = False) -> ReplayPool:
    """Return a pool of blocks of two tokens."""
    return ReplayPool(CacheManager(blocks, 2, name), holds_output=holds_output)


def begin(pool: ReplayPool, tokens: TokenIds, output: int = 0) -> Begun:
    begun = pool.begin(request(tokens.size, output), tokens)
    assert begun is not None
    return begun


def through(pool: ReplayPool, tokens: TokenIds) -> Begun:
    """Let a request begin, store and finish."""
    begun = begin(pool, tokens)
    pool.store(begun)
    pool.finish(begun)
    return begun


def state(pool: ReplayPool) -> tuple[int, int, int]:
    """Return blocks in use, cached tokens and open sequences."""
    manager = pool.manager
    return manager.allocator.num_used, manager.prefix.size_info.total_size, manager.num_sequences


def test_the_life_of_a_request() -> None:
    pool, tokens = pool_of(4), ids(1, 2, 3, 4, 5)
    begun = begin(pool, tokens)
    assert (begun.cached_len, begun.sequence.block_table().size, begun.sequence.num_tokens) == (0, 3, 5)
    assert state(pool) == (3, 0, 1)
    pool.store(begun)
    assert state(pool) == (3, 4, 1), "two whole blocks are the cache's, and the third is still the request's"
    pool.finish(begun)
    assert state(pool) == (2, 4, 0)
    assert through(pool, tokens).cached_len == 4
    pool.close()
    assert state(pool) == (0, 0, 0)


def test_all_of_a_prompt_can_be_found() -> None:
    pool = pool_of(2)
    assert [through(pool, ids(1, 2, 3, 4)).cached_len for _ in range(3)] == [0, 4, 4]
    assert through(pool, ids(1, 2)).cached_len == 2
    assert pool.manager.prefix.stats.evicted_tokens == 0
    again = begin(pool, ids(1, 2, 3, 4))
    assert again.sequence.num_tokens == 4, "and no room is made behind it"


def test_output_takes_blocks_until_the_end_if_asked() -> None:
    for holds_output, blocks in ((False, 2), (True, 4)):
        pool, tokens = pool_of(8, holds_output=holds_output), ids(1, 2, 3)
        begun = begin(pool, tokens, output=4)
        assert pool.manager.allocator.num_used == blocks
        pool.store(begun)
        assert state(pool) == (blocks, 2, 1)
        pool.finish(begun)
        assert state(pool) == (1, 2, 0)


def test_a_request_gets_its_output_too_or_nothing() -> None:
    pool = pool_of(4, holds_output=True)
    first = begin(pool, ids(1, 2), output=1)
    assert pool.begin(request(2, 3), ids(7, 8)) is None, "there is room for the prompt alone"
    assert state(pool) == (2, 0, 1)
    pool.finish(first)
    assert begin(pool, ids(7, 8), output=3).sequence.num_tokens == 5


def test_just_what_is_missing_is_evicted() -> None:
    pool = pool_of(4)
    for tokens in (ids(1, 2), ids(3, 4), ids(5, 6)):
        through(pool, tokens)
    begin(pool, ids(7, 8, 9, 10))
    prefix = pool.manager.prefix
    assert prefix.stats.evicted_tokens == 2
    assert [prefix.match_prefix(tokens).handle.cached_len for tokens in (ids(1, 2), ids(3, 4), ids(5, 6))] == [0, 2, 2]


def test_one_that_does_not_fit_changes_nothing() -> None:
    pool = pool_of(4)
    through(pool, ids(6, 7))
    first = begin(pool, ids(1, 2, 3, 4, 5))
    before, stats = state(pool), pool.manager.prefix.stats
    assert pool.begin(request(4), ids(6, 7, 8, 9)) is None
    assert state(pool) == before
    assert pool.manager.prefix.stats == stats, "and counts as no use"
    assert pool.times.summary()["begin"].calls == 2
    pool.finish(first)
    assert begin(pool, ids(6, 7, 8, 9)).cached_len == 2


def test_of_two_that_compute_the_same_one_frees_its_blocks() -> None:
    pool, tokens = pool_of(8), ids(1, 2, 3, 4)
    one, other = begin(pool, tokens), begin(pool, tokens)
    assert pool.manager.allocator.num_used == 4
    pool.store(one)
    pool.store(other)
    assert state(pool) == (2, 4, 2)
    pool.finish(one)
    pool.finish(other)
    assert state(pool) == (2, 4, 0)
    pool.close()


def test_without_reuse_all_blocks_stay_the_requests() -> None:
    pool, tokens = pool_of(4, "naive"), ids(1, 2, 3, 4, 5)
    begun = begin(pool, tokens)
    pool.store(begun)
    assert state(pool) == (3, 0, 1)
    pool.finish(begun)
    assert pool.manager.allocator.num_used == 0
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
    with pytest.raises(ArgumentValueError, match="expected no open sequences and no pins, got 1 open"):
        pool.close()


def test_every_operation_is_timed() -> None:
    pool = pool_of(3, holds_output=True)
    for shift in range(3):
        tokens = ids(1, 2, 3, 4) + 10 * shift
        begun = begin(pool, tokens, output=shift % 2)
        pool.store(begun)
        pool.finish(begun)
    calls = {name: times.calls for name, times in pool.times.summary().items()}
    assert tuple(calls) == OPERATIONS
    assert calls == {"plan": 3, "begin": 3, "extend": 1, "commit": 3, "finish": 3}
