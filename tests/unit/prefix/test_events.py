"""What observers of a prefix cache are told, and what they may do."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest

from kvdock.errors import KVDockError, KVDockWarning, WrongThreadError
from kvdock.prefix import Cleared, NaivePrefixCache, RadixPrefixCache, Removed, Stored
from kvdock_conformance.checking.prefix_events import Replayed
from support_prefix import tree_of


def told(cache: RadixPrefixCache) -> list[Any]:
    """A list that each event is added to."""
    events: list[Any] = []
    cache.subscribe(events.append)
    return events


def test_stored_says_the_block_before_and_only_what_is_new() -> None:
    cache = RadixPrefixCache(2)
    events = told(cache)
    cache.insert_prefix([1, 2, 3, 4, 5], [7, 3], ("a",))
    cache.insert_prefix([1, 2, 8, 8], [9, 4], ("a",))
    cache.insert_prefix([1, 2], [5], ("a",))
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
    blocks = cache.evict(3)
    (event,) = events
    assert isinstance(event, Removed)
    assert event.blocks.tolist() == blocks.tolist() == [0, 1, 3]
    cache.reset()
    assert isinstance(events[1], Cleared)


def test_what_is_stored_behind_a_handle_says_the_block_before_it() -> None:
    cache = RadixPrefixCache(2)
    first = cache.insert_prefix([1, 2, 3, 4], [5, 6])
    events = told(cache)
    end = cache.insert_prefix([7, 8], [9], behind=first.handle).handle
    middle = cache.match_prefix([1, 2]).handle
    cache.insert_prefix([2**40, 2], [1], behind=middle)
    cache.insert_prefix([], [], behind=end)
    assert [(event.parent, event.tokens.tolist(), event.blocks.tolist()) for event in events] == [(6, [7, 8], [9]), (5, [2**40, 2], [1])]


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
            free += cache.evict(count).tolist()
        blocks = [free.pop() for _ in range(count)]
        cache.insert_prefix(tokens, blocks, space)
        free += [block for block in blocks if block not in observer.where]
        stored: dict[int, tuple[str, int | None, tuple[int, ...]]] = {}
        blocks_at = tree_of(cache)
        for (namespace, path), (number, *_) in blocks_at.items():
            stored[number] = namespace, blocks_at[namespace, path[:-1]][0] if path[1:] else None, path[-1]
        assert observer.where == stored
    assert observer.wrong == []
    assert len(observer.events) > 300


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
    assert (events[0].blocks.dtype, events[0].tokens.dtype) == (np.int32, np.int64)


def test_a_naive_cache_tells_of_resets_only() -> None:
    cache = NaivePrefixCache(1)
    events: list[Any] = []
    cache.subscribe(events.append)
    cache.insert_prefix([1], [0])
    cache.reset()
    assert [type(event) for event in events] == [Cleared]


@pytest.mark.parametrize("kind", [RadixPrefixCache, NaivePrefixCache])
def test_who_subscribes_claims_no_thread(kind: Any) -> None:
    cache, events, raised = kind(1), list[Any](), list[type]()
    end = cache.subscribe(events.append)

    def engine() -> None:
        cache.insert_prefix([1], [0])
        cache.reset()
        here.wait(10)

    def subscribes() -> None:
        with pytest.raises(WrongThreadError) as caught:
            cache.subscribe(events.append)
        raised.append(caught.type)

    here = threading.Barrier(2)
    thread = threading.Thread(target=engine)
    thread.start()
    while not events or not isinstance(events[-1], Cleared):
        thread.join(0.01)
    subscribes()  # it belongs to the engine's thread, which runs
    here.wait(10)
    thread.join()
    assert raised == [WrongThreadError]
    end()
    cache.subscribe(events.append)
