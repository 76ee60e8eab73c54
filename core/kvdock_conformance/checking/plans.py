"""What a backend's plans must stand: repetition, change, eviction, other threads."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

import kvdock
from kvdock import runtime
from kvdock.descriptors.manager import DEFAULT_CAPACITY
from kvdock.interface import HOST, TensorMeta
from kvdock.ops.catalog import CATALOG
from kvdock.ops.validate import validate
from kvdock.spec import COPY_DTYPES, QUANTISED_DTYPES
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.growth import held, seconds, set_apart
from kvdock_conformance.checking.meaning import compare_call, in_order, kernel_of, refer, schema_of
from kvdock_conformance.checking.memory import Arenas
from kvdock_conformance.checking.served import check_not_served, reasons_against
from kvdock_conformance.checking.target import Target
from kvdock_conformance.checking.watch import WatchedPlan, watched
from kvdock_conformance.requirement import Capability, Check

__all__ = [
    "OWN_PLANS",
    "check_all_calls",
    "check_calls_of_others",
    "check_changes",
    "check_clear_elsewhere",
    "check_eviction",
    "check_in_use",
    "check_own_plans",
    "check_prepare",
    "check_releases",
    "check_reuse",
    "check_supports",
    "check_threads",
    "check_workspace",
    "elsewhere",
]

_WAIT_S = 30.0
_TIMES, _AT_ONCE_S = 10, 0.005


class _Calls:
    """The calls of a case, each compared with the reference.

    Args:
        target: the backend.
        data: the case. Its calls must have every index in range.
    """

    def __init__(self, target: Target, data: Mapping[str, Any]) -> None:
        self.calls: Sequence[Mapping[str, Any]] = data["calls"]
        self.op: str = self.calls[0]["op"]
        self.memory = Arenas(data["arenas"], target.device)
        self._target = target
        self._compared: Arenas | None = None

    def arguments(self, number: int) -> dict[str, Any]:
        """Return the arguments of a call."""
        return {name: self.memory.tensor(spec) for name, spec in self.calls[number]["args"].items()}

    def in_order(self, number: int) -> tuple[Any, ...]:
        """Return the arguments of a call in the schema's order, None where absent."""
        return in_order(self.op, self.arguments(number))

    def expected(self, *numbers: int) -> Arenas:
        """Return what memory should hold after calls."""
        twin = self.memory.copy()
        for number in numbers:
            refer(twin, self.calls[number])
        return twin

    def make(self, number: int, ready: Callable[[], object] = lambda: None) -> None:
        """Make a call once ``ready`` returns, and compare every byte."""
        args = self.arguments(number)
        # What was compared is alike, so that it serves the next call too: memory is changed by nobody else.
        expected = self._compared or self.memory.copy()
        refer(expected, self.calls[number])
        ready()
        self._target.call(self.op, args)
        compare_call(self.memory, expected, self.calls[number], f"{self.op}, call {number}")
        self._compared = expected

    def make_all(self) -> None:
        """Make every call, in order."""
        for number in range(len(self.calls)):
            self.make(number)


def _prepared(op: str) -> int:
    """Return how many plans were prepared for an op so far, in all threads."""
    stats = runtime.default().dispatcher.descriptors.stats()
    return sum(counted.misses for counted in stats.get(op, {}).values())


def _failures(op: str) -> int:
    """Return how many plans of an op raised when they were destroyed."""
    stats = runtime.default().dispatcher.descriptors.stats()
    return sum(counted.failures for counted in stats.get(op, {}).values())


@contextlib.contextmanager
def _at_most(op: str, capacity: int) -> Iterator[None]:
    """Keep no more than so many plans of an op in a block."""
    descriptors = runtime.default().dispatcher.descriptors
    descriptors.set_capacity(op, capacity)
    try:
        yield
    finally:
        descriptors.set_capacity(op, DEFAULT_CAPACITY)


def _clear(op: str) -> None:
    """Forget every plan of an op, those of this thread at once."""
    runtime.default().dispatcher.descriptors.clear(op)


def elsewhere(*functions: Callable[[], object]) -> None:
    """Call functions at once, each in a thread of its own.

    Raises:
        BaseException: what the first of them raised.
    """
    raised: list[BaseException] = []

    def run(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            raised.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def check_all_calls(target: Target, data: Mapping[str, Any]) -> None:
    """Check that the calls of a case are right, whoever serves them."""
    _Calls(target, data).make_all()


def check_calls_of_others(target: Target, data: Mapping[str, Any], reasons: Sequence[str], check: Check) -> None:
    """Check calls of which the backend does not serve the first: there are no plans of its own to look at."""
    check_not_served(target, data, reasons, check_all_calls)


OWN_PLANS = Capability("prepares plans for the call", reasons_against, check_calls_of_others)


def check_reuse(target: Target, data: Mapping[str, Any]) -> None:
    """Check that calls behind the first ``data["warm"]`` are right and prepare nothing.

    Raises:
        NonconformanceError: a plan was prepared, or a byte differs.
    """
    calls = _Calls(target, data)
    _clear(calls.op)
    for number in range(len(calls.calls)):
        before = _prepared(calls.op)
        calls.make(number)
        count = _prepared(calls.op) - before
        if count and number >= data["warm"]:
            raise NonconformanceError(f"{calls.op}: plans prepared by call {number}", expected=0, got=count)
        if not count and not number:
            raise NonconformanceError(f"{calls.op}: plans prepared by the first call", expected=1, got=count)


def check_changes(target: Target, data: Mapping[str, Any]) -> None:
    """Check that calls of different signatures are right, and that each plan fits the calls that it is used for.

    Raises:
        NonconformanceError: a byte differs, or a plan was called with what it was not prepared for.
    """
    _Calls(target, data).make_all()
    with watched(target, data["calls"][0]["op"]):
        _Calls(target, data).make_all()


def check_eviction(target: Target, data: Mapping[str, Any]) -> None:
    """Check calls of signatures that drive each other out of the cache, and how their plans end.

    Raises:
        NonconformanceError: a byte differs, or a plan was not destroyed once, under its device, without an error.
        Exception: what destroying a plan raises that was never called.
    """
    calls = _Calls(target, data)
    failures, numbers = _failures(calls.op), range(len(calls.calls))
    # Of an op of kvdock's own, what the backend refuses is served by a kernel that is not watched.
    wanted = sum(calls.op not in CATALOG or not target.reasons_against(calls.op, calls.in_order(number)) for number in numbers)
    set_apart()
    with target.backend.device_guard(target.device):
        kernel_of(target, calls.op).prepare(_request(target, data)).destroy()  # as one whose only call raised
    with _at_most(calls.op, 1), watched(target, calls.op) as watch:
        _clear(calls.op)
        calls.make_all()
        _clear(calls.op)
        gc.collect()  # what is destroyed once more when it is collected is destroyed twice
        watch.check_ends(calls.op)
        if len(watch.prepared) < wanted:
            raise NonconformanceError(f"{calls.op}: plans prepared", expected=wanted, got=len(watch.prepared))
    if _failures(calls.op) != failures:
        raise NonconformanceError(
            f"{calls.op}: destroy()", expected="no error", got=f"{_failures(calls.op) - failures} errors, see the log"
        )


def check_in_use(target: Target, data: Mapping[str, Any]) -> None:
    """Check a call during which its plan leaves the cache: another call is made inside it, of the second signature.

    With ``data["clear"]`` another thread clears the caches first.

    Raises:
        NonconformanceError: a byte differs, or the plan was destroyed before its call had ended, or not after it.
    """
    calls = _Calls(target, data)
    inside: list[bool] = []

    def nest(plan: WatchedPlan) -> None:
        if inside:
            return
        inside.append(True)
        if data["clear"]:
            elsewhere(lambda: _clear(calls.op))
        target.call(calls.op, calls.arguments(1))
        if plan.ends:
            raise NonconformanceError(f"{calls.op}: destroy() of a plan", expected="no call while the plan runs", got="a call")

    with _at_most(calls.op, 1), watched(target, calls.op) as watch:
        expected = calls.expected(1, 0)
        watch.before_call = nest
        target.call(calls.op, calls.arguments(0))
        compare_call(calls.memory, expected, calls.calls[0], f"{calls.op}, a call inside another")
        calls.make(0)
        _clear(calls.op)
        watch.check_ends(calls.op)


def check_threads(target: Target, data: Mapping[str, Any]) -> None:
    """Check the same calls made by two threads at once, each on memory of its own, neither with a plan to begin with.

    Raises:
        NonconformanceError: a byte differs.
    """
    barrier = threading.Barrier(2)

    def work() -> None:
        calls = _Calls(target, data)
        try:
            for number in range(len(calls.calls)):
                calls.make(number, lambda: barrier.wait(_WAIT_S))
        except BaseException:
            barrier.abort()
            raise

    _clear(data["calls"][0]["op"])
    try:
        elsewhere(work, work)
    except threading.BrokenBarrierError:  # raised beside what broke it, or by a thread that was waited for in vain
        raise NonconformanceError("two threads at once", expected=f"calls that end within {_WAIT_S:g} s", got="one that does not") from None


def check_clear_elsewhere(target: Target, data: Mapping[str, Any]) -> None:
    """Check calls between which another thread clears the caches, and how their plans end.

    Raises:
        NonconformanceError: a byte differs, a plan is found again, or was not destroyed once, under its device.
    """
    calls = _Calls(target, data)
    set_apart()
    with watched(target, calls.op) as watch:
        for number in range(len(calls.calls)):
            calls.make(number)
            elsewhere(lambda: _clear(calls.op))
        if len(watch.prepared) != len(calls.calls):
            raise NonconformanceError(f"{calls.op}: plans prepared", expected=len(calls.calls), got=len(watch.prepared))
        _clear(calls.op)
        gc.collect()
        watch.check_ends(calls.op)


def _request(target: Target, data: Mapping[str, Any], number: int = 0) -> kvdock.plugin.Request:
    """Return the request of a call of a case: the first."""
    calls = _Calls(target, data)
    return validate(schema_of(calls.op), calls.in_order(number))


def check_workspace(target: Target, data: Mapping[str, Any]) -> None:
    """Check what a plan says of its scratch memory, before and after it has been called.

    Raises:
        NonconformanceError: that is no number of bytes.
    """
    calls = _Calls(target, data)
    with target.backend.device_guard(target.device):
        plan = kernel_of(target, calls.op).prepare(_request(target, data))
        for when in ("before a call", "after a call"):
            size = plan.workspace_bytes
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise NonconformanceError(f"{calls.op}: workspace_bytes {when}", expected="a non-negative int", got=repr(size))
            plan(*calls.in_order(0))
        plan.destroy()


def check_own_plans(target: Target, data: Mapping[str, Any]) -> None:
    """Check that two plans for one request are two, and that one outlives the other.

    Raises:
        NonconformanceError: they are one object, or the second does nothing once the first is destroyed.
    """
    calls, kernel = _Calls(target, data), kernel_of(target, data["calls"][0]["op"])
    with target.backend.device_guard(target.device):
        first, second = (kernel.prepare(_request(target, data)) for _ in range(2))
        if first is second:
            raise NonconformanceError(f"{calls.op}: prepare(), asked twice", expected="two descriptors", got="the same one twice")
        first.destroy()
        expected = calls.expected(0)
        second(*calls.in_order(0))
        second.destroy()
    compare_call(calls.memory, expected, calls.calls[0], f"{calls.op} by the second of two plans")


def check_prepare(target: Target, data: Mapping[str, Any]) -> None:
    """Prepare a plan for each call of a case once all were asked about, as threads do that come between one another's questions.

    Raises:
        NonconformanceError: memory differs after a call by its plan.
    """
    calls, kernel = _Calls(target, data), kernel_of(target, data["calls"][0]["op"])
    requests = [_request(target, data, number) for number in range(len(calls.calls))]
    served = [not kernel.supports(request) for request in requests]
    for number, request in enumerate(requests):
        if not served[number]:
            continue
        expected = calls.expected(number)
        with target.backend.device_guard(target.device):
            plan = kernel.prepare(request)
            plan(*calls.in_order(number))
            plan.destroy()
        compare_call(calls.memory, expected, calls.calls[number], f"{calls.op}, call {number}, by a plan that was prepared late")


_MOST_OF_A_PLAN = 1 << 20
"""Bytes that a plan may hold: scratch memory is taken in each call."""


def _check_held(target: Target, data: Mapping[str, Any]) -> None:
    """Check how much a plan holds on its device before it is called: the second one, since the first may make what all share."""
    op, request = data["calls"][0]["op"], _request(target, data)
    name, size = ("units of 16 bytes of malloc", 16) if target.device == HOST else ("bytes that torch holds of the device", 1)
    for _ in range(2):
        with target.backend.device_guard(target.device):
            before = held(target.device)
            plan = kernel_of(target, op).prepare(request)
            got = (held(target.device).get(name, 0) - before.get(name, 0)) * size
            plan.destroy()
            del plan
    if got > _MOST_OF_A_PLAN:
        raise NonconformanceError(f"{op}: memory of a plan", expected=f"at most {_MOST_OF_A_PLAN} bytes", got=f"{got} bytes")


def check_releases(target: Target, data: Mapping[str, Any]) -> None:
    """Check that a plan, which stays in its cache, keeps no tensor of its calls, nor its memory by a view, nor much of its own.

    Raises:
        NonconformanceError: a tensor, or its memory, is still there when nobody else has it, or a plan has more than a MiB.
    """
    _check_held(target, data)
    op, kept = data["calls"][0]["op"], list[tuple[str, weakref.ref[Any]]]()
    set_apart()
    for number in range(len(data["calls"])):
        calls = _Calls(target, data)  # in memory of its own
        args = calls.arguments(number)
        target.call(op, args)
        tensors = [(name, value) for name, value in args.items() if isinstance(value, torch.Tensor)]
        kept += [(f"{name} of call {number}", weakref.ref(value)) for name, value in tensors]
        kept += [(f"memory of {name} of call {number}", weakref.ref(value.untyped_storage())) for name, value in tensors]
        del args, calls, tensors
    gc.collect()
    alive = [name for name, reference in kept if reference() is not None]
    if alive:
        raise NonconformanceError(f"{op}: tensors after their calls", expected="none that a plan keeps", got=", ".join(alive))


def check_supports(target: Target, data: Mapping[str, Any]) -> None:
    """Check what a kernel answers about requests of every dtype, each asked twice; those of the last call in the other order.

    Raises:
        NonconformanceError: an answer is no list of texts, differs from the one before, goes by what was asked before it, or asking
            changed the request.
        Exception: what a kernel raises that takes memory for the answer.
    """
    op, served, dtypes = data["calls"][0]["op"], dict[Any, bool](), (*COPY_DTYPES, *QUANTISED_DTYPES)
    requests = [_request(target, data, number) for number in (0, -1)]
    for request, dtype in (*((requests[0], dtype) for dtype in dtypes), *((requests[1], dtype) for dtype in reversed(dtypes))):
        asked = _with_dtype(request, dtype)
        answers = []
        for _ in range(2):
            given = attrs.evolve(asked, args=dict(asked.args))
            answers.append(_answer(f"{op}: supports() of {dtype}", kernel_of(target, op).supports(given)))
            if given != asked:
                raise NonconformanceError(f"{op}: a request after supports()", expected=asked, got=given)
        if answers[0] != answers[1]:
            raise NonconformanceError(f"{op}: supports() of {dtype}, asked twice", expected=answers[0], got=answers[1])
        if served.setdefault(dtype, not answers[0]) == bool(answers[0]):
            what = f"{op}: supports() of {dtype} in two sizes, behind other dtypes and before them"
            raise NonconformanceError(what, expected="both or none", got=answers[0] or "no reason against the second alone")
    kernel, huge = kernel_of(target, op), _boundless(requests[0])
    _answer(f"{op}: supports() of pools that no memory has room for", kernel.supports(huge))
    plain_s, huge_s = (min(seconds(lambda r=each: kernel.supports(r)) for _ in range(3)) for each in (requests[0], huge))  # type: ignore[misc]  # a default binds it
    if huge_s > max(_TIMES * plain_s, _AT_ONCE_S):  # who takes what can be had, or is there, takes time to
        what = f"{op}: time of supports() of pools that no memory has room for"
        raise NonconformanceError(what, expected=f"that of small ones, {plain_s:.2g} s", got=f"{huge_s:.2g} s")


def _boundless(request: kvdock.plugin.Request) -> kvdock.plugin.Request:
    """Return a request for pools of 2**40 blocks: whoever takes memory to answer it gets none."""
    pools = [arg.name for arg in schema_of(request.op).static_args if isinstance(request.args.get(arg.name), TensorMeta)]
    huge = {name: attrs.evolve(meta, shape=(1 << 40, *meta.shape[1:])) for name in pools if (meta := request.tensor(name)).shape}
    return attrs.evolve(request, args={**request.args, **huge})


def _answer(what: str, answer: object) -> list[str]:
    """Return the reasons that `Kernel.supports` gave."""
    if isinstance(answer, str) or not isinstance(answer, Sequence):
        raise NonconformanceError(what, expected="a list of reasons", got=repr(answer))
    for reason in answer:
        if not isinstance(reason, str) or not reason.strip():
            raise NonconformanceError(what, expected="reasons that are texts", got=repr(reason))
    return list(answer)


def _with_dtype(request: kvdock.plugin.Request, dtype: Any) -> kvdock.plugin.Request:
    """Return a request with all but its indices in another dtype."""
    args = {
        name: attrs.evolve(meta, dtype=dtype) if isinstance(meta, TensorMeta) and meta.dtype.is_floating_point else meta
        for name, meta in request.args.items()
    }
    return attrs.evolve(request, args=args)
