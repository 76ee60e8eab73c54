"""Calls that must be refused: which error they raise, what it says, and that memory stays as it was."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from unittest import mock

from torch._subclasses.fake_tensor import FakeTensorMode

import kvdock
from kvdock import errors
from kvdock.ops.catalog import CATALOG
from kvdock.ops.validate import validate
from kvdock_conformance.checking.calls import expect_refusal
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.meaning import compare_call, refer
from kvdock_conformance.checking.memory import Arenas, compare
from kvdock_conformance.checking.plans import elsewhere
from kvdock_conformance.checking.target import Target

__all__ = ["BUILT_IN", "check_mistake", "check_recovery", "check_refusal", "check_served_or_refused"]

BUILT_IN: Mapping[str, type[Exception]] = MappingProxyType(
    {
        "ArgumentTypeError": TypeError,
        "ArgumentValueError": ValueError,
        "IndexRangeError": IndexError,
        "UnsupportedError": NotImplementedError,
    }
)
"""The built-in that an error must be, too."""


def check_refusal(target: Target, data: Mapping[str, Any]) -> None:
    """Make a bad call before and after a good one has left a plan: each time it must raise and change nothing.

    Args:
        target: the backend.
        data: the case: ``calls`` are the good call and the bad one, ``error`` is the name of the error's class in `kvdock`,
            ``texts`` what its text must contain.

    Raises:
        NonconformanceError: it does not raise, says something else, or a byte has changed.
    """
    memory = Arenas(data["arenas"], target.device)
    (good, good_args), (bad, bad_args) = (
        (call, {name: memory.tensor(spec) for name, spec in call["args"].items()}) for call in data["calls"]
    )
    for _ in range(2):
        expect_refusal(target, memory, bad, bad_args, getattr(kvdock, data["error"]), data["texts"])
        target.call(good["op"], good_args)


def check_mistake(target: Target, data: Mapping[str, Any]) -> None:
    """Make the wrong call of a case before any good one, and again behind two good ones, when there is a plan for its like.

    Raises:
        NonconformanceError: it does not raise, raises another error or says something else, or a byte has changed.
    """
    memory = Arenas(data["arenas"], target.device)
    good, wrong = _arguments(memory, data, 0), _arguments(memory, data, 1)
    _check_raises(target, (memory, wrong), data, "before any good call")
    for _ in range(2):
        target.call(data["calls"][0]["op"], good)
    _check_raises(target, (memory, wrong), data, "behind a good call")


def check_recovery(target: Target, data: Mapping[str, Any]) -> None:
    """Check that the good call of a case is right behind the wrong one, by this thread and by others.

    Raises:
        NonconformanceError: a byte differs.
    """
    memory, call = Arenas(data["arenas"], target.device), data["calls"][0]
    good, wrong = _arguments(memory, data, 0), _arguments(memory, data, 1)
    for make in (elsewhere, lambda work: work()) * 2:
        with contextlib.suppress(kvdock.KVDockError):
            target.call(call["op"], wrong)
        expected = memory.copy()
        refer(expected, call)
        make(lambda: target.call(call["op"], good))
        compare_call(memory, expected, call, f"{call['op']} behind a call that raised")


def _arguments(memory: Arenas, data: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the arguments of the good call, 0, or of the wrong one, 1."""
    args = {name: memory.tensor(spec) for name, spec in data["calls"][number]["args"].items()}
    for name in data["meta"] if number else ():
        args[name] = args[name].to("meta")
    for name in data.get("fake", ()) if number else ():
        with warnings.catch_warnings(), mock.patch.dict(os.environ):  # what torch imports for it changes both
            args[name] = FakeTensorMode().from_tensor(args[name])
    return args


def _check_raises(target: Target, made: tuple[Arenas, dict[str, Any]], data: Mapping[str, Any], when: str) -> None:
    """Make the wrong call, and look at its error and at memory."""
    (memory, args), op = made, data["calls"][1]["op"]
    before, raised = memory.copy(), None
    try:
        target.call(op, args)
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        raised = error
    if raised is None and data["may_pass"] and not target.must_raise:
        return
    _check_error(raised, data, f"{op} {when}")
    compare(memory, before, data["calls"][1]["args"], f"{op} raised and wrote")


def _check_error(raised: Exception | None, data: Mapping[str, Any], what: str) -> None:
    name = data["error"]
    if not isinstance(raised, getattr(errors, name)) or not isinstance(raised, BUILT_IN[name]):
        raise NonconformanceError(
            what, expected=f"{name}, a {BUILT_IN[name].__name__}", got=f"{type(raised).__name__}: {raised}" if raised else "no error"
        ) from raised
    for text in (data["calls"][1]["op"], *data["texts"], "expected ", "got ", "Fix: "):
        if text not in str(raised):
            raise NonconformanceError(f"{what}: text of the {name}", expected=f"it says {text!r}", got=raised) from raised


def check_served_or_refused(target: Target, data: Mapping[str, Any]) -> None:
    """Check that a request that ``supports`` has nothing against is prepared, without an error.

    Raises:
        NonconformanceError: preparing raises, or returns something else.
    """
    memory, call = Arenas(data["arenas"], target.device), data["calls"][0]
    args = tuple(memory.tensor(call["args"].get(name)) for name in CATALOG[call["op"]].arg_names)
    if not target.reasons_against(call["op"], args):
        with target.backend.device_guard(target.device):
            try:
                plan = target.kernels[call["op"]].prepare(validate(CATALOG[call["op"]], args))
            except Exception as error:
                what = f"{call['op']}: prepare() of what supports() has nothing against"
                raise NonconformanceError(what, expected="a descriptor", got=f"{type(error).__name__}: {error}") from error
            if not isinstance(plan, kvdock.plugin.Descriptor):
                raise NonconformanceError(f"{call['op']}: prepare()", expected="a kvdock.plugin.Descriptor", got=repr(plan))
            plan.destroy()
    target.call(call["op"], {name: value for name, value in zip(CATALOG[call["op"]].arg_names, args, strict=True) if value is not None})
