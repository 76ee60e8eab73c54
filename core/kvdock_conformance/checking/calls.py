"""Calls of an op against the reference, every byte compared."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

import kvdock
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.memory import Arenas, arenas_of, changed_by, compare
from kvdock_conformance.checking.target import Target

__all__ = ["Reference", "check_calls", "check_inputs", "check_range_error", "check_refused", "expect_refusal"]

Reference = Callable[..., Sequence[tuple[int, ...]]]
"""An op of `kvdock_conformance.reference`: takes the arguments without scales, returns the places it skipped."""


def check_calls(
    target: Target,
    data: Mapping[str, Any],
    reference: Reference,
    index: Callable[[Sequence[int]], str],
    *,
    counted: bool = True,
    also: Sequence[Target] = (),
    has_one_for_all: Callable[[Mapping[str, Any]], bool] = lambda call: False,
) -> None:
    """Make the calls of a case, and compare all memory with the reference's after each.

    One that says ``again`` is made with the same tensors as the call before, when what all of them hold has changed unseen by torch.

    Args:
        target: the backend.
        data: the case: ``arenas`` and ``calls``, and where given ``places``: views whose values are written before the first call.
        reference: what the op means.
        index: names a place that the reference skipped as an error must name it: ``slot_mapping[3]``.
        counted: whether what is skipped on a device is counted: writes are, reads are not.
        also: other ways to the backend, which must do the same, each on memory of its own.
        has_one_for_all: whether a call has one index for all places: then its argument's name is that of the place.

    Raises:
        NonconformanceError: a byte differs; an index out of range neither raised as it must nor was skipped and counted.
    """
    told: list[_Told] = []
    # One way after the other, not in turns: a call is to be behind its like.
    for way in (_Way(each, Arenas(data["arenas"], target.device)) for each in (target, *also)):
        for place in data.get("places", ()):
            way.memory.tensor(place)
        for number, call in enumerate(data["calls"]):
            if number == len(told):
                # The reference runs on a copy of all memory, gaps and margins too, so that one comparison finds every stray byte. What
                # was compared is alike, so that the copy serves the next call too; another way needs what this call may change as it was.
                before = told[-1].expected if told else way.memory.copy()
                told.append(_Told(before.copy(changed_by(call)) if told and also else before, call))
            way.make(call)
            named = (lambda place: index(place).partition("[")[0]) if has_one_for_all(call) else index
            told[number].refer(reference, named, is_error=way.error is not None)
            # What a call changed elsewhere stays changed until the end, unless another call changes it too.
            way.check(call, told[number], None if number == len(data["calls"]) - 1 else arenas_of(call), counted=counted)
        del way  # and its memory, which serves the next


class _Told:
    """What memory must be behind a call, and which places are out of range.

    Args:
        expected: memory before it, which is written to.
        call: the call.
    """

    def __init__(self, expected: Arenas, call: Mapping[str, Any]) -> None:
        self.expected, self.call = expected, call
        if call.get("again"):
            expected.change(call["args"])
        self.twins = {name: expected.tensor(spec) for name, spec in call["args"].items()}
        self.names: list[str] | None = None
        self.is_error = False

    def refer(self, reference: Reference, index: Callable[[Sequence[int]], str], *, is_error: bool) -> None:
        """Let the reference tell once; where there was an error, nothing may have been written.

        Raises:
            NonconformanceError: there was one, and none the other way.
        """
        if self.names is None:
            aside = self.expected.copy() if is_error else self.expected
            twins = {name: aside.tensor(spec) for name, spec in self.call["args"].items()} if is_error else self.twins
            self.names = [index(place) for place in reference(*(twin for name, twin in twins.items() if not name.endswith("_scale")))]
            self.is_error = is_error
        if is_error is not self.is_error:
            expected, got = ("an IndexRangeError", "none")[:: 1 if self.is_error else -1]
            raise NonconformanceError(f"{self.call['op']}, bound to its pools", expected=expected, got=got)


class _Way:
    """A way to the backend, and what came of its last call.

    Args:
        target: the way.
        memory: its own.
    """

    def __init__(self, target: Target, memory: Arenas) -> None:
        self.target, self.memory = target, memory
        self.args: dict[str, Any] = {}
        self.error: kvdock.IndexRangeError | None = None
        self.skipped = 0

    def make(self, call: Mapping[str, Any]) -> None:
        """Make a call, and note the error for an index out of range, and how many writes were skipped."""
        is_again = call.get("again")
        if is_again:
            self.memory.change(call["args"])
        self.args = {
            name: self.args[name] if is_again and isinstance(spec, Mapping) else self.memory.tensor(spec)
            for name, spec in call["args"].items()
        }
        before, self.error = self.target.skipped(), None
        try:
            self.target.call(call["op"], self.args)
        except kvdock.IndexRangeError as error:
            self.error = error
        self.skipped = self.target.skipped() - before

    def check(self, call: Mapping[str, Any], told: _Told, arenas: Collection[int] | None, *, counted: bool) -> None:
        """Check what the call has written to arenas, or all, raised and counted."""
        names = told.names or []
        count = len(names) if counted and self.error is None else 0
        check_range_error(self.target, call["op"], self.error, names, given_as_int=_gives_ints(call))
        if self.error is not None and _shown(self.error, self.args) not in str(self.error):
            value = _shown(self.error, self.args)
            raise NonconformanceError(
                f"{call['op']}: text of the IndexRangeError", expected=f"the value that is there, {value}", got=self.error
            )
        compare(self.memory, told.expected, call["args"], call["op"] if self.error is None else f"{call['op']} raised and wrote", arenas)
        if self.skipped != count:
            raise NonconformanceError(f"{call['op']}: writes counted as skipped", expected=count, got=self.skipped)


def _shown(error: Exception, args: Mapping[str, Any]) -> str:
    """Return how an error shows the value at the place that it names: ``cache_lengths``, or ``slot_mapping[0, 3]``."""
    found = re.search(r"(\w+)(?:\[([\d, ]+)\])?(?=: )", str(error).partition(": ")[2])
    value = args.get(found[1]) if found else None
    if not isinstance(value, torch.Tensor):
        return "" if value is None else f"got {value}"
    place = tuple(map(int, found[2].split(","))) if found and found[2] else (0,) * value.dim()
    return f"got {int(value[place])}" if len(place) == value.dim() else ""


def _gives_ints(call: Mapping[str, Any]) -> bool:
    """Whether a call gives what may be out of range as an int, which the host can read whatever the device."""
    return any(isinstance(value, int) for value in call["args"].values())


def check_range_error(target: Target, op: str, error: Exception | None, skipped: Sequence[str], *, given_as_int: bool = False) -> None:
    """Check that an IndexRangeError is raised where it must be, for a reason and where it may be, and names the first bad place.

    Args:
        target: the backend.
        op: name of the op.
        error: what was raised; None when nothing was.
        skipped: names of the places out of range.
        given_as_int: whether what may be out of range is an int, which the host can read whatever the device.

    Raises:
        NonconformanceError: it is not so.
    """
    if error is None:
        if skipped and (target.must_raise or given_as_int):
            raise NonconformanceError(f"{op} with {skipped[0]} out of range", expected="IndexRangeError", got="no error")
        return
    if not skipped:
        raise NonconformanceError(f"{op} with every index in range", expected="no error", got=f"IndexRangeError: {error}")
    if not (target.may_raise or given_as_int):
        raise NonconformanceError(f"{op} on {target.device}", expected="no look at indices on a device", got=f"IndexRangeError: {error}")
    place = f"{op}: {skipped[0]}"
    if place not in str(error):
        raise NonconformanceError(f"{op}: text of the IndexRangeError", expected=f"the op and the first bad place, {place}", got=error)


def check_inputs(target: Target, data: Mapping[str, Any], written: Collection[str]) -> None:
    """Make the calls of a case, and compare the memory of what is only read.

    Args:
        target: the backend.
        data: the case.
        written: names of the arguments that the op writes.

    Raises:
        NonconformanceError: a byte of an input has changed.
    """
    memory = Arenas(data["arenas"], target.device)
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
    memory, call = Arenas(data["arenas"], target.device), data["calls"][0]
    expect_refusal(target, memory, call, {name: memory.tensor(spec) for name, spec in call["args"].items()}, error, texts)


def expect_refusal(
    target: Target, memory: Arenas, call: Mapping[str, Any], args: dict[str, Any], error: type[Exception], texts: Sequence[str]
) -> None:
    """Make a call, which must raise and change nothing.

    Args:
        target: the backend.
        memory: all memory of the case.
        call: the call as data.
        args: its arguments.
        error: class of the error.
        texts: what its text must contain.

    Raises:
        NonconformanceError: it does not raise, says something else, or a byte has changed.
    """
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
