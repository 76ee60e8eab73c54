"""A publisher and a reader over real sockets: what the reader knows is what the managers have."""

from __future__ import annotations

import gc
import itertools
import threading
import time

import pytest
import zmq

import kvdock
from kvdock.integrations.kv_events import AllBlocksCleared, BlockStored, KVEventPublisher, KVEventSubscriber
from kvdock.integrations.kv_events import outlet as outlets
from kvdock.integrations.kv_events.wire import short_hash
from kvdock.layers import KeepAll, KeepWindow
from kvdock_conformance.checking.group_engine import group_of
from support_kv_events import SPACES, busy, inproc, pair, store, stored, until


def agrees(reader: KVEventSubscriber, manager: kvdock.CacheManager, rank: int = 0) -> bool:
    short = {short_hash(name): None if before is None else short_hash(before) for name, before in stored(manager).items()}
    return reader.index.parents(rank) == short


@pytest.mark.parametrize("shape", ["maps", "arrays"])
@pytest.mark.parametrize("auto_flush", [True, False])
def test_a_reader_agrees_with_a_busy_manager(shape: str, auto_flush: bool) -> None:
    manager = kvdock.CacheManager(12, 4)
    with pair(manager, shape=shape, auto_flush=auto_flush) as (publisher, reader):
        for seed in range(6):
            busy(manager, 40, seed)
            publisher.flush()
            until(reader, lambda: agrees(reader, manager))
            assert bool(reader.index.parents()) == bool(stored(manager))
        assert manager.prefix.stats.evictions > 20
        assert reader.num_missed == 0
        assert reader.index.is_complete()


@pytest.mark.slow
def test_a_long_fuzz_of_two_ranks_with_slow_readers() -> None:
    managers = kvdock.CacheManager(30, 2), kvdock.CacheManager(17, 4, policy="lfu")
    with pair(*managers, slow=True, buffer_steps=20, hashes="whole") as (_, reader):
        for seed in range(40):
            for manager, steps in zip(managers, (60, 30), strict=True):
                busy(manager, steps, seed)
            if seed % 3 == 0:  # meanwhile more went by than is kept
                until(reader, lambda: all(reader.index.parents(rank) == stored(each) for rank, each in enumerate(managers)))
        until(reader, lambda: all(reader.index.is_complete(rank) for rank in (0, 1)))
    assert reader.num_missed > 0


def test_whole_names_and_the_tokens_of_a_prompt() -> None:
    manager = kvdock.CacheManager(32, 4)
    with pair(manager, hashes="whole") as (_, reader):
        store(manager, range(18), (("lora", "a"),))
        until(reader, lambda: len(reader.index.parents()) == 4)
        assert reader.index.parents() == stored(manager)
        longer = [*range(12), 99, *range(13, 30)]
        assert reader.index.cached_len(longer, (("lora", "a"),)) == 12
        assert reader.index.cached_len(range(50), (("lora", "a"),)) == 16
        assert [reader.index.cached_len(longer, space) for space in SPACES[2:]] == [0, 0]
        assert reader.index.cached_len(longer, (("lora", "a"),), rank=1) == 0


def test_two_managers_are_two_ranks_of_one_stream() -> None:
    managers = kvdock.CacheManager(32, 4), kvdock.CacheManager(32, 8)
    with pair(*managers, first_rank=2) as (_, reader):
        store(managers[0], range(20))
        store(managers[1], range(100, 120))
        until(reader, lambda: reader.index.ranks == (2, 3))
        assert all(agrees(reader, manager, rank) for rank, manager in enumerate(managers, 2))
        managers[0].reset()
        until(reader, lambda: not reader.index.parents(2))
        until(reader, lambda: agrees(reader, managers[1], 3))
        assert reader.num_missed == 0


def test_one_ranks_reset_is_told_so_that_readers_who_clear_all_ranks_are_right() -> None:
    managers = kvdock.CacheManager(32, 4), kvdock.CacheManager(32, 4)
    with pair(*managers) as (_, reader):
        store(managers[1], range(20))
        managers[0].reset()
        batches = reader.poll(5)
        while not isinstance(batches[-1].events[-1], BlockStored) or len(batches) < 4:
            batches += reader.poll(5)
    have: dict[int, set[object]] = {}
    for batch in batches:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                have.clear()
            elif isinstance(event, BlockStored):
                have.setdefault(batch.data_parallel_rank, set()).update(event.block_hashes)
    assert have == {1: set(map(short_hash, stored(managers[1])))}


def test_a_batch_for_each_flush() -> None:
    manager = kvdock.CacheManager(32, 4)
    with pair(manager, auto_flush=False) as (publisher, reader):
        for start in (0, 100, 200):
            store(manager, range(start, start + 8))
        assert reader.poll(0.05) == []
        publisher.flush()
        publisher.flush()
        (batch,) = reader.poll(5)
        assert [event.parent_block_hash for event in batch.events] == [None] * 3
        assert abs(batch.ts - time.time()) < 60


def test_what_was_missed_is_asked_for() -> None:
    manager = kvdock.CacheManager(64, 4)
    where = inproc()
    with KVEventPublisher(manager, endpoint=inproc(), replay_endpoint=where) as publisher:
        for start in (0, 100, 200):
            store(manager, range(start, start + 8))
        with KVEventSubscriber(publisher.endpoint, where) as reader:
            time.sleep(0.05)
            store(manager, range(300, 308))
            until(reader, lambda: agrees(reader, manager))
            assert (reader.num_missed, reader.index.is_complete()) == (0, True)
            assert reader.poll(0.02) == []
        with KVEventSubscriber(publisher.endpoint) as without:
            time.sleep(0.05)
            store(manager, range(400, 408))
            until(without, lambda: bool(without.index.parents()))
            assert (without.num_missed, without.index.is_complete()) == (4, False)
            publisher.resend()
            until(without, lambda: without.index.is_complete() and agrees(without, manager))


def test_what_is_no_longer_kept_makes_the_publisher_send_everything_again() -> None:
    manager = kvdock.CacheManager(64, 4)
    where = inproc()
    with KVEventPublisher(manager, endpoint=inproc(), replay_endpoint=where, buffer_steps=1) as publisher:
        for start in (0, 100, 200):
            store(manager, range(start, start + 8))
        while publisher._outlet.number < 3:
            time.sleep(0.01)
        with KVEventSubscriber(publisher.endpoint, where) as reader:
            time.sleep(0.05)
            store(manager, range(300, 308))
            until(reader, lambda: reader.num_missed > 0)
            until(reader, lambda: reader.index.is_complete() and agrees(reader, manager))


def test_over_tcp_with_a_topic() -> None:
    manager = kvdock.CacheManager(32, 4)
    anywhere = "tcp://127.0.0.1:*"
    with KVEventPublisher(manager, endpoint=anywhere, replay_endpoint=anywhere, topic="kv@a") as publisher:
        assert publisher.replay_endpoint
        with (
            KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint, topic="kv@a") as reader,
            KVEventSubscriber(publisher.endpoint, topic="kv@b") as other,
        ):
            for start in itertools.count(0, 10):
                store(manager, range(start, start + 8))
                if reader.poll(0.05):
                    break
            until(reader, lambda: agrees(reader, manager))
            assert reader.num_missed == 0
            assert other.poll(0.05) == []


def test_a_publisher_may_connect_to_where_a_reader_has_bound() -> None:
    manager, where = kvdock.CacheManager(32, 4), inproc()
    with KVEventSubscriber(where, bind=True) as reader, KVEventPublisher(manager, endpoint=where, bind=False):
        reader.poll(0.05)  # it answers who connects when it is asked for messages
        store(manager, range(8))
        until(reader, lambda: agrees(reader, manager))


def test_nobody_waits_for_a_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for one that does not read, nor for one that asks and does not read the answer; and both are right in the end."""
    monkeypatch.setattr(outlets, "MOST_WAITING", 50)
    manager = kvdock.CacheManager(64, 4)
    where = inproc()
    with (
        KVEventPublisher(manager, endpoint=inproc(), replay_endpoint=where, buffer_steps=4) as publisher,
        KVEventSubscriber(publisher.endpoint, where, max_waiting=1) as reader,
        zmq.Context.instance().socket(zmq.DEALER) as rude,
    ):
        rude.setsockopt(zmq.RCVHWM, 1)
        rude.connect(where)
        for seed in range(10):
            rude.send_multipart([b"", bytes(8)])
            before = time.monotonic()
            busy(manager, 100, seed, reset=False)
            assert time.monotonic() - before < 5
        until(reader, lambda: reader.index.is_complete() and agrees(reader, manager))
        assert reader.num_missed > 0


def test_events_that_cannot_wait_are_lost_noticed_and_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlets, "MOST_WAITING", 0)
    manager = kvdock.CacheManager(64, 4)
    with pair(manager) as (_, reader):
        time.sleep(0.05)
        store(manager, range(8))
        until(reader, lambda: agrees(reader, manager))
        assert reader.num_missed > 0
        assert reader.index.is_complete()


def test_a_reader_that_missed_the_last_batches_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlets, "_QUIET", (0.05, 0.1))
    manager = kvdock.CacheManager(64, 4)
    with pair(manager, slow=True, buffer_steps=2) as (_, reader):
        busy(manager, 60, 1)
        until(reader, lambda: reader.index.is_complete() and agrees(reader, manager))
        assert reader.num_missed > 0
        # Everything may come once more, if it was asked for twice.
        assert any([batch.events for batch in reader.poll(5)] == [[]] for _ in range(5)), "and go on to come, without events"


def test_a_lost_event_is_noticed_and_a_reset_heals_it() -> None:
    """As where a namespace has no name: what is stored behind it is unknown, too."""
    manager = kvdock.CacheManager(16, 4)
    space = (10**5000,)
    with pair(manager) as (_, reader):
        time.sleep(0.05)
        seq = manager.begin(range(8), space)
        with pytest.warns(kvdock.KVDockWarning, match="digits"):
            manager.commit(seq, [], computed=8)
        manager.extend(seq, 4)
        with pytest.warns(kvdock.KVDockWarning, match=r"an event was lost. Fix: call manager.reset"):
            manager.commit(seq, range(4), computed=12)
        manager.finish(seq)
        store(manager, range(100, 108))
        until(reader, lambda: len(reader.index.parents()) == 2)
        assert reader.num_missed == 1
        store(manager, range(200, 256))  # evicts what nobody was told of
        manager.reset()
        until(reader, lambda: reader.index.is_complete() and not reader.index.parents())


def test_closing_sends_what_waits_ends_the_thread_and_can_be_repeated() -> None:
    manager = kvdock.CacheManager(32, 4)
    threads = threading.active_count()
    publisher = KVEventPublisher(manager, endpoint=inproc(), auto_flush=False)
    with KVEventSubscriber(publisher.endpoint) as reader:
        assert threading.active_count() == threads + 1
        time.sleep(0.05)
        store(manager, range(8))
        assert publisher.close(5)
        assert publisher.close()
        publisher.flush()
        publisher.resend()
        assert threading.active_count() == threads
        until(reader, lambda: agrees(reader, manager))
        store(manager, range(100, 108))
        assert reader.poll(0.02) == []
    assert not manager.prefix._events
    gc.collect()


def test_an_engines_thread_may_use_a_manager_that_a_constructor_subscribed_to() -> None:
    manager = kvdock.CacheManager(32, 4)
    errors: list[Exception] = []

    def engine() -> None:
        try:
            store(manager, range(8))
        except Exception as error:  # noqa: BLE001 - shown by the main thread
            errors.append(error)

    with pair(manager) as (_, reader):
        thread = threading.Thread(target=engine)
        thread.start()
        until(reader, lambda: len(reader.index.parents()) == 2)
        thread.join()
    assert errors == []


def test_a_block_of_several_groups_is_a_unit_of_all() -> None:
    manager = kvdock.CacheManager(40, groups=[group_of(KeepAll(), 4), group_of(KeepWindow(8), 2)])
    with pair(manager) as (_, reader):
        for seed in range(4):
            busy(manager, 60, seed)
            until(reader, lambda: agrees(reader, manager))
        store(manager, [7] * (5 * manager.block_size))
        until(reader, lambda: reader.index.cached_len([7] * 100) == 5 * manager.block_size)
        assert agrees(reader, manager)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"shape": "json"}, kvdock.ArgumentValueError, "shape: expected 'maps' or 'arrays', got 'json'"),
        ({"hashes": "md5"}, kvdock.ArgumentValueError, "hashes"),
        ({"endpoint": "5557"}, kvdock.ArgumentValueError, "endpoint: expected an address to bind, got '5557'"),
        ({"replay_endpoint": "tcp://"}, kvdock.ArgumentValueError, "replay_endpoint"),
        ({"buffer_steps": 0}, kvdock.ArgumentValueError, "buffer_steps"),
        ({"first_rank": -1}, kvdock.ArgumentValueError, "first_rank"),
    ],
)
def test_arguments(change: dict[str, object], error: type[Exception], text: str) -> None:
    threads = threading.active_count()
    with pytest.raises(error, match=text):
        KVEventPublisher(kvdock.CacheManager(4, 4), **{"endpoint": inproc(), **change})
    assert threading.active_count() == threads


def test_managers() -> None:
    manager = kvdock.CacheManager(8, 4)
    for managers, text in (((), "got none"), ((manager, manager), "one twice"), ((manager.prefix,), "expected CacheManagers")):
        with pytest.raises((kvdock.ArgumentValueError, kvdock.ArgumentTypeError), match=text):
            KVEventPublisher(*managers, endpoint=inproc())
    store(manager, range(8))
    with pytest.raises(kvdock.ArgumentValueError, match=r"nothing cached yet, got 8 tokens. Fix: make the publisher before"):
        KVEventPublisher(manager, endpoint=inproc())
    manager.reset()
    KVEventPublisher(manager, endpoint=inproc()).close()


def test_an_address_that_somebody_has() -> None:
    manager, where = kvdock.CacheManager(8, 4), inproc()
    with KVEventPublisher(manager, endpoint=where), pytest.raises(kvdock.ArgumentValueError, match="in use"):
        KVEventPublisher(manager, endpoint=where)


def test_long_prompts_are_several_messages() -> None:
    manager = kvdock.CacheManager(5000, 32)
    prompt = range(5000 * 32)
    with pair(manager) as (_, reader):
        store(manager, prompt)
        batches = reader.poll(5)
        until(reader, lambda: reader.index.cached_len(prompt) == len(prompt))
    assert max(len(event.token_ids) for batch in batches for event in batch.events) == 2**16
