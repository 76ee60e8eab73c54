"""`NaivePrefixCache`: stores nothing, and refuses what the radix tree refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvdock.errors import ArgumentTypeError, ArgumentValueError, OutOfBlocksError, StaleHandleError, WrongThreadError
from kvdock.prefix import Cleared, NaivePrefixCache
from support_descriptors import in_thread

CALLS: dict[str, Callable[[NaivePrefixCache, Any], object]] = {
    "match_prefix": lambda cache, handle: cache.match_prefix([1]),
    "record_match": lambda cache, handle: cache.record_match(handle, 1),
    "lock_handle": lambda cache, handle: cache.lock_handle(handle),
    "insert_prefix": lambda cache, handle: cache.insert_prefix([1], [0]),
    "evict": lambda cache, handle: cache.evict(0),
    "discard_prefix": lambda cache, handle: cache.discard_prefix(handle, 0),
    "reset": lambda cache, handle: cache.reset(),
    "subscribe": lambda cache, handle: cache.subscribe(print),
    "check_integrity": lambda cache, handle: cache.check_integrity(),
}


@pytest.mark.parametrize("call", sorted(CALLS))
def test_every_call_notices_another_thread(call: str) -> None:
    cache = NaivePrefixCache(1)
    handle = cache.match_prefix([1]).handle
    with pytest.raises(WrongThreadError, match="NaivePrefixCache"):
        in_thread(lambda: CALLS[call](cache, handle))
    CALLS[call](cache, handle)


BAD: dict[str, tuple[Callable[[NaivePrefixCache, Any], object], type[Exception], str]] = {
    "tokens": (lambda cache, handle: cache.match_prefix([1.5]), ArgumentTypeError, "match_prefix: tokens"),
    "namespace": (lambda cache, handle: cache.match_prefix([1], "a"), ArgumentTypeError, "match_prefix: namespace"),  # type: ignore[arg-type]
    "recorded": (lambda cache, handle: cache.record_match(handle, -1), ArgumentValueError, "record_match: num_tokens"),
    "inserted": (lambda cache, handle: cache.insert_prefix([1.5, 2.5], [0]), ArgumentTypeError, "insert_prefix: tokens"),
    "blocks": (lambda cache, handle: cache.insert_prefix([1, 2], [0.5]), ArgumentTypeError, "insert_prefix: blocks"),
    "lengths": (lambda cache, handle: cache.insert_prefix([1, 2], [0, 1]), ArgumentValueError, "insert_prefix: blocks"),
    "priority": (
        lambda cache, handle: cache.insert_prefix([1, 2], [0], priority="a"),  # type: ignore[arg-type]
        ArgumentTypeError,
        "insert_prefix: priority",
    ),
    "where": (lambda cache, handle: cache.insert_prefix([1, 2], [0], ["a"]), ArgumentTypeError, "insert_prefix: namespace"),  # type: ignore[arg-type]
    "behind": (lambda cache, handle: cache.insert_prefix([1, 2], [1], behind=object()), StaleHandleError, "handle"),  # type: ignore[arg-type]
    "too large": (lambda cache, handle: cache.insert_prefix([1, 2], [2**30]), ArgumentValueError, "insert_prefix: blocks"),
    "twice": (lambda cache, handle: cache.insert_prefix([1, 2, 3, 4], [2, 2]), ArgumentValueError, "insert_prefix: blocks"),
    "negative": (lambda cache, handle: cache.insert_prefix([1, 2], [-2]), ArgumentValueError, "insert_prefix: blocks"),
    "evicted": (lambda cache, handle: cache.evict(1), OutOfBlocksError, "evict: num_blocks"),
    "evicted size": (lambda cache, handle: cache.evict(-1), ArgumentValueError, "evict: num_blocks"),
    "kept": (lambda cache, handle: cache.discard_prefix(handle, -1), ArgumentValueError, "discard_prefix: keep_blocks"),
    "unlocked": (lambda cache, handle: cache.lock_handle(handle, unlock=True), StaleHandleError, "lock_handle: handle"),
    "foreign": (lambda cache, handle: cache.lock_handle(NaivePrefixCache(2).match_prefix([]).handle), StaleHandleError, "handle"),
    "no handle": (lambda cache, handle: cache.record_match(object(), 1), StaleHandleError, "handle"),  # type: ignore[arg-type]
    "discarded": (lambda cache, handle: cache.discard_prefix(object(), 0), StaleHandleError, "handle"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_what_is_refused(case: str) -> None:
    call, error, subject = BAD[case]
    cache = NaivePrefixCache(2)
    handle = cache.match_prefix([1, 2]).handle
    before = cache.stats, cache.num_locks, cache.size_info
    with pytest.raises(error, match=subject):
        call(cache, handle)
    assert (cache.stats, cache.num_locks, cache.size_info) == before


def test_a_life_without_storing() -> None:
    cache, seen = NaivePrefixCache(2), list[object]()
    end = cache.subscribe(seen.append)
    handle, blocks = cache.match_prefix([1, 2, 3])
    result = cache.insert_prefix([1, 2], [4], behind=handle)
    assert (handle.cached_len, result.cached_len, result.handle.cached_len) == (0, 0, 0)
    for empty in (blocks, result.blocks, result.indices, cache.evict(0), cache.discard_prefix(handle, 2), cache.reset()):
        assert (empty.size, empty.dtype) == (0, np.int32)
    assert (cache.stats.lookups, cache.stats.lookup_tokens, cache.stats.hit_tokens, cache.stored_blocks().size) == (1, 3, 0, 0)
    assert [type(event) for event in seen] == [Cleared]
    end()
    cache.reset()
    assert len(seen) == 1


def test_locks_are_counted_until_a_reset_makes_all_handles_stale() -> None:
    cache = NaivePrefixCache(2)
    first, second = (cache.match_prefix([1, 2]).handle for _ in range(2))
    for handle in (first, second, first):
        cache.lock_handle(handle)
    cache.lock_handle(second, unlock=True)
    assert cache.num_locks == 2
    for _ in range(2):
        cache.reset()
        assert cache.num_locks == 0
        for handle in (first, second):
            with pytest.raises(StaleHandleError):
                cache.lock_handle(handle, unlock=True)
        first = cache.match_prefix([1, 2]).handle
        cache.lock_handle(first)
        assert cache.num_locks == 1
