"""What is on the wire, byte for byte, and what is refused of what comes from outside."""

from __future__ import annotations

import struct
import threading
import time
import tracemalloc
from typing import Any

import msgpack
import pytest
import zmq
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
from kvdock.integrations.kv_events.fields import WireFields
from kvdock.integrations.kv_events.outlet import Replayable, portions
from kvdock.integrations.kv_events.wire import Writer
from kvdock.prefix import block_names, tagged_namespace
from support_kv_events import inproc, pair, store, until
from support_slow import examples

STORED = BlockStored([1, 2], None, [5, 6, 7, 8], 2, 3, "GPU", "a", [("s", b"x", 1, 0.5, True, ("i", -3)), None])
REMOVED = BlockRemoved([2], "GPU")


def frames_of(manager: kvdock.CacheManager, action: Any, **options: Any) -> list[list[bytes]]:
    """The messages of what an action does, as a plain socket reads them."""
    with KVEventPublisher(manager, endpoint=inproc(), **options) as publisher, zmq.Context.instance().socket(zmq.SUB) as socket:
        socket.subscribe(b"")
        socket.connect(publisher.endpoint)
        time.sleep(0.05)
        action()
        found = [socket.recv_multipart()]
        while socket.poll(50):
            found.append(socket.recv_multipart())
        return found


def test_the_frames_and_an_event_that_is_a_map() -> None:
    manager = kvdock.CacheManager(8, 2)
    space = tagged_namespace(lora="fr", salt="s", lora_id=7, tenant="t")
    (frames,) = frames_of(manager, lambda: store(manager, [1, 2, 3, 4], space), topic="kv")
    assert frames[:2] == [b"kv", bytes(8)]
    ts, (event,), rank = msgpack.unpackb(frames[2])
    assert (type(ts), rank) == (float, 0)
    names = [int.from_bytes(name[-8:], "big") for name in block_names([1, 2, 3, 4], 2, space)]
    assert event == {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": 7,
        "medium": "GPU",
        "lora_name": "fr",
        "extra_keys": [["s", "kvdock:('tenant', 't')"], None],
        "cache_salt": "s",
    }


def test_events_that_are_arrays_and_whole_names() -> None:
    manager = kvdock.CacheManager(2, 2)

    def action() -> None:
        store(manager, [1, 2])
        store(manager, [3, 4, 5, 6])
        manager.reset()

    found = frames_of(manager, action, shape="arrays", hashes="whole", medium=None)
    assert [int.from_bytes(frames[1], "big") for frames in found] == [0, 1, 2, 3]
    events = [msgpack.unpackb(frames[2])[1] for frames in found]
    first, (second, third) = block_names([1, 2], 2), block_names([3, 4, 5, 6], 2)
    assert events == [
        [["BlockStored", first, None, [1, 2], 2, None, None, None]],
        [["BlockRemoved", first, None]],
        [["BlockStored", [second, third], None, [3, 4, 5, 6], 2, None, None, None]],
        [["AllBlocksCleared"]],
    ]


@pytest.mark.parametrize(
    ("namespace", "fields"),
    [
        ((), (None, None, None, ())),
        ((("lora", "a"), ("salt", "a")), (None, "a", "a", ("a",))),
        ((("lora", "a"), ("lora", "b")), (None, "a", None, ("kvdock:('lora', 'b')",))),
        ((("lora_id", 2**64), ("salt", 5)), (None, None, None, ("kvdock:('lora_id', 18446744073709551616)", "kvdock:('salt', 5)"))),
        ((("lora", "\ud800"),), (None, None, None, (r"kvdock:('lora', '\ud800')",))),
        (("tenant", "ä", 3), (None, None, None, ("kvdock:'tenant'", r"kvdock:'\xe4'", "kvdock:3"))),
        (((1, "a"), ("lora", "ä")), (None, "ä", None, ("kvdock:(1, 'a')",))),
    ],
)
def test_what_of_a_namespace_is_told(namespace: tuple[Any, ...], fields: tuple[Any, ...]) -> None:
    assert WireFields.of(namespace) == WireFields(*fields)


SALTED = BlockStored([9], 8, [1, 2], 2, medium="GPU", cache_salt="s")

BATCHES = st.builds(
    KVEventBatch,
    st.floats(allow_nan=False),
    st.lists(st.sampled_from([STORED, REMOVED, AllBlocksCleared(), BlockStored([9], 8, [2**62, -1], 2, medium="GPU")]), max_size=4),
    st.none() | st.integers(0, 9),
)


@given(BATCHES, st.booleans())
def test_what_is_written_is_read(batch: KVEventBatch, arrays: bool) -> None:
    assert read_batch(Writer(arrays=arrays).payload(batch)) == batch


def test_a_salt_by_itself_is_in_maps() -> None:
    assert read_batch(Writer().payload(KVEventBatch(1.0, [SALTED], 0))).events == [SALTED]
    assert read_batch(Writer(arrays=True).payload(KVEventBatch(1.0, [SALTED], 0))).events[0].cache_salt is None


def test_fields_of_later_versions_are_skipped() -> None:
    later = {"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU", "locality": {"deep": [[[1]]]}}
    listed = ["BlockRemoved", [2], "GPU", None, "LOCAL", [[]]]
    for event in (later, listed):
        assert read_batch(msgpack.packb([1.0, [event], 0, {"more": 1}])) == KVEventBatch(1.0, [REMOVED], 0)
    assert read_batch(msgpack.packb([1, [["AllBlocksCleared", None]]])) == KVEventBatch(1.0, [AllBlocksCleared()], None)


def stored(**change: Any) -> dict[str, Any]:
    whole = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [5, 6], "block_size": 2, **change}
    return {name: value for name, value in whole.items() if value is not ...}


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({"ts": 1.0, "events": []}, "expected a batch: an array"),
        ([1.0], "got an array of 1"),
        (["now", []], "expected seconds, got 'now'"),
        ([1.0, 5], "expected an array of events"),
        ([1.0, [], -1], "data_parallel_rank"),
        ([1.0, [5]], "expected an event: a map or an array"),
        ([1.0, [[]]], "expected an event: one of BlockStored, BlockRemoved, AllBlocksCleared, got None"),
        ([1.0, [["BlockMoved", [1]]]], "got 'BlockMoved'. Fix: .*its version is newer"),
        ([1.0, [{"type": "BlockMoved"}]], "got 'BlockMoved'"),
        ([1.0, [stored(type=b"BlockStored")]], "expected type: text"),
        ([1.0, [{5: 1}]], "each field once, by its name, got 5"),
        ([1.0, [["BlockRemoved"]]], "BlockRemoved with block_hashes, got none"),
        ([1.0, [stored(token_ids=...)]], "BlockStored with token_ids"),
        ([1.0, [stored(token_ids=[1])]], "token_ids of 1 blocks of 2, got 1 tokens"),
        ([1.0, [stored(block_size=0, token_ids=[])]], "of 1 blocks of 0"),
        ([1.0, [stored(block_size=None)]], "of 1 blocks of None"),
        ([1.0, [stored(block_size=True)]], "block_size: a number"),
        ([1.0, [stored(token_ids=[1, True])]], "a token id of 64 bits, got True"),
        ([1.0, [stored(token_ids=[1, 2**63])]], "a token id of 64 bits"),
        ([1.0, [stored(token_ids=[1, [2]])]], "exceeds max_array_len"),
        ([1.0, [stored(block_hashes=["a"])]], "a block's hash: an integer, or at most 64 bytes, got 'a'"),
        ([1.0, [stored(block_hashes=[b"a" * 65])]], "a block's hash"),
        ([1.0, [stored(parent_block_hash=1.5)]], "a block's hash"),
        ([1.0, [stored(lora_name=5)]], "lora_name: text, got 5"),
        ([1.0, [stored(extra_keys=[None, None])]], "extra_keys of 1 blocks, got those of 2"),
        ([1.0, [stored(extra_keys=[[["a", 1, 2]]])]], "a pair of text and a number"),
        ([1.0, [stored(extra_keys=[[None]])]], "an extra key"),
    ],
)
def test_what_is_no_batch_is_refused(batch: Any, text: str) -> None:
    with pytest.raises(kvdock.ArgumentValueError, match=f"^KV events: message: .*{text}"):
        read_batch(msgpack.packb(batch))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",  # an array of four thousand million
        b"\x93\xcb" + bytes(8) + b"\xdd\x7f\xff\xff\xff",
        b"\x92\x01\x91\xdf\x7f\xff\xff\xff",  # a map of as many
        b"\x92\x01\x91\x82\xa4type\xacBlockRemoved\xacblock_hashes\xdd\x10\x00\x00\x00",
        b"\x92\x01" + b"\xdd\x00\x0f\xff\xff" * 2000,  # each claims a million, one in the other
        b"\x94\x01\x90\x00" + b"\x91" * 5000,  # nested in what is skipped
        b"\x92\x01\x91\x81\xa4type\xa2\xff\xff",  # no UTF-8
        b"\x92\x01\x90 ",
        b"\x92\x01\x91\xc1",
        msgpack.packb([1.0, [stored()], 0])[:-3],
        b"cposix\nsystem\n(S'true'\ntR.",  # a pickle
    ],
    ids=range(13),
)
def test_bytes_that_claim_more_than_there_is_take_no_memory(payload: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(kvdock.ArgumentValueError, match=r"^KV events: message: .*Fix: connect to a publisher"):
            read_batch(payload)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def reads_or_refuses(payload: bytes) -> None:
    try:
        batch = read_batch(payload)
    except kvdock.ArgumentValueError:
        return
    BlockIndex().apply(batch)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(payload: bytes) -> None:
    reads_or_refuses(payload)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=examples(1000), deadline=None)
@given(BATCHES, st.booleans(), st.data())
def test_changed_messages_are_read_or_refused(batch: KVEventBatch, arrays: bool, data: st.DataObject) -> None:
    payload = bytearray(Writer(arrays=arrays).payload(batch))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3) | VALUES.map(msgpack.packb))
    reads_or_refuses(bytes(payload))


@given(VALUES)
def test_any_values_are_read_or_refused(value: Any) -> None:
    for batch in (value, [1.0, value], [1.0, [value]], [1.0, [["BlockStored", value, value, value, 2]]], [1.0, [stored(extra_keys=value)]]):
        reads_or_refuses(msgpack.packb(batch))


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([b"kv"], "three frames: topic, number, batch, got 1 frames"),
        ([b"", bytes(7), b""], "a number of 8 bytes, from 0, got 7 bytes"),
        ([b"", b"\xff" * 8, b""], "ffffffffffffffff"),
        ([b"", bytes(8), b"\xc1"], "expected a batch"),
        ([b"", bytes(8), msgpack.packb([1.0, [["BlockMoved"]], 0])], "BlockMoved"),
    ],
)
def test_a_hostile_publisher_stops_no_reader(frames: list[bytes], text: str) -> None:
    good = Writer().payload(KVEventBatch(1.0, [STORED], 0))
    where = inproc()
    with zmq.Context.instance().socket(zmq.PUB) as hostile:
        hostile.bind(where)
        with KVEventSubscriber(where) as reader:
            time.sleep(0.05)
            hostile.send_multipart(frames)
            with pytest.raises(kvdock.ArgumentValueError, match=text):
                until(reader, lambda: False)
            assert (reader.num_missed, reader.index.is_complete()) == (1, False)
            hostile.send_multipart([b"", struct.pack(">Q", 1), good])
            until(reader, lambda: len(reader.index.parents()) == 2)
            hostile.send_multipart([b"", struct.pack(">q", 2**63 - 1), good])
            until(reader, lambda: reader.num_missed > 2**62)


def test_numbers_that_begin_again_are_another_publishers() -> None:
    where = inproc()
    with zmq.Context.instance().socket(zmq.PUB) as live:
        live.bind(where)
        with KVEventSubscriber(where) as reader:
            time.sleep(0.05)
            for number, block in ((0, 1), (1, 2), (0, 3)):
                event = BlockStored([block], None, [5], 1)
                live.send_multipart([b"", struct.pack(">Q", number), Writer().payload(KVEventBatch(1.0, [event], number))])
            until(reader, lambda: 3 in reader.index.parents())
            assert (reader.index.ranks, reader.num_missed, reader.index.is_complete()) == ((0,), 0, True)
            live.send_multipart([b"", bytes(8), Writer().payload(KVEventBatch(1.0, [], 1))])
            until(reader, lambda: reader.index.ranks == (1,))


def test_a_frame_that_is_too_long_is_cut_off() -> None:
    good = Writer().payload(KVEventBatch(1.0, [STORED], 0))
    with zmq.Context.instance().socket(zmq.PUB) as hostile:
        hostile.bind("tcp://127.0.0.1:*")
        with KVEventSubscriber(hostile.getsockopt_string(zmq.LAST_ENDPOINT), max_message_bytes=len(good)) as reader:
            end = time.monotonic() + 10
            while not reader.poll(0.05):
                assert time.monotonic() < end
                hostile.send_multipart([b"", bytes(8), good])
            hostile.send_multipart([b"", struct.pack(">Q", 1), good + bytes(100)])
            assert reader.poll(0.1) == []


def test_hostile_answers_to_a_request_end_it() -> None:
    good = Writer().payload(KVEventBatch(1.0, [STORED], 0))
    context = zmq.Context.instance()
    where, answers = inproc(), inproc()
    with context.socket(zmq.PUB) as live, context.socket(zmq.ROUTER) as replay:
        live.bind(where)
        replay.bind(answers)
        with KVEventSubscriber(where, answers, replay_timeout=0.05) as reader:
            time.sleep(0.05)
            for last, answer in enumerate(([], [b""], [b"", struct.pack(">Q", 50), good]), 1):
                live.send_multipart([b"", struct.pack(">Q", 5 * last), good])
                if answer:
                    replay.setsockopt(zmq.RCVTIMEO, 5000)
                until(reader, lambda want=last: reader._next > 5 * want, 5)
                assert reader.num_missed == 5 + 4 * (last - 1)


def test_a_replay_that_never_ends_keeps_no_reader() -> None:
    empty, where, answers = Writer().payload(KVEventBatch(1.0, [], 0)), inproc(), inproc()
    context, over = zmq.Context.instance(), threading.Event()

    def answer() -> None:
        with context.socket(zmq.ROUTER) as replay:
            replay.bind(answers)
            asker, number = replay.recv_multipart()[0], 0
            while not over.wait(0.002):
                replay.send_multipart([asker, b"", struct.pack(">Q", number), empty])
                number += 1

    hostile = threading.Thread(target=answer)
    hostile.start()
    with context.socket(zmq.PUB) as live:
        live.bind(where)
        with KVEventSubscriber(where, answers, replay_timeout=0.05) as reader:
            time.sleep(0.05)
            live.send_multipart([b"", struct.pack(">Q", 2**60), empty])
            began = time.monotonic()
            try:
                until(reader, lambda: reader._next == 2**60 + 1, 60)
            finally:
                over.set()
                hostile.join()
            assert time.monotonic() - began < 30
            assert (reader.num_missed > 2**59, reader.index.is_complete()) == (True, False)


@pytest.mark.parametrize("shape", ["maps", "arrays"])
def test_requests_that_are_none_are_counted_and_others_are_answered(shape: Any) -> None:
    """vLLM's and SGLang's replays have the topic of the live message, since they write maps."""
    manager, where = kvdock.CacheManager(8, 2), inproc()
    with (
        KVEventPublisher(manager, endpoint=inproc(), replay_endpoint=where, topic="kv", shape=shape) as publisher,
        zmq.Context.instance().socket(zmq.DEALER) as asks,
    ):
        asks.connect(where)
        store(manager, [1, 2])
        for request in ([b""], [b"", b"short"], [b"x", bytes(8)], [b"", bytes(8), b""], [bytes(8)]):
            asks.send_multipart(request)
        asks.send_multipart([b"", bytes(8)])
        assert asks.poll(5000)
        frames = [asks.recv_multipart(), asks.recv_multipart()]
        assert [frame[-2] for frame in frames] == [bytes(8), b"\xff" * 8]
        assert [frame[:-2] for frame in frames] == [[b""], [b""]] if shape == "arrays" else [[b"", b"kv"], [b"", b""]]
        assert publisher._outlet.num_refused == 5


def test_what_is_kept_is_bounded() -> None:
    kept = Replayable(3, 100)
    for number in range(5):
        kept.add(number, b"x" * 10)
    assert [number for number, _ in kept.since(0)] == [2, 3, 4]
    kept.add(5, b"x" * 95)
    kept.add(6, b"x" * 500)
    assert [number for number, _ in kept.since(0)] == [6]
    kept.add(7, b"x")
    assert [number for number, _ in kept.since(7)] == [7]


def test_portions_are_as_large_as_readers_take() -> None:
    large, small = BlockStored([1], None, range(2**15), 2**15), REMOVED
    assert [len(part) for part in portions([large, large, small, large, small])] == [2, 3]
    assert list(portions([])) == []


def test_an_index_is_bounded_and_holds_blocks_of_one_size() -> None:
    index = BlockIndex(max_blocks=3)
    index.apply(KVEventBatch(1.0, [STORED]))
    with pytest.raises(kvdock.CapacityError, match=r"at most max_blocks = 3, got 4 blocks"):
        index.apply(KVEventBatch(1.0, [STORED], 1))
    with pytest.raises(kvdock.ArgumentValueError, match=r"blocks of one size in rank 0, got \[1, 2\]"):
        BlockIndex().apply(KVEventBatch(1.0, [AllBlocksCleared(), BlockStored([7], None, [1], 1), BlockStored([8], None, [1, 2], 2)]))
    with pytest.raises(kvdock.ArgumentValueError, match="blocks of one size"):
        index.apply(KVEventBatch(1.0, [BlockStored([7], None, [1], 1)]))
    assert index.parents() == {1: None, 2: 1}
    index.apply(KVEventBatch(1.0, [BlockRemoved([2, 99]), BlockStored([5], 1, [1, 2], 2, group_idx=1)]))
    assert index.parents() == {1: None}
    index.apply(KVEventBatch(1.0, [AllBlocksCleared(), BlockStored([7], None, [1], 1)]))
    assert repr(index) == "BlockIndex({0: 1})"
    index.forget()
    assert index.ranks == ()


def test_fields_have_tags_and_no_order() -> None:
    assert tagged_namespace(salt="b", lora="a", tenant=None) == (("lora", "a"), ("salt", "b"))
    assert tagged_namespace() == ()
    names = {block_names([1, 2], 2, space)[0] for space in (tagged_namespace(lora="a"), tagged_namespace(salt="a"), ("a",), ("lora", "a"))}
    assert len(names) == 4
    with pytest.raises(kvdock.ArgumentTypeError, match=r"tagged_namespace: lora: expected str, bytes, int or None, got \['a'\]"):
        tagged_namespace(lora=["a"])  # type: ignore[arg-type]


def test_a_reader_knows_salts_from_adapters() -> None:
    manager = kvdock.CacheManager(8, 2)
    with pair(manager) as (_, reader):
        store(manager, [1, 2], tagged_namespace(lora="a"))
        until(reader, lambda: bool(reader.index.parents()))
        lens = [reader.index.cached_len([1, 2], space) for space in (tagged_namespace(lora="a"), tagged_namespace(salt="a"), ())]
        assert lens == [2, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_vllm_itself_reads_it(whole: bool) -> None:
    events = pytest.importorskip("vllm.distributed.kv_events")
    msgspec = pytest.importorskip("msgspec")
    payload = Writer(whole_names=whole).payload(KVEventBatch(2.5, [STORED, REMOVED, AllBlocksCleared()], 3))
    read = msgspec.msgpack.decode(payload, type=events.KVEventBatch)
    assert read.events[0] == events.BlockStored([1, 2], None, [5, 6, 7, 8], 2, 3, "GPU", "a", [("s", b"x", 1, 0.5, True, ["i", -3]), None])
    assert read.events[1:] == [events.BlockRemoved([2], "GPU"), events.AllBlocksCleared()]
    assert read_batch(msgspec.msgpack.encode(read)) == read_batch(payload)


@pytest.mark.parametrize("arrays", [False, True])
def test_structs_as_vllm_declares_them_read_it(arrays: bool) -> None:
    """vLLM 0.33 declares events as maps; array_like=True is what it declared before."""
    msgspec = pytest.importorskip("msgspec")
    options = {"tag": True, "array_like": arrays, "omit_defaults": True}
    name, number, text = bytes | int, int | None, str | None
    rest = [("lora_id", number), ("medium", text), ("lora_name", text), ("extra_keys", list[tuple[Any, ...] | None] | None, None)]
    kinds = [
        msgspec.defstruct(
            "BlockStored",
            [("block_hashes", list[name]), ("parent_block_hash", name | None), ("token_ids", list[int]), ("block_size", int), *rest],
            **options,
        ),
        msgspec.defstruct("BlockRemoved", [("block_hashes", list[name]), ("medium", text), ("group_idx", number, None)], **options),
        msgspec.defstruct("AllBlocksCleared", [], **options),
    ]
    fields = [("ts", float), ("events", list[kinds[0] | kinds[1] | kinds[2]]), ("data_parallel_rank", number, None)]
    batch_kind = msgspec.defstruct("KVEventBatch", fields, array_like=True)
    for whole in (False, True):
        events = [
            BlockStored([b"n" * 32], b"m" * 32, [1, 2], 2, 4, "GPU", "fr", [("salt",)]),
            BlockRemoved([b"n" * 32]),
            AllBlocksCleared(),
        ]
        payload = Writer(arrays=arrays, whole_names=whole).payload(KVEventBatch(2.5, events, 3))
        read = msgspec.msgpack.decode(payload, type=batch_kind)
        hashes = [b"n" * 32] if whole else [int.from_bytes(b"n" * 8, "big")]
        assert (read.ts, read.data_parallel_rank, read.events[0].token_ids) == (2.5, 3, [1, 2])
        assert (read.events[0].block_hashes, read.events[0].extra_keys, read.events[0].lora_name) == (hashes, [("salt",)], "fr")
        assert read.events[1].block_hashes == hashes
        assert read_batch(msgspec.msgpack.encode(read)) == read_batch(payload), "and what such structs write is read here"
