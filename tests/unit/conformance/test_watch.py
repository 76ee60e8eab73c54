"""Plans, watched: what is seen of them, and what is said when they are used or end in the wrong way."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import kvdock
from kvdock import runtime
from kvdock.ops.catalog import CATALOG
from kvdock.ops.portable import PORTABLE_KERNELS
from kvdock.ops.validate import validate
from kvdock_conformance.cases.drawing import Drawing
from kvdock_conformance.cases.every_op import OpCall
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.memory import Arenas
from kvdock_conformance.checking.plans import check_eviction, check_own_plans, check_releases, check_reuse, check_supports, check_workspace
from kvdock_conformance.checking.refusals import check_mistake
from kvdock_conformance.checking.target import Target
from kvdock_conformance.checking.watch import misfit, watched
from kvdock_conformance.stand_ins import StandIn, register_backend

OP = "paged_caching_"
PORTABLE = PORTABLE_KERNELS[OP]


class Plain(kvdock.plugin.Kernel):
    """The portable kernel, whose answers and plans a test may spoil."""

    def __init__(self) -> None:
        self.answer: Callable[[kvdock.plugin.Request], Any] = PORTABLE.supports
        self.made: Callable[[kvdock.plugin.Descriptor], kvdock.plugin.Descriptor] = lambda plan: plan

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        found: Sequence[str] = self.answer(request)
        return found

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        return self.made(PORTABLE.prepare(request))


@pytest.fixture(scope="module")
def watchable() -> tuple[Target, Plain]:
    kernel = Plain()
    register_backend(StandIn("watchable", {OP: kernel}))
    return Target("watchable"), kernel


@pytest.fixture
def kernel(watchable: tuple[Target, Plain]) -> Plain:
    Plain.__init__(watchable[1])
    return watchable[1]


@pytest.fixture
def target(watchable: tuple[Target, Plain], kernel: Plain) -> Target:
    return watchable[0]


def data(*calls: OpCall, **more: Any) -> dict[str, Any]:
    drawing = Drawing()
    return drawing.case(*[call.call(drawing) for call in calls or [OpCall(OP)]], **more)


def arguments(case: dict[str, Any]) -> dict[str, Any]:
    memory = Arenas(case["arenas"], torch.device("cpu"))
    return {name: memory.tensor(spec) for name, spec in case["calls"][0]["args"].items()}


def clear() -> None:
    runtime.default().dispatcher.descriptors.clear(OP)


def test_plans_are_seen_from_their_preparation_to_their_end(target: Target, kernel: Plain) -> None:
    args = arguments(data())
    called: list[Any] = []
    with watched(target, OP) as watch:
        watch.before_call = called.append
        for _ in range(3):
            target.call(OP, args)
        (plan,) = watch.prepared
        assert called == [plan] * 3
        assert plan.request.tensor("k").dtype == torch.bfloat16
        with pytest.raises(NonconformanceError, match=r"destroy\(\) of plan 0: expected called once, got 0 calls"):
            watch.check_ends(OP)
        clear()
        assert plan.ends == [[target.device]], "under the guard of its device"
        watch.check_ends(OP)
        assert watch.guarded == []
        plan.ends.append([])
        with pytest.raises(NonconformanceError, match="got 2 calls"):
            watch.check_ends(OP)
        plan.ends[:] = [[]]
        with pytest.raises(NonconformanceError, match=r"expected under device_guard\(cpu\), got under \[\]"):
            watch.check_ends(OP)
    assert target.kernels[OP] is kernel, "not watched any more"


def test_a_plan_that_is_destroyed_by_itself_is_seen(target: Target, kernel: Plain) -> None:
    class Again(kvdock.plugin.Descriptor):
        def __call__(self, *args: Any) -> None: ...

        def __del__(self) -> None:
            self.destroy()

    kernel.made = lambda plan: Again()
    with watched(target, OP) as watch:
        target.call(OP, arguments(data()))
        clear()
        gc.collect()
        assert [len(plan.ends) for plan in watch.prepared] == [2]


def test_a_call_of_a_plan_that_is_gone_or_does_not_fit_is_refused(target: Target) -> None:
    near, far = arguments(data()), arguments(data(OpCall(OP, pool="hnd")))
    with watched(target, OP) as watch:
        target.call(OP, near)
        (plan,) = watch.prepared
        with pytest.raises(NonconformanceError, match="a plan: expected calls that it was prepared for, got k_cache is TensorMeta"):
            plan(*far.values(), None, None)
        plan.destroy()
        with pytest.raises(NonconformanceError, match=r"expected no call after destroy\(\), got a call"):
            plan(*near.values(), None, None)
        clear()


def test_what_a_kernel_refuses_need_not_drive_its_plans_out(target: Target, kernel: Plain) -> None:
    case = data(OpCall(OP), OpCall(OP, pool="hnd"), OpCall(OP))
    for answer in (lambda request: [], lambda request: ["nothing is served"]):
        kernel.answer = answer
        check_eviction(target, case)
    calls = []

    def once(request: kvdock.plugin.Request) -> Sequence[str]:
        calls.append(request)
        return [] if len(calls) <= 3 else ["not any more"]

    kernel.answer = once
    with pytest.raises(NonconformanceError, match="plans prepared: expected 3, got 0"):
        check_eviction(target, case)


def test_what_does_not_fit_is_named() -> None:
    def request(**settings: Any) -> kvdock.plugin.Request:
        return validate(CATALOG[OP], (*arguments(data(OpCall(OP, **settings))).values(), None, None))

    assert misfit(request(), request(tokens=9)) == "", "token counts are run-time values"
    assert misfit(request(), request(pool="odd address")) == "k_cache is aligned to 2 bytes, not to 16"
    assert misfit(request(pool="odd address"), request()) == "", "more than was asked for"
    assert misfit(request(), request(source="odd address")) == "k is aligned to 2 bytes, not to 16"
    assert misfit(request(), request(pool="hnd")).startswith("k_cache is TensorMeta(")


def test_plans_prepared_again_are_counted(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    check_reuse(target, data(OpCall(OP), OpCall(OP, tokens=7), warm=1))
    with pytest.raises(NonconformanceError, match="plans prepared by call 1: expected 0, got 1"):
        check_reuse(target, data(OpCall(OP), OpCall(OP, pool="hnd"), warm=1))
    check_reuse(target, data(OpCall(OP), OpCall(OP, pool="hnd"), OpCall(OP), warm=2))


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("no", "expected a list of reasons, got 'no'"),
        (None, "expected a list of reasons, got None"),
        ([3], "expected reasons that are texts, got 3"),
        ([" "], "expected reasons that are texts, got ' '"),
    ],
)
def test_answers_that_are_no_reasons(target: Target, kernel: Plain, answer: Any, told: str) -> None:
    check_supports(target, data())
    kernel.answer = lambda request: answer
    with pytest.raises(NonconformanceError) as caught:
        check_supports(target, data())
    assert told in str(caught.value)


@pytest.mark.parametrize("size", [None, -1, 2.0, True])
def test_workspace_that_is_no_number_of_bytes(target: Target, kernel: Plain, size: Any) -> None:
    check_workspace(target, data())

    def spoil(plan: kvdock.plugin.Descriptor) -> kvdock.plugin.Descriptor:
        plan.workspace_bytes = size
        return plan

    kernel.made = spoil
    with pytest.raises(NonconformanceError, match=f"workspace_bytes before a call: expected a non-negative int, got {size}"):
        check_workspace(target, data())


def test_one_plan_for_all_and_tensors_kept(target: Target, kernel: Plain) -> None:
    check_own_plans(target, data())
    check_releases(target, data())
    kept: list[Any] = []

    class Keeps(kvdock.plugin.Descriptor):
        def __call__(self, *args: Any) -> None:
            kept.append(args[2])

    one = Keeps()
    kernel.made = lambda plan: one
    clear()
    with pytest.raises(NonconformanceError, match="expected two descriptors, got the same one twice"):
        check_own_plans(target, data())
    with pytest.raises(NonconformanceError, match="expected none that a plan keeps, got k of call 0"):
        check_releases(target, data())


def test_what_is_said_of_an_error_that_says_too_little(target: Target) -> None:
    drawing = Drawing()
    good = OpCall(OP).call(drawing)
    wrong = {"op": OP, "args": {**good["args"], "k": 3}}
    case = drawing.case(good, wrong, error="ArgumentTypeError", texts=["int 3"], meta=[], may_pass=False)
    check_mistake(target, case)
    with pytest.raises(NonconformanceError, match="expected ArgumentValueError, a ValueError, got ArgumentTypeError: "):
        check_mistake(target, {**case, "error": "ArgumentValueError"})
    with pytest.raises(NonconformanceError, match="text of the ArgumentTypeError: expected it says 'int 4', got paged_caching_: k: "):
        check_mistake(target, {**case, "texts": ["int 4"]})
    with pytest.raises(NonconformanceError, match="before any good call: expected ArgumentTypeError, a TypeError, got no error"):
        check_mistake(target, {**case, "calls": [good, good]})
    check_mistake(target, {**case, "calls": [good, good], "may_pass": True})  # a stand-in need not raise
