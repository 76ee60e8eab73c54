"""No descriptor is destroyed while a call of it runs, nor just before: nested calls, interruptions, and whose device is current."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
import torch

import kvdock
from kvdock.ops.dispatcher import OpDispatcher
from kvdock.ops.portable import PORTABLE_KERNELS
from support_descriptors import DEVICES, Pool, WatchingBackend, dispatcher_of, in_thread

PAGED = PORTABLE_KERNELS["paged_caching_"]


class Nesting(kvdock.Kernel):
    """Another kernel, whose descriptors do something else first."""

    def __init__(self) -> None:
        self.first: Callable[[kvdock.Request], None] = lambda request: None

    def supports(self, request: kvdock.Request) -> Sequence[str]:
        return ()

    def prepare(self, request: kvdock.Request) -> kvdock.Descriptor:
        return Nested(self, request, PAGED.prepare(request))


class Nested(kvdock.Descriptor):
    def __init__(self, kernel: Nesting, request: kvdock.Request, run: kvdock.Descriptor) -> None:
        self.kernel = kernel
        self.request = request
        self.run = run

    def __call__(self, *args: Any) -> None:
        self.kernel.first(self.request)
        self.run(*args)


class Nest:
    """Pools of different heads on one device, and a kernel for them whose calls may nest."""

    def __init__(self, capacity: int = 1, device: str = "cpu") -> None:
        self.kernel = Nesting()
        self.backend = WatchingBackend({"paged_caching_": self.kernel})
        self.dispatcher: OpDispatcher = dispatcher_of(self.backend, capacity)
        self.pools = {heads: Pool(device, heads) for heads in (1, 2, 3)}
        self.number = 0.0

    @property
    def ledger(self) -> Any:
        return self.backend.ledger

    def write(self, heads: int) -> None:
        self.number += 1
        assert self.pools[heads].write(self.dispatcher, self.number)

    def heads_of(self, request: kvdock.Request) -> Any:
        return request.tensor("k").shape[1]


@pytest.mark.parametrize("device", ["cpu", *DEVICES])
@pytest.mark.parametrize("times", [1, 2, 5], ids=["new", "found", "remembered"])
def test_a_call_that_evicts_the_one_it_is_made_in(device: str, times: int) -> None:
    nest = Nest(device=device)
    for _ in range(times - 1):
        nest.write(1)
    inside: list[int] = []

    def first(request: kvdock.Request) -> None:
        if nest.heads_of(request) == 1:
            nest.write(2)
            inside.append(len(nest.ledger.destroyed))

    nest.kernel.first = first
    nest.write(1)
    assert inside == [0], "what runs is not destroyed"
    nest.kernel.first = lambda request: None
    nest.write(3)
    assert (len(nest.ledger.destroyed), nest.ledger.faults) == (2, []), "it is later, with what made room this time"
    nest.write(1)
    assert (len(nest.ledger.destroyed), len(nest.ledger.made), nest.ledger.faults) == (3, 4, [])


def test_calls_nested_deeper_than_the_cache_holds() -> None:
    nest = Nest(capacity=1)
    depth = 0

    def first(request: kvdock.Request) -> None:
        nonlocal depth
        if depth < 9:
            depth += 1
            nest.write(depth % 3 + 1)
            depth -= 1

    nest.kernel.first = first
    nest.write(1)
    assert nest.ledger.faults == []
    nest.kernel.first = lambda request: None
    nest.write(2)
    nest.dispatcher.descriptors.clear()
    assert (len(nest.ledger.destroyed), nest.ledger.faults) == (len(nest.ledger.made), [])


def test_clear_and_resize_inside_a_call() -> None:
    nest = Nest(capacity=4)
    nest.write(2)

    def first(request: kvdock.Request) -> None:
        nest.dispatcher.descriptors.clear()
        nest.dispatcher.descriptors.set_capacity("paged_caching_", 1)
        nest.dispatcher.descriptors.cache("paged_caching_", None)

    nest.kernel.first = first
    nest.write(1)
    assert (len(nest.ledger.destroyed), nest.ledger.faults) == (1, [])
    nest.kernel.first = lambda request: None
    nest.write(1)
    assert (len(nest.ledger.destroyed), len(nest.ledger.made), nest.ledger.faults) == (2, 3, [])


def test_a_call_that_raises_is_over() -> None:
    nest = Nest(capacity=1)

    def first(request: kvdock.Request) -> None:
        raise RuntimeError("as planned")

    nest.kernel.first = first
    with pytest.raises(RuntimeError, match="as planned"):
        nest.write(1)
    nest.kernel.first = lambda request: None
    nest.write(2)
    assert (len(nest.ledger.destroyed), nest.ledger.faults) == (1, [])


class Interruption:
    """Runs something once, just before one of the instructions of kvdock's own code, as a signal handler may."""

    def __init__(self, at: int, handler: Callable[[], None]) -> None:
        self.at = at
        self.count = 0
        self.handler = handler

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if not (name.startswith("<kvdock ") or "/kvdock/descriptors/" in name or frame.f_code.co_name == "_prepare"):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if self.count == self.at:
                self.handler()
            self.count += 1
        return self.trace

    def around(self, call: Callable[[], None]) -> int:
        before = sys.gettrace()
        gc.disable()  # or finalizers of what earlier tests left could run within the call, and count as its instructions
        sys.settrace(self.trace)
        try:
            call()
        finally:
            sys.settrace(before)
            gc.enable()
        return self.count


def caller(nest: Nest, heads: int) -> Callable[[], None]:
    """Return a call of the op. Its pools lie side by side, so that a source is plainly outside and the call is remembered."""
    arena = torch.zeros(1024)
    caches = [arena[at : at + 24 * heads].view(3, 2, heads, 4) for at in (0, 128)]
    new = [arena[at : at + 4 * heads].view(1, heads, 4) for at in (512, 640)]
    slots = torch.tensor([3])
    return lambda: nest.dispatcher.op("paged_caching_").call(*caches, *new, slots, None, None)


@pytest.mark.parametrize(
    ("warm_ups", "instructions"), [(0, (600, 1000)), (1, (400, 600)), (3, (100, 250))], ids=["new", "found", "remembered"]
)
def test_an_interruption_at_any_moment(warm_ups: int, instructions: tuple[int, int]) -> None:
    """A handler that calls the op evicts what the interrupted call has found, or is about to put, or has just put.

    The call is a new one, one whose plan is found, or one that is just like the last; how many instructions each takes
    shows that it is. Every interruption is tried in a thread of its own, which has called nothing yet.
    """
    nest = Nest(capacity=1)
    call, handler = caller(nest, 1), caller(nest, 2)

    def interrupt(at: int) -> int:
        for _ in range(warm_ups):
            call()
        return Interruption(at, handler).around(call)

    total = in_thread(interrupt, -1)
    assert instructions[0] < total < instructions[1]
    for at in range(total):
        in_thread(interrupt, at)
        assert nest.ledger.faults == [], f"interrupted before instruction {at}"
        assert len(nest.ledger.destroyed) == len(nest.ledger.made), "all of a thread that has ended"
    assert nest.ledger.alive == 0


class TestDevices:
    @pytest.mark.parametrize("order", [DEVICES, DEVICES[::-1]])
    def test_eviction_destroys_under_the_descriptors_device(self, order: Sequence[str]) -> None:
        backend = WatchingBackend()
        dispatcher = dispatcher_of(backend, 1)
        pools = [Pool(device, heads) for heads in (1, 2, 3) for device in order]
        for number, pool in enumerate(pools):
            assert pool.write(dispatcher, number + 1.0)
        with backend.device_guard(torch.device(order[0])):
            for number, pool in enumerate(pools):
                assert pool.write(dispatcher, number + 1.0)
            assert backend.current == torch.device(order[0])
            dispatcher.descriptors.clear()
        assert len(backend.ledger.destroyed) == len(backend.ledger.made) == 12
        assert backend.ledger.faults == []

    def test_a_destroyer_that_raises_is_reported_and_the_calls_go_on(self, caplog: pytest.LogCaptureFixture) -> None:
        nest = Nest(capacity=1)
        nest.backend.ledger.destroyed = Refusing()
        for heads in (1, 2, 3, 1):
            nest.write(heads)
        stats = nest.dispatcher.descriptors.stats()["paged_caching_"][None]
        assert (stats.evictions, stats.destroyed, stats.failures, stats.size) == (3, 3, 3, 1)
        assert len(caplog.records) == 3
        nest.backend.ledger.destroyed = []


class Refusing(list[str]):
    """A list that does not want to grow."""

    def append(self, item: str) -> None:
        raise MemoryError("full")


def test_a_plan_that_was_destroyed_refuses_to_run_and_keeps_nothing() -> None:
    backend = WatchingBackend(graph_capture=True)
    dispatcher = dispatcher_of(backend)
    assert Pool().write(dispatcher, 1.0)
    (entry,) = dispatcher.descriptors.cache("paged_caching_", None).entries.values()
    gc.disable()  # it would find what refers to itself
    try:
        dispatcher.descriptors.clear()
        with pytest.raises(
            kvdock.BackendError, match=r"a plan: expected one that is not destroyed, got a destroyed one\. Fix: report this"
        ):
            entry.value.run()
        assert backend.ledger.alive == 1
        del entry
        assert backend.ledger.alive == 0
    finally:
        gc.enable()


def test_what_only_the_slow_path_takes_is_destroyed_after_the_call() -> None:
    """An int of a class of its own is a length all the same; the quick path does not know it, and keeps no plan."""

    class Length(int):
        pass

    backend = WatchingBackend()
    dispatcher = dispatcher_of(backend)
    caches, new = [torch.zeros(1, 1, 8, 4) for _ in range(2)], torch.ones(1, 1, 1, 4)
    for _ in range(3):
        dispatcher.op("static_update_").call(*caches, new, new.clone(), Length(4))
    assert (len(backend.ledger.made), len(backend.ledger.destroyed), backend.ledger.faults) == (3, 3, [])
    assert dispatcher.descriptors.stats()["static_update_"][None].destroyed == 3
