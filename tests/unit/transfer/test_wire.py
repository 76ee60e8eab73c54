"""Each kind of value that a message may hold, and everything else in its place."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import attrs
import numpy as np
import pytest
import torch

import kvdock
from kvdock.errors import TransferError
from kvdock.transfer.messages import BEAT, MOST_TAG, Ask, Hello, Part, Stop, digest_of, read_any
from kvdock.transfer.wire import Fields, as_text, read, written
from support_transfer import Side, sealed

SPEC = kvdock.KVSpec((kvdock.LayerSpec(2, 2, 2, 3),), 64, torch.float32)
READS: dict[str, tuple[Callable[[Fields], object], object, list[object]]] = {
    "integer": (lambda fields: fields.integer("x", 0, 9), 9, [10, -1, 9.0, True, "9", None, [9], 10**400]),
    "integers": (lambda fields: fields.integers("x", 0, 9, 2), (1, 9), [[1, 10], [1, 2, 3], [True], ["1"], 1, None, {"1": 1}]),
    "text": (lambda fields: fields.text("x", 3), "abc", ["abcd", 3, None, ["a"], True]),
    "raw": (lambda fields: fields.raw("x", 2), b"ab", ["?", "YWI", "YWJj", 3, None, ["YWI="], "YWI=YWI=", "ü" * 4]),
    "flag": (lambda fields: fields.flag("x"), True, [1, 0, "true", None, []]),
    "lists": (lambda fields: fields.lists("x", 0, 9, 2, 2), [(1, 2), ()], [[[1, 10]], [[1, 2, 3]], [[], [], []], [1], 1, [[True]], None]),
}


@pytest.mark.parametrize("kind", READS)
def test_values_are_what_they_may_be(kind: str) -> None:
    reads, good, bad = READS[kind]
    plain = [list(each) for each in good] if kind == "lists" else list(good) if kind == "integers" else good  # type: ignore[call-overload]  # JSON's
    plain = as_text(plain) if isinstance(plain, bytes) else plain
    assert reads(Fields("it", {"x": plain})) == good
    for value in bad:
        with pytest.raises(
            TransferError, match=r"^it: x: expected .*, got .*Fix: run the same kvdock .* broken or hostile: drop it$"
        ) as caught:
            reads(Fields("it", {"x": value}))
        assert len(str(caught.value)) < 300, "what came is not repeated at length"
    with pytest.raises(TransferError, match=r"^it: x: expected .*, got None"):
        reads(Fields("it", {}))


def test_objects_in_objects_are_named_by_where_they_are() -> None:
    fields = Fields("it", {"in": {"x": 1}, "all": [{"x": 1}, {"x": "?"}]})
    assert fields.fields("in").integer("x", 0, 1) == 1
    with pytest.raises(TransferError, match=r"^it: all\[1\]: x: expected an integer from 0 to 1, got '\?'"):
        [each.integer("x", 0, 1) for each in fields.objects("all", 2)]
    with pytest.raises(TransferError, match=r"^it: all: expected a list of at most 1, got '2 of them'"):
        fields.objects("all", 1)
    with pytest.raises(TransferError, match=r"^it: other: expected an object, got NoneType"):
        fields.fields("other")


def test_a_message_is_a_line_and_what_it_says() -> None:
    message = written("ask", {"x": [1, "ü"]})
    assert message == b'kvdock-transfer/2 ask 78b79488\n{"x":[1,"\\u00fc"]}'
    kind, fields = read("p", message)
    assert (kind, fields.subject) == ("ask", "ask of peer 'p'")
    assert read("p", memoryview(message))[0] == read("p", bytearray(message))[0] == "ask"


NEEDED = Part(MOST_TAG, (((0, 2), (4, 5)), (), ((0, 1),)), bytes(range(256)))
ASK = Ask("a name", 5, "d" * 64, ((1, 2), (), (3,)), NEEDED, Part(7, (((2, 4),), (), ())))


@pytest.mark.parametrize(
    "said", [ASK, attrs.evolve(ASK, rest=None), Stop(3, "why"), Stop(0, "")], ids=["ask", "for no rest", "stop", "stop without a reason"]
)
def test_what_is_said_is_what_is_heard(said: Ask | Stop) -> None:
    assert read_any("p", said.to_bytes()) == said
    assert read_any("p", BEAT) is None


def test_a_long_reason_is_cut_so_that_it_can_be_heard() -> None:
    heard = read_any("p", Stop(3, "x" * 5000).to_bytes())
    assert isinstance(heard, Stop)
    assert heard.reason == "x" * 1024


def test_a_hello_has_any_bytes_of_a_transport() -> None:
    hello = Hello(Side.make(SPEC, 2, 4).layouts[1], "mine", bytes(range(256)))
    assert Hello.from_bytes("p", hello.to_bytes()) == hello


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (b'"tag":%d' % MOST_TAG, b'"tag":%d' % (MOST_TAG + 1), "needed: tag: expected an integer from 0 to"),
        (b'"num_tokens":5', b'"num_tokens":0', "num_tokens: expected an integer from 1 to"),
        (b'"name":"a name"', b'"name":["a name"]', "name: expected a text of at most 1024 characters"),
        (b'"digest":"d', b'"digest":"dd', "digest: expected a text of at most 64 characters"),
        (b"[[1,2],[],[3]]", b"[[1,-2],[],[3]]", "tables: expected an integer from 0 to"),
        (b"[[0,2,4,5],[],[0,1]]", b"[[0,2,4],[],[0,1]]", "needed: wanted: expected pairs of ascending tokens"),
        (b"[[0,2,4,5],[],[0,1]]", b"[[0,5,4,6],[],[0,1]]", "needed: wanted: expected pairs of ascending tokens"),
        (b'"tag":7', b'"tag":%d' % MOST_TAG, f"rest: tag: expected another than that of what is needed, got {MOST_TAG}"),
        (b'"wanted":[[2,4],[],[]]', b'"wanted":[[4,2],[],[]]', r"rest\[0\]: wanted: expected pairs of ascending tokens"),
        (b'"rest":[', b'"rest":[{},{},', "rest: expected a list of at most 1, got '3 of them'"),
        (b'"note":"AAEC', b'"note":"?AEC', "needed: note: expected base64"),
        (b'"note":"AAEC', b'"note":"' + b"AAEC" * 300, "needed: note: expected a text of at most 1368 characters"),
    ],
)
def test_an_ask_that_cannot_be_meant(old: bytes, new: bytes, text: str) -> None:
    message = ASK.to_bytes()
    assert old in message
    with pytest.raises(TransferError, match=f"^ask of peer 'p': {text}"):
        read_any("p", sealed(message.replace(old, new)))


def test_every_byte_of_a_message_counts() -> None:
    message = ASK.to_bytes()
    for at in range(len(message)):
        for changed in (bytes([message[at] ^ 1]), bytes([message[at] ^ 0x80]), b"\n", b" ", b""):
            if changed != message[at : at + 1]:
                with pytest.raises(TransferError, match=r"^message of peer 'p': expected"):
                    read_any("p", message[:at] + changed + message[at + 1 :])


def test_a_block_table_with_another_digit_is_refused() -> None:
    """It could be meant: the bytes would go to a block of somebody else."""
    message = ASK.to_bytes().replace(b"[[1,2],", b"[[1,5],")
    with pytest.raises(
        TransferError, match=r"expected one with its checksum, got '[0-9a-f]{8}', and what it says has '[0-9a-f]{8}'\. Fix: use"
    ):
        read_any("p", message)
    said = read_any("p", sealed(message))
    assert isinstance(said, Ask)
    assert said.tables[0] == (1, 5)


def test_digests_tell_texts_and_places_apart() -> None:
    ids = np.array([1, 2, 3])
    same = digest_of(ids, ())
    assert same == digest_of(ids.astype(np.int32), ()) == digest_of(np.array([1, 0, 2, 0, 3, 0])[::2], ())
    others = [digest_of(ids[:2], ()), digest_of(ids[::-1], ()), digest_of(ids, ("a",)), digest_of(ids, (1,)), digest_of(ids, ("1",))]
    assert len({same, *others}) == 6
    written_alike = b"('\\xe9\\u5b57', 1)" + np.array([1, 2, 3], "<i8").tobytes()  # `repr` goes by what this Python can print
    assert digest_of(ids, ("é字", 1)) == hashlib.sha256(written_alike).hexdigest()
