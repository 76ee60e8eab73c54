"""Managers of several threads behind one publisher, and what closing, bounds and reprs say."""

from __future__ import annotations

import logging
import struct
import threading
import time
from typing import Any

import pytest
import zmq

import kvdock
from kvdock.integrations.kv_events import BlockIndex, BlockStored, KVEventBatch, KVEventPublisher, KVEventSubscriber
from kvdock.integrations.kv_events import subscriber as subscribers
from kvdock.integrations.kv_events.wire import Writer, short_hash
from support_kv_events import busy, inproc, pair, store, stored, until


def test_each_manager_belongs_to_a_thread_of_its_own() -> None:
    managers = [kvdock.CacheManager(20, 4) for _ in range(3)]
    errors: list[BaseException] = []

    def engine(rank: int) -> None:
        try:
            busy(managers[rank], 80, rank)
            managers[rank].hand_over()
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            errors.append(error)

    with pair(*managers) as (_, reader):
        threads = [threading.Thread(target=engine, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert errors == []
        expected = [{short_hash(name) for name in stored(manager)} for manager in managers]
        until(reader, lambda: [set(reader.index.parents(rank)) for rank in range(3)] == expected)
        assert reader.num_missed == 0


def test_resending_while_an_engine_goes_on() -> None:
    """What is sent again is what was stored when it was asked for; what comes later follows."""
    manager = kvdock.CacheManager(30, 4)
    with pair(manager) as (publisher, reader):
        stop = threading.Event()

        def asks() -> None:
            while not stop.is_set():
                publisher.resend()
                time.sleep(0.002)

        thread = threading.Thread(target=asks)
        thread.start()
        for seed in range(8):
            busy(manager, 40, seed)
        stop.set()
        thread.join(60)
        until(reader, lambda: set(reader.index.parents()) == {short_hash(name) for name in stored(manager)})
        assert (reader.num_missed, reader.index.is_complete()) == (0, True)


def test_reprs_say_where_and_how_much() -> None:
    manager, where = kvdock.CacheManager(8, 4), inproc()
    with KVEventPublisher(manager, endpoint=where) as publisher, KVEventSubscriber(where) as reader:
        assert repr(publisher) == f"KVEventPublisher({where!r}, ranks=1, batches=0)"
        assert repr(reader) == "KVEventSubscriber(next=0, missed=0, BlockIndex({}))"
        time.sleep(0.05)
        store(manager, range(8))
        until(reader, lambda: bool(reader.index.parents()))
        assert repr(publisher) == f"KVEventPublisher({where!r}, ranks=1, batches=1)"
        assert repr(reader) == "KVEventSubscriber(next=1, missed=0, BlockIndex({0: 2}))"


def test_one_call_reads_no_more_than_so_many_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscribers, "_AT_ONCE", 3)
    where = inproc()
    with zmq.Context.instance().socket(zmq.PUB) as live:
        live.bind(where)
        with KVEventSubscriber(where) as reader:
            time.sleep(0.05)
            for number in range(7):
                live.send_multipart([b"", struct.pack(">Q", number), Writer().payload(KVEventBatch(1.0, []))])
            time.sleep(0.05)
            assert [len(reader.poll(1)) for _ in range(3)] == [3, 3, 1]
            assert reader.poll() == []


def test_batches_before_a_bad_one_are_in_the_index_and_those_behind_it_come_next() -> None:
    where = inproc()
    payloads = [Writer().payload(KVEventBatch(1.0, [BlockStored([block], None, [5], 1)])) for block in range(3)]
    payloads[1] = b"\xc1"
    with zmq.Context.instance().socket(zmq.PUB) as live:
        live.bind(where)
        with KVEventSubscriber(where) as reader:
            time.sleep(0.05)
            for number, payload in enumerate(payloads):
                live.send_multipart([b"", struct.pack(">Q", number), payload])
            time.sleep(0.05)
            with pytest.raises(kvdock.ArgumentValueError, match="KV events: message"):
                reader.poll(5)
            assert list(reader.index.parents()) == [0]
            assert len(reader.poll(5)) == 1
            assert (list(reader.index.parents()), reader.num_missed) == ([0, 2], 1)


def test_an_index_that_is_full_refuses_and_counts_it_as_missed() -> None:
    manager, where = kvdock.CacheManager(16, 2), inproc()
    with KVEventPublisher(manager, endpoint=where) as _, KVEventSubscriber(where, index=BlockIndex(max_blocks=3)) as reader:
        time.sleep(0.05)
        store(manager, range(4))
        until(reader, lambda: len(reader.index.parents()) == 2)
        store(manager, range(100, 108))
        with pytest.raises(kvdock.CapacityError, match=r"at most max_blocks = 3, got 6 blocks. Fix: raise max_blocks"):
            until(reader, lambda: False)
        assert (len(reader.index.parents()), reader.num_missed, reader.index.is_complete()) == (2, 1, False)


def test_a_batch_that_cannot_be_written_is_a_gap_and_the_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    manager = kvdock.CacheManager(16, 2)
    with pair(manager) as (publisher, reader):
        time.sleep(0.05)
        real = publisher._outlet._writer
        publisher._outlet._writer = Broken()  # type: ignore[assignment]
        with caplog.at_level(logging.ERROR, "kvdock"):
            store(manager, range(4))
            end = time.monotonic() + 10
            while "batch 0 was not sent" not in caplog.text:  # the number goes up before it is said
                assert time.monotonic() < end
                time.sleep(0.005)
        publisher._outlet._writer = real
        store(manager, range(100, 104))
        until(reader, lambda: len(reader.index.parents()) == 4)
        assert reader.num_missed == 1
        assert reader.index.is_complete(), "everything was sent again"


class Broken:
    """A writer that cannot write."""

    def payload(self, batch: Any) -> bytes:
        raise OverflowError("as the test says")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"endpoint": "nowhere"}, "KVEventSubscriber: endpoint: expected an address to connect, got 'nowhere'"),
        ({"max_message_bytes": 0}, "KVEventSubscriber: max_message_bytes: expected at least 1, got 0"),
        ({"max_waiting": 0}, "KVEventSubscriber: max_waiting"),
    ],
)
def test_arguments_of_a_reader(change: dict[str, Any], text: str) -> None:
    with pytest.raises(kvdock.ArgumentValueError, match=text):
        KVEventSubscriber(**{"endpoint": inproc(), **change})
    with pytest.raises(kvdock.ArgumentValueError, match="BlockIndex: max_blocks"):
        BlockIndex(0)


def test_a_replay_endpoint_that_is_no_address_is_told_when_it_is_needed() -> None:
    where = inproc()
    with zmq.Context.instance().socket(zmq.PUB) as live:
        live.bind(where)
        with KVEventSubscriber(where, "nowhere") as reader:
            time.sleep(0.05)
            live.send_multipart([b"", struct.pack(">Q", 1), Writer().payload(KVEventBatch(1.0, []))])
            with pytest.raises(kvdock.ArgumentValueError, match="replay_endpoint: expected an address to connect, got 'nowhere'"):
                until(reader, lambda: False)


def test_nobody_answers_a_request() -> None:
    """The reader goes on without, after its patience."""
    where = inproc()
    with zmq.Context.instance().socket(zmq.PUB) as live:
        live.bind(where)
        with KVEventSubscriber(where, "tcp://127.0.0.1:9", replay_timeout=0.05) as reader:
            time.sleep(0.05)
            live.send_multipart([b"", struct.pack(">Q", 3), Writer().payload(KVEventBatch(1.0, [], 0))])
            until(reader, lambda: reader.index.ranks == (0,))
            assert (reader.num_missed, reader.index.is_complete()) == (3, False)
