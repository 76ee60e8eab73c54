"""Devices, streams, threads and graphs: ``KVD-DEVICE``. What needs more than a host says so in `Requirement.hardware`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kvdock_conformance.cases.computing import COMPUTING
from kvdock_conformance.cases.drawing import Drawing
from kvdock_conformance.cases.every_op import EVERY, OpCall
from kvdock_conformance.cases.layouts import Geometry
from kvdock_conformance.checking.claims import check_count, check_guard, check_guard_again
from kvdock_conformance.checking.devices import (
    GRAPHS,
    STREAMS,
    SYNC_DEBUG,
    TWO_DEVICES,
    check_captured,
    check_foreign_tensor,
    check_miss_under_capture,
    check_no_sync,
    check_not_capturing,
    check_other_device,
    check_replay,
    check_stream,
    check_threads_on_devices,
)
from kvdock_conformance.checking.pins import check_pins
from kvdock_conformance.requirement import Capability, Case, Check, Requirement

__all__ = ["AREA", "REQUIREMENTS"]

AREA = "devices"
_SLOTS = [7, 3, 21, 4, 0, 31]
_REPLAYS = [[30, 3, 1, 5, 6, 31], [9, -1, 8, -5, 7, -1], [99, 3, 32, 5, -1, 31], [-1] * 6]
_STEPS = [[30, 3, 1, 5, 6, 31], [9, 2, 8, 11, 7, 0]]


def _require(number: int, sentence: str, check: Check, *cases: Case, needs: Capability | None = None, hardware: str = "") -> Requirement:
    made: Callable[[], Iterable[Case]] = lambda: cases or _each()  # noqa: E731 - the type is the reason
    return Requirement(f"KVD-DEVICE-{number:03}", sentence, AREA, check, made, needs=needs, hardware=hardware)


def _each(**more: Any) -> tuple[Case, ...]:
    """Return a call of six tokens, or of what they come to, for each op."""
    return tuple(Case(op, {"op": op, "slots": _SLOTS, **more, **_computed(op)}) for op in EVERY)


def _computed(op: str) -> dict[str, Any]:
    """Return what the calls of an op that computes are made of, for each number of heads that is asked for."""
    if op not in COMPUTING:
        return {}
    own, by_heads = COMPUTING[op], {}
    for heads in (1, 2, 3, 5):
        drawing, sizes = Drawing(heads), Geometry.even(heads, 16, num_blocks=8, block=4, dtype="float32")
        made = OpCall(op, tokens=len(_SLOTS), geometry=sizes, more=own.of_slots).call(drawing)
        by_heads[str(heads)] = drawing.case(made)
    return {"by_heads": by_heads, "index": own.indices[0], "values": list(own.slots)}


def _foreign(name: str, argument: str) -> Case:
    """Return a call whose one tensor is elsewhere."""
    return Case(f"{argument} elsewhere", {"attribute": name, "argument": argument, "device": "cpu"})


REQUIREMENTS = [
    _require(
        1,
        "A call goes to the device of its tensors, whichever is current, and leaves that one current.",
        check_other_device,
        needs=TWO_DEVICES,
        hardware="two devices",
    ),
    _require(
        2,
        "A call goes to the current stream of its device and returns before it is done; where there are no streams it is done when it "
        "returns.",
        check_stream,
        needs=STREAMS,
        hardware="streams",
    ),
    _require(3, "A call that is known makes the host wait for nothing.", check_no_sync, needs=SYNC_DEBUG, hardware="streams"),
    _require(
        4,
        "What claims graph_capture can be recorded, and replayed with other slots, padding, slots out of range and values after its plan "
        "was evicted; what does not is never capturing.",
        check_replay,
        *_each(replays=_REPLAYS),
        needs=GRAPHS,
        hardware="graphs",
    ),
    _require(
        5,
        "A call without a plan raises while a graph is recorded, says to warm up first, and leaves the graph whole.",
        check_miss_under_capture,
        needs=GRAPHS,
        hardware="graphs",
    ),
    _require(6, "While no graph is recorded, no device is capturing.", check_not_capturing),
    _require(
        7,
        "A tensor on another device than the pools is refused by an error that names it, and nothing is written.",
        check_foreign_tensor,
        _foreign("k", "k"),
        _foreign("v", "v"),
        _foreign("index", "slot_mapping"),
    ),
    _require(
        8,
        "Threads may call at once, on one device or several, with plans that are not made yet.",
        check_threads_on_devices,
        *_each(threads=4, heads=[1, 2, 3, 5]),
    ),
    _require(9, "The guard of a device can be entered and left, by an error too, which it passes on.", check_guard),
    _require(10, "The count of skipped writes of a device is a non-negative int, which asking for it does not change.", check_count),
    _require(
        11,
        "Guards can be entered inside each other, and by threads at once, and leaving one makes the device before it current.",
        check_guard_again,
    ),
    _require(
        12,
        "A captured step repeats what the step does, with the slots and values of then, and returns what it returned.",
        check_captured,
        *_each(replays=_STEPS),
    ),
    _require(
        13,
        "Memory of the host that is locked for a device is given back by itself: what else is locked stays so, and what it holds is left.",
        check_pins,
        Case("two rooms", {}),
    ),
]
