"""Calls of an op against the reference, every byte compared."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import kvdock
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.memory import Memory, compare
from kvdock_conformance.checking.target import Target

__all__ = ["Reference", "check_calls", "check_inputs", "check_refused"]

Reference = Callable[..., Sequence[tuple[int, ...]]]
"""An op of `kvdock_conformance.reference`: takes the arguments without scales, returns the places it skipped."""


def check_calls(target: Target, data: Mapping[str, Any], reference: Reference, index: Callable[[Sequence[int]], str]) -> None:
    """Make the calls of a case, and compare all memory with the reference's after each.

    Args:
        target: the backend.
        data: the case: ``arenas`` and ``calls``.
        reference: what the op means.
        index: names a place that the reference skipped as an error must name it: ``slot_mapping[3]``.

    Raises:
        NonconformanceError: a byte differs; an index out of range neither raised as it must nor was skipped and counted.
    """
    memory = Memory(data["arenas"], target.device)
    for call in data["calls"]:
        args = {name: memory.tensor(spec) for name, spec in call["args"].items()}
        expected = memory.copy()
        twins = {name: expected.tensor(spec) for name, spec in call["args"].items() if not name.endswith("_scale")}
        skipped = reference(*twins.values())
        _check_call(target, call, args, (memory, expected), [index(place) for place in skipped])


def _check_call(target: Target, call: Mapping[str, Any], args: dict[str, Any], memories: tuple[Memory, Memory], skipped: list[str]) -> None:
    """Make one call; ``memories`` are what it writes to and what must come out, ``skipped`` the names of places out of range."""
    op, (memory, expected) = call["op"], memories
    before, counted = memory.copy(), target.skipped()
    try:
        target.call(op, args)
    except kvdock.IndexRangeError as error:
        _check_range_error(target, call, error, skipped)
        compare(memory, before, call["args"], f"{op} raised and wrote")
        skipped = []
    else:
        if skipped and (target.must_raise or _gives_ints(call)):
            raise NonconformanceError(f"{op} with {skipped[0]} out of range", expected="IndexRangeError", got="no error")
        compare(memory, expected, call["args"], op)
    if target.skipped() - counted != len(skipped):
        raise NonconformanceError(f"{op}: writes counted as skipped", expected=len(skipped), got=target.skipped() - counted)


def _gives_ints(call: Mapping[str, Any]) -> bool:
    """Whether a call gives what may be out of range as an int, which the host can read whatever the device."""
    return any(isinstance(value, int) for value in call["args"].values())


def _check_range_error(target: Target, call: Mapping[str, Any], error: Exception, skipped: list[str]) -> None:
    """Check that an IndexRangeError is raised for a reason, where it may be, and names the first bad place."""
    op = call["op"]
    if not skipped:
        raise NonconformanceError(f"{op} with every index in range", expected="no error", got=f"IndexRangeError: {error}")
    if not (target.may_raise or _gives_ints(call)):
        raise NonconformanceError(f"{op} on {target.device}", expected="no look at indices on a device", got=f"IndexRangeError: {error}")
    if skipped[0] not in str(error):
        raise NonconformanceError(f"{op}: text of the IndexRangeError", expected=f"the first bad place, {skipped[0]}", got=error)


def check_inputs(target: Target, data: Mapping[str, Any], written: Collection[str]) -> None:
    """Make the calls of a case, and compare the memory of what is only read.

    Args:
        target: the backend.
        data: the case.
        written: names of the arguments that the op writes.

    Raises:
        NonconformanceError: a byte of an input has changed.
    """
    memory = Memory(data["arenas"], target.device)
    for call in data["calls"]:
        args = {name: memory.tensor(spec) for name, spec in call["args"].items()}
        pools = {spec["arena"] for name, spec in call["args"].items() if name in written}
        before = memory.copy()
        target.call(call["op"], args)
        compare(memory, before, call["args"], f"{call['op']}: an input", set(range(len(memory.bytes))) - pools)


def check_refused(target: Target, data: Mapping[str, Any], error: type[Exception], texts: Sequence[str]) -> None:
    """Make the first call of a case, which must raise and change nothing.

    Args:
        target: the backend.
        data: the case.
        error: class of the error.
        texts: what its text must contain.

    Raises:
        NonconformanceError: it does not raise, raises another error or says something else, or a byte has changed.
    """
    memory = Memory(data["arenas"], target.device)
    call = data["calls"][0]
    args = {name: memory.tensor(spec) for name, spec in call["args"].items()}
    before = memory.copy()
    try:
        target.call(call["op"], args)
    except error as caught:
        missing = [text for text in texts if text not in str(caught)]
        if missing:
            raise NonconformanceError(
                f"{call['op']}: text of the {type(caught).__name__}", expected=f"it says {missing[0]!r}", got=caught
            ) from caught
    else:
        raise NonconformanceError(call["op"], expected=error.__name__, got="no error")
    compare(memory, before, call["args"], f"{call['op']} raised and wrote")
