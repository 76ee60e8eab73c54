"""That a byte anywhere is noticed, and named."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from kvdock_conformance.cases.drawing import Drawing
from kvdock_conformance.checking import rooms
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.memory import Arenas, compare, element_at, text_of
from kvdock_conformance.checking.rooms import MARGIN

HOST = torch.device("cpu")


def two() -> tuple[Arenas, dict[str, Any]]:
    """Return the memory of a strided matrix and of an index, and their specs."""
    drawing = Drawing()
    args = {
        "rows": drawing.tensor("bfloat16", (3, 4), gaps=(0, 2), offset=2).spec(),
        "index": drawing.tensor("int64", (2,), values=[5, -1]).spec(),
    }
    return Arenas(drawing.arenas, HOST), args


def test_memory_is_the_same_in_every_run_and_differs_by_seed() -> None:
    first, _ = two()
    again, _ = two()
    assert all(torch.equal(a, b) for a, b in zip(first.bytes, again.bytes, strict=True))
    assert not torch.equal(first.bytes[0][:100], first.bytes[1][:100])
    assert len(first.bytes[0].unique()) > 100, "bytes of all kinds"


@pytest.mark.parametrize("fill", ["random", "numbers"])
def test_large_memory_has_no_two_rows_alike(fill: str) -> None:
    drawing = Drawing()
    spec = drawing.tensor("bfloat16", (2**14, 128), fill=fill).spec()
    rows = Arenas(drawing.arenas, HOST).tensor(spec)
    assert len({row.tobytes() for row in rows.view(torch.uint8).numpy()}) == len(rows)
    assert fill == "random" or rows.isfinite().all()


def test_a_copy_of_some_arenas_is_one_with_the_others() -> None:
    memory, _ = two()
    twin = memory.copy([1])
    for content in memory.bytes:
        content.bitwise_not_()
    assert [torch.equal(a, b) for a, b in zip(memory.bytes, twin.bytes, strict=True)] == [True, False]


def test_what_has_not_changed_compares_equal() -> None:
    memory, args = two()
    memory.tensor(args["index"])
    compare(memory, memory.copy(), args, "nothing")


def test_a_change_is_seen_by_the_tensors_that_are_there_and_counted_by_no_version() -> None:
    memory, args = two()
    rows, index = memory.tensor(args["rows"]), memory.tensor(args["index"])
    before, versions = rows.view(torch.int16).clone(), [rows._version, index._version]
    memory.change({**args, "index": {**args["index"], "values": [7, 2]}, "length": 3})
    assert index.tolist() == [7, 2]
    assert torch.equal(rows.view(torch.int16), ~before)
    assert [rows._version, index._version] == versions


def test_every_single_byte_is_compared() -> None:
    memory, args = two()
    before = memory.copy()
    for content in memory.bytes:
        for byte in range(len(content)):
            content[byte] ^= 1
            with pytest.raises(NonconformanceError, match="the first of 1 bytes that differ"):
                compare(memory, before, args, "op")
            content[byte] ^= 1
    compare(memory, before, args, "op")


def test_an_element_is_named_with_its_values_and_bits() -> None:
    memory, args = two()
    memory.tensor(args["rows"])[2, 1] = 1.5
    before = memory.copy()
    memory.tensor(args["rows"])[2, 1] = -2.0
    with pytest.raises(NonconformanceError) as caught:
        compare(memory, before, args, "op")
    assert caught.value.as_dict() == {
        "what": "op: rows[2, 1], the first of 2 bytes that differ",
        "expected": "1.5 (0x3fc0)",
        "got": "-2.0 (0xc000)",
    }


def test_a_byte_of_no_argument_is_named_by_its_place() -> None:
    memory, args = two()
    before = memory.copy()
    memory.bytes[0][MARGIN + 2 + 8] ^= 0xFF  # the gap behind the first row of four
    with pytest.raises(NonconformanceError, match=re.escape("op: byte 10 of 34 in the memory of rows, which belongs to no argument")):
        compare(memory, before, args, "op")
    memory, args = two()
    before = memory.copy()
    memory.bytes[1][-1] ^= 0xFF
    with pytest.raises(NonconformanceError, match=rf"byte {16 + MARGIN - 1} of 16 in the memory of index"):
        compare(memory, before, args, "op")


def test_some_arenas_may_be_left_out() -> None:
    memory, args = two()
    before = memory.copy()
    memory.bytes[0][0] ^= 1
    compare(memory, before, args, "op", arenas={1})
    with pytest.raises(NonconformanceError):
        compare(memory, before, args, "op", arenas={0})


def test_elements_are_found_by_their_bytes_and_gaps_are_not() -> None:
    drawing = Drawing()
    view = drawing.tensor("int32", (2, 3, 4), order=(1, 0, 2), gaps=(5, 0, 1), offset=8)
    spec = view.spec()
    found = set()
    for byte in range(drawing.arenas[0]["bytes"]):
        index = element_at(spec, 0, byte)
        if index is not None:
            place = sum(i * step for i, step in zip(index, view.strides, strict=True))
            assert 8 + place * 4 <= byte < 8 + place * 4 + 4
            found.add(tuple(index))
    assert len(found) == 24
    assert element_at(spec, 1, 8) is None
    assert element_at(3, 0, 8) is None
    assert element_at({**spec, "shape": [2, 0, 4]}, 0, 8) is None


def test_zeros_take_up_no_memory_until_written_and_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdock_conformance.checking.memory.CHUNK", 64)
    drawing = Drawing()
    spec = drawing.tensor("int8", (1000,), fill="zeros").spec()
    memory = Arenas(drawing.arenas, HOST)
    tensor = memory.tensor(spec)
    assert not tensor.any()
    tensor[700] = 7
    twin = memory.copy()
    assert twin.tensor(spec)[700] == 7
    compare(memory, twin, {"pool": spec}, "op")
    tensor[999] = 1
    with pytest.raises(NonconformanceError, match=r"pool\[999\].*expected 0 \(0x00\), got 1 \(0x01\)"):
        compare(memory, twin, {"pool": spec}, "op")


@pytest.mark.parametrize(
    ("element", "text"),
    [
        (torch.tensor(-0.0), "-0.0 (0x80000000)"),
        (torch.tensor(1.5, dtype=torch.float16), "1.5 (0x3e00)"),
        (torch.tensor(-1, dtype=torch.int64), "-1 (0xffffffffffffffff)"),
        (torch.tensor(0, dtype=torch.int8), "0 (0x00)"),
    ],
)
def test_elements_are_written_with_their_bits(element: torch.Tensor, text: str) -> None:
    assert text_of(element) == text


def test_zeros_on_a_device_are_compared_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gigabytes of them, of which none is brought to the host; what is not zero on either side is noticed all the same."""
    monkeypatch.setattr("kvdock_conformance.checking.memory._HOST", torch.device("meta"))  # so that this memory is a device's
    drawing = Drawing()
    args = {"rows": drawing.tensor("uint8", (4, 4), fill="zeros").spec()}
    memory = Arenas(drawing.arenas, HOST)
    expected = memory.copy()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "cpu", pytest.fail)
        compare(memory, expected, args, "nothing")
    for side in (memory, expected):
        side.bytes[0][MARGIN + 6] = 3
        with pytest.raises(NonconformanceError, match=r"rows\[1, 2\], the first of 1 bytes"):
            compare(memory, expected, args, "a byte")
        side.bytes[0][MARGIN + 6] = 0
    for side in (memory, expected):
        side.bytes[0][MARGIN + 6] = 3
    compare(memory, expected, args, "both")


def test_a_room_is_used_again_once_nothing_lies_in_it() -> None:
    before = len(rooms._KEPT)
    first = [two()[0] for _ in range(before + 1)]
    most = len(rooms._KEPT)
    assert most >= before + 1
    assert len({memory.bytes[0].data_ptr() for memory in first}) == len(first), "each has its own"
    del first
    for _ in range(5):
        two()
    assert len(rooms._KEPT) == most
