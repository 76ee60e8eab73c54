"""What publishers, readers and indexes are told that they cannot do, and events in any order."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvdock
from kvdock.integrations.kv_events import (
    AllBlocksCleared,
    BlockIndex,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    KVEventPublisher,
    KVEventSubscriber,
    read_batch,
)
from support_kv_events import inproc, store, stored, until
from support_slow import examples

TypeError_, ValueError_ = kvdock.ArgumentTypeError, kvdock.ArgumentValueError
ADDRESS = "Fix: pass one such as 'tcp://127.0.0.1:5557' that nobody else has bound"
PART = f"no text, or one that ZeroMQ reads a part of. {ADDRESS}"
MOST = 2**30 - 1
OVER = "Fix: look for a unit or a product that is meant otherwise"


HALF, FIRST = "Fix: take out what is half of a surrogate pair", "Fix: pass the data-parallel rank of the first manager"


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"topic": 5}, TypeError_, "topic: expected text, got 5. Fix: pass a str"),
        ({"topic": b"kv"}, TypeError_, "topic: expected text, got b'kv'. Fix: pass a str"),
        (
            {"topic": "\ud800"},
            ValueError_,
            r"topic: expected text that UTF-8 can write, got '\ud800'. " + HALF,
        ),
        ({"medium": 5}, TypeError_, "medium: expected text, got 5. Fix: pass a str"),
        (
            {"medium": "\ud800"},
            ValueError_,
            r"medium: expected text that UTF-8 can write, got '\ud800'. " + HALF,
        ),
        (
            {"first_rank": 2**64},
            ValueError_,
            f"first_rank: expected less than {MOST}, got {2**64}. " + FIRST,
        ),
        ({"buffer_steps": 2**31}, ValueError_, f"buffer_steps: expected at most {MOST}, got {2**31}. {OVER}"),
        (
            {"buffer_steps": 2**30, "replay_endpoint": "inproc://x"},
            ValueError_,
            f"buffer_steps: expected at most {MOST}, got {2**30}. {OVER}",
        ),
        ({"buffer_bytes": -1}, ValueError_, "buffer_bytes: expected at least 0, got -1"),
        ({"replay_endpoint": 5}, ValueError_, f"replay_endpoint: expected an address to bind, got 5: {PART}"),
        (
            {"replay_endpoint": "inproc://a\0b"},
            ValueError_,
            f"replay_endpoint: expected an address to bind, got 'inproc://a\\x00b': {PART}",
        ),
    ],
)
def test_a_publisher_that_is_not_made_leaves_nothing_bound(change: dict[str, Any], kind: type[Exception], text: str) -> None:
    manager, where, threads = kvdock.CacheManager(8, 4), inproc(), threading.active_count()
    with pytest.raises(kind) as caught:
        KVEventPublisher(manager, endpoint=where, **change)
    assert str(caught.value) == f"KVEventPublisher: {text}"
    assert threading.active_count() <= threads  # an earlier one may end meanwhile
    assert not manager.prefix._events
    end = time.monotonic() + 10  # ZeroMQ gives an address back in a thread of its own
    while True:
        try:
            assert KVEventPublisher(manager, endpoint=where).close()
            break
        except kvdock.ArgumentValueError:
            assert time.monotonic() < end, "it is bound still"
            time.sleep(0.01)


@pytest.mark.parametrize("where", [None, 5, b"inproc://q", "", "inproc://", "inproc://\ud800", "inproc://" + "x" * 300, "x://y"], ids=ascii)
def test_addresses_that_are_none(where: Any) -> None:
    for make in (lambda: KVEventPublisher(kvdock.CacheManager(8, 4), endpoint=where), lambda: KVEventSubscriber(where, bind=True)):
        with pytest.raises(ValueError_, match=r"KVEvent\w+: endpoint: expected an address to bind, got .*Fix: pass one such as"):
            make()


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"topic": None}, TypeError_, "topic: expected text, got None. Fix: pass a str"),
        ({"topic": "\ud800"}, ValueError_, r"topic: expected text that UTF-8 can write, got '\ud800'. " + HALF),
        ({"index": 3}, TypeError_, "index: expected a BlockIndex, got 3. Fix: leave it out for a new one"),
        ({"max_message_bytes": 2**70}, ValueError_, f"max_message_bytes: expected at most {2**63 - 1}, got {2**70}. {OVER}"),
        ({"max_waiting": 2**31}, ValueError_, f"max_waiting: expected at most {2**31 - 1}, got {2**31}. {OVER}"),
        ({"replay_timeout": "a"}, TypeError_, "replay_timeout: expected seconds, got 'a'. Fix: pass a number"),
        (
            {"replay_timeout": -1}, ValueError_,
            "replay_timeout: expected seconds, 0 or more, got -1. Fix: pass float('inf') to wait for as long as it takes",
        ),
    ],
)  # fmt: skip
def test_a_reader_that_is_not_made(change: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        KVEventSubscriber(**{"endpoint": inproc(), **change})
    assert str(caught.value) == f"KVEventSubscriber: {text}"


@pytest.mark.parametrize(("timeout", "kind"), [(math.nan, ValueError_), (-1, ValueError_), (None, TypeError_), (True, TypeError_)])
def test_a_reader_waits_for_seconds(timeout: Any, kind: type[Exception]) -> None:
    with KVEventSubscriber(inproc()) as reader, pytest.raises(kind, match=r"KVEventSubscriber\.poll: timeout: expected seconds"):
        reader.poll(timeout)


@pytest.mark.parametrize("timeout", [math.inf, 1e300, 10**12])
def test_a_reader_may_wait_for_as_long_as_it_takes(timeout: float) -> None:
    manager, where = kvdock.CacheManager(8, 4), inproc()
    with KVEventSubscriber(where, bind=True, replay_timeout=timeout) as reader, KVEventPublisher(manager, endpoint=where, bind=False):
        reader.poll(0.02)
        store(manager, range(8))
        assert [len(event.token_ids) for batch in reader.poll(timeout) for event in batch.events] == [8]


def test_a_reader_that_is_closed_twice_says_so() -> None:
    reader = KVEventSubscriber(inproc())
    reader.close()
    reader.close()
    with pytest.raises(ValueError_) as caught:
        reader.poll()
    assert str(caught.value) == "KVEventSubscriber.poll: expected an open reader, got a closed one. Fix: make another one"


def test_two_publishers_of_one_manager_are_two_streams() -> None:
    """With one rank number each, and one of them ends before the other."""
    manager = kvdock.CacheManager(32, 4)
    ends = [KVEventPublisher(manager, endpoint=inproc(), hashes="whole") for _ in range(2)]
    with KVEventSubscriber(ends[0].endpoint) as one, KVEventSubscriber(ends[1].endpoint) as other:
        time.sleep(0.05)
        store(manager, range(8))
        for reader in (one, other):
            until(reader, lambda reader=reader: reader.index.parents() == stored(manager))
        assert ends[0].close()
        store(manager, range(100, 108))
        until(other, lambda: other.index.parents() == stored(manager))
        assert (len(one.index.parents()), len(other.index.parents()), one.num_missed, other.num_missed) == (2, 4, 0, 0)
    assert ends[1].close()


@pytest.mark.parametrize("payload", [None, "abc", 5, [1.0, []]])
def test_only_bytes_are_read(payload: Any) -> None:
    with pytest.raises(TypeError_) as caught:
        read_batch(payload)
    assert str(caught.value) == f"read_batch: payload: expected bytes, got {payload!r}. Fix: pass the third frame of a message"


# The index


def put(*blocks: int, size: int = 1) -> BlockStored:
    return BlockStored(blocks, None, [0] * len(blocks) * size, size)


def index_of(*events: Any, most: int = 2**22, rank: int = 0) -> BlockIndex:
    index = BlockIndex(most)
    index.apply(KVEventBatch(0.0, events, rank))
    return index


FULL = [
    [BlockRemoved([1, 2]), put(4, 5)],
    [AllBlocksCleared(), put(4, 5, 6)],
    [put(1, 2, 3)],
    [BlockRemoved([1]), BlockRemoved([1]), put(9)],
    [BlockRemoved([1]), put(7), AllBlocksCleared(), put(7, 8), put(8, 9)],
]


@pytest.mark.parametrize("events", FULL, ids=range(len(FULL)))
def test_a_full_index_takes_what_leaves_no_more_in_it(events: list[Any]) -> None:
    """A step's events are one batch with `auto_flush=False`: what it removes makes room for what it stores."""
    index = index_of(put(1, 2, 3), most=3)
    index.apply(KVEventBatch(1.0, events))
    expected = {1, 2, 3}
    for event in events:
        names = set(getattr(event, "block_hashes", ()))
        expected = expected | names if isinstance(event, BlockStored) else expected - (names or expected)
    assert index.parents().keys() == expected


@pytest.mark.parametrize(
    "events", [[put(4)], [put(4), BlockRemoved([1])], [BlockRemoved([9]), put(8)], [AllBlocksCleared(), put(4, 5, 6, 7)]]
)
def test_a_full_index_refuses_more_at_any_event(events: list[Any]) -> None:
    index = index_of(put(1, 2, 3), most=3)
    with pytest.raises(kvdock.CapacityError) as caught:
        index.apply(KVEventBatch(1.0, events))
    fix = "Fix: raise max_blocks if the publishers' pools are so large"
    assert str(caught.value) == f"BlockIndex: expected at most max_blocks = 3, got 4 blocks. {fix}"
    assert index.parents().keys() == {1, 2, 3}


def test_ranks_of_nothing_are_bounded_too() -> None:
    index = index_of(most=2)
    index.apply(KVEventBatch(0.0, [], 5))
    with pytest.raises(kvdock.CapacityError, match="at most max_blocks = 2, got 3 ranks"):
        index.apply(KVEventBatch(0.0, [AllBlocksCleared()], 2**63))
    assert index.ranks == (0, 5)


def test_an_emptied_rank_may_have_blocks_of_another_size() -> None:
    for events in ([AllBlocksCleared(), put(7, size=4)], [BlockRemoved([1]), put(7, size=4)], [put(2), AllBlocksCleared(), put(7, size=4)]):
        index = index_of(put(1))
        index.apply(KVEventBatch(0.0, events))
        assert index.parents() == {7: None}
        with pytest.raises(ValueError_) as caught:
            index.apply(KVEventBatch(0.0, [put(8, size=4), put(9, size=2)]))
        assert str(caught.value) == "BlockIndex: expected blocks of one size in rank 0, got [2, 4]. Fix: use one index for each publisher"
        assert index.parents() == {7: None}, "nothing of it"


def test_blocks_that_kvdock_has_no_names_for_are_no_error_of_the_router() -> None:
    assert index_of(put(size=1024)).cached_len(range(2048)) == 0
    assert index_of(put(1, size=1024)).cached_len(range(2048)) == 0
    assert index_of(put(size=0)).cached_len(range(8)) == 0


@pytest.mark.parametrize("batch", [None, 3, b"\x92\x01\x90", [put(1)]])
def test_only_batches_are_followed(batch: Any) -> None:
    with pytest.raises(TypeError_) as caught:
        BlockIndex().apply(batch)
    assert str(caught.value) == f"BlockIndex.apply: batch: expected a KVEventBatch, got {batch!r:.80}. Fix: read it with read_batch"


NAMES = st.lists(st.integers(0, 5), max_size=4)
EVENTS = st.lists(NAMES.map(lambda names: put(*names)) | NAMES.map(BlockRemoved) | st.just(AllBlocksCleared()), max_size=6)


@given(st.lists(st.tuples(st.integers(0, 1), EVENTS), max_size=6), st.integers(2, 8))
@settings(max_examples=examples(60), deadline=None)
def test_events_in_any_order_are_followed_as_a_plain_loop_does_or_not_at_all(batches: list[tuple[int, list[Any]]], most: int) -> None:
    index, model = BlockIndex(most), {0: set[Any](), 1: set[Any]()}
    for rank, events in batches:
        after, is_full = set(model[rank]), False
        for event in events:
            if isinstance(event, AllBlocksCleared):
                after.clear()
            elif isinstance(event, BlockStored):
                after |= set(event.block_hashes)
            else:
                after -= set(event.block_hashes)
            is_full |= len(after) + len(model[1 - rank]) > most
        if is_full:
            with pytest.raises(kvdock.CapacityError):
                index.apply(KVEventBatch(0.0, events, rank))
        else:
            index.apply(KVEventBatch(0.0, events, rank))
            model[rank] = after
        assert {each: index.parents(each).keys() for each in (0, 1)} == model
