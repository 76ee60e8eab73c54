"""What observers of a prefix cache are told, and what they may do."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvdock.errors import KVDockError, KVDockWarning
from kvdock.prefix import Cleared, NaivePrefixCache, RadixPrefixCache, Removed, Stored
from kvdock_conformance.checking.prefix_events import Replayed
from kvdock_conformance.checking.prefix_model import slots_of
from support_prefix import tree_of


def told(cache: RadixPrefixCache) -> list[Any]:
    """A list that each event is added to."""
    events: list[Any] = []
    cache.subscribe(events.append)
    return events


def test_stored_says_the_block_before_and_only_what_is_new() -> None:
    cache = RadixPrefixCache(2)
    events = told(cache)
    cache.insert_prefix([1, 2, 3, 4, 5], [*slots_of([7, 3], 2), 0], ("a",))
    cache.insert_prefix([1, 2, 8, 8], slots_of([9, 4], 2), ("a",))
    cache.insert_prefix([1, 2], slots_of([5], 2), ("a",))
    first, second = events
    assert isinstance(first, Stored)
    assert (first.namespace, first.parent, first.tokens.tolist(), first.blocks.tolist()) == (("a",), None, [1, 2, 3, 4], [7, 3])
    assert (second.namespace, second.parent, second.tokens.tolist(), second.blocks.tolist()) == (("a",), 7, [8, 8], [4])


def test_one_eviction_is_one_event_and_a_refused_one_none() -> None:
    cache = RadixPrefixCache(1)
    cache.insert_prefix([1, 2], [0, 1])
    cache.insert_prefix([3, 4], [2, 3])
    events = told(cache)
    with pytest.raises(KVDockError):
        cache.evict(5)
    cache.evict(0)
    assert events == []
    slots = cache.evict(3)
    (event,) = events
    assert isinstance(event, Removed)
    assert event.blocks.tolist() == slots.tolist() == [0, 1, 3]
    cache.reset()
    assert isinstance(events[1], Cleared)


@pytest.mark.parametrize("block_size", [1, 3])
def test_the_stream_alone_says_what_is_stored_where(block_size: int) -> None:
    choose = random.Random(1)  # noqa: S311 - no secret
    cache, free = RadixPrefixCache(block_size), list(range(40))
    observer = Replayed(block_size)
    cache.subscribe(observer)
    for _ in range(600):
        tokens = [choose.randrange(2) for _ in range(choose.randrange(8 * block_size))]
        space = choose.choice([(), (1,), (True,)])
        count = len(tokens) // block_size
        if len(free) < count:
            free += [slot // block_size for slot in cache.evict(count * block_size).tolist()[::block_size]]
        blocks = [free.pop() for _ in range(count)]
        cache.insert_prefix(tokens, slots_of(blocks, block_size) + [0] * (len(tokens) % block_size), space)
        free += [block for block in blocks if block not in observer.where]
        stored: dict[int, tuple[str, int | None, tuple[int, ...]]] = {}
        for (namespace, path), run in tree_of(cache).items():
            ids = run[0]
            assert isinstance(ids, list)
            start = len(path) - len(ids)
            for at, number in enumerate(ids):
                above = ids[at - 1] if at else (last_of(cache, namespace, path[:start]) if start else None)
                stored[number] = namespace, above, path[start + at]
        assert observer.where == stored
    assert observer.wrong == []
    assert len(observer.events) > 300


def last_of(cache: RadixPrefixCache, namespace: str, path: tuple[tuple[int, ...], ...]) -> int:
    """The block that a prefix ends with."""
    run = tree_of(cache)[namespace, path][0]
    assert isinstance(run, list)
    number = run[-1]
    assert isinstance(number, int)
    return number


def test_an_observer_that_raises_is_reported_and_the_others_and_the_call_go_on() -> None:
    cache = RadixPrefixCache(1)

    def fails(event: object) -> None:
        raise ValueError("as the test says")

    cache.subscribe(fails)
    events = told(cache)
    with pytest.warns(KVDockWarning, match=r"ValueError: as the test says. Fix: .*fails"):
        made = cache.insert_prefix([1], [0])
    assert made.indices.tolist() == [0]
    assert len(events) == 1
    cache.check_integrity()


def test_what_an_observer_causes_comes_after_what_is_waiting() -> None:
    cache = RadixPrefixCache(1)
    order: list[tuple[str, str]] = []

    def first(event: object) -> None:
        order.append(("first", type(event).__name__))
        if isinstance(event, Removed):
            cache.insert_prefix([9], [9])

    cache.subscribe(first)
    cache.subscribe(lambda event: order.append(("second", type(event).__name__)))
    cache.insert_prefix([1], [0])
    cache.evict(1)
    assert order == [(who, what) for what in ("Stored", "Removed", "Stored") for who in ("first", "second")]
    cache.check_integrity()


def test_unsubscribing_ends_it_once_and_only_ones_own() -> None:
    cache = RadixPrefixCache(1)
    events: list[Any] = []
    one, two = cache.subscribe(events.append), cache.subscribe(events.append)
    cache.insert_prefix([1], [0])
    assert len(events) == 2
    one()
    one()
    cache.insert_prefix([2], [1])
    assert len(events) == 3
    two()
    cache.insert_prefix([3], [2])
    assert len(events) == 3


def test_an_event_does_not_alias_what_is_stored() -> None:
    cache = RadixPrefixCache(1)
    events = told(cache)
    cache.insert_prefix([1, 2], [0, 1])
    events[0].tokens[:] = 99
    events[0].blocks[:] = 99
    assert cache.match_prefix([1, 2]).indices.tolist() == [0, 1]
    cache.check_integrity()
    assert events[0].blocks.dtype == events[0].tokens.dtype == np.int64


def test_a_naive_cache_tells_of_resets_only() -> None:
    cache = NaivePrefixCache(1)
    events: list[Any] = []
    cache.subscribe(events.append)
    cache.insert_prefix([1], [0])
    cache.reset()
    assert [type(event) for event in events] == [Cleared]
