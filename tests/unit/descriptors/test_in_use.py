"""No descriptor is destroyed while a call of it runs, nor just before: nested calls, interruptions, and whose device is current."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
import torch

import kvdock
from kvdock import LRUDescriptorCache
from kvdock.descriptors.lifetimes import Held
from kvdock.ops.dispatcher import OpDispatcher
from kvdock.ops.portable import PORTABLE_KERNELS
from support_descriptors import DEVICES, Ledger, Pool, Watched, WatchingBackend, dispatcher_of, in_thread
from support_slow import QUICK

PAGED = PORTABLE_KERNELS["paged_caching_"]


class Nesting(kvdock.plugin.Kernel):
    """Another kernel, whose descriptors do something else first."""

    def __init__(self) -> None:
        self.first: Callable[[kvdock.plugin.Request], None] = lambda request: None

    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        return ()

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        return Nested(self, request, PAGED.prepare(request))


class Nested(kvdock.plugin.Descriptor):
    def __init__(self, kernel: Nesting, request: kvdock.plugin.Request, run: kvdock.plugin.Descriptor) -> None:
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

    def heads_of(self, request: kvdock.plugin.Request) -> Any:
        return request.tensor("k").shape[1]


@pytest.mark.parametrize("device", ["cpu", *DEVICES])
@pytest.mark.parametrize("times", [1, 2, 5], ids=["new", "found", "remembered"])
def test_a_call_that_evicts_the_one_it_is_made_in(device: str, times: int) -> None:
    nest = Nest(device=device)
    for _ in range(times - 1):
        nest.write(1)
    inside: list[int] = []

    def first(request: kvdock.plugin.Request) -> None:
        if nest.heads_of(request) == 1:
            nest.write(2)
            inside.append(len(nest.ledger.destroyed))

    nest.kernel.first = first
    nest.write(1)
    assert inside == [0], "what runs is not destroyed"
    assert (len(nest.ledger.destroyed), nest.ledger.faults) == (1, []), "and is as soon as its call has ended"
    nest.kernel.first = lambda request: None
    nest.write(3)
    assert (len(nest.ledger.destroyed), nest.ledger.faults) == (2, [])
    nest.write(1)
    assert (len(nest.ledger.destroyed), len(nest.ledger.made), nest.ledger.faults) == (3, 4, [])


def test_calls_nested_deeper_than_the_cache_holds() -> None:
    nest = Nest(capacity=1)
    depth = 0

    def first(request: kvdock.plugin.Request) -> None:
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

    def first(request: kvdock.plugin.Request) -> None:
        nest.dispatcher.descriptors.clear()
        nest.dispatcher.descriptors.set_capacity("paged_caching_", 1)
        nest.dispatcher.descriptors.cache("paged_caching_", None)

    nest.kernel.first = first
    nest.write(1)
    assert (len(nest.ledger.destroyed), nest.ledger.faults) == (2, []), "the second one as soon as its call had ended"
    nest.kernel.first = lambda request: None
    nest.write(1)
    assert (len(nest.ledger.destroyed), len(nest.ledger.made), nest.ledger.faults) == (2, 3, [])


def test_a_call_that_raises_is_over() -> None:
    nest = Nest(capacity=1)

    def first(request: kvdock.plugin.Request) -> None:
        raise RuntimeError("as planned")

    nest.kernel.first = first
    with pytest.raises(RuntimeError, match="as planned"):
        nest.write(1)
    nest.kernel.first = lambda request: None
    nest.write(2)
    assert (len(nest.ledger.destroyed), nest.ledger.faults) == (1, [])


OURS = ("/kvdock/ops/", "/kvdock/descriptors/")
APART = tuple(
    f"/{name}.py"
    for name in ("geometry", "guards", "index_values", "plain", "schema", "validate", "portable/paged_caching", "portable/rows")
)
"""What neither looks for a plan nor holds one, and takes 9,000 instructions of a new call to check it and 400 to write rows."""


class Interruption:
    """Runs something once, just before one of the instructions of kvdock's own code, as a signal handler may."""

    def __init__(self, at: int, handler: Callable[[], None], *, raises: bool = False) -> None:
        self.at = at
        self.count = 0
        self.folders = OURS[raises:]
        self.handler = handler
        self.raises = raises

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        if not (name.startswith("<kvdock ") or any(folder in name for folder in self.folders)) or name.endswith(APART):
            return None
        if frame.f_code is Held.__init__.__code__ and self.raises:  # a descriptor that nobody has yet is its maker's
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.count += 1
            if self.count == self.at + 1:
                self.handler()
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
    ("warm_ups", "every"),
    [
        pytest.param(0, 197, id="new"),
        pytest.param(1, 31, id="found"),
        pytest.param(3, 11, id="remembered"),
        pytest.param(0, 1, id="new, all", marks=pytest.mark.slow),
        pytest.param(1, 1, id="found, all", marks=pytest.mark.slow),
        pytest.param(3, 1, id="remembered, all", marks=pytest.mark.slow),
    ],
)
def test_an_interruption_at_any_moment(warm_ups: int, every: int) -> None:
    """A handler that calls the op evicts what the interrupted call has found, or is about to put, or has just put.

    The call is a new one, one whose plan is found, or one that is just like the last. Every interruption is tried in a thread
    of its own, which has called nothing yet. A new call takes a thousand and more: all of them are tried where time does not matter.
    """
    nest = Nest(capacity=1)
    call, handler = caller(nest, 1), caller(nest, 2)

    def interrupt(at: int) -> int:
        for _ in range(warm_ups):
            call()
        return Interruption(at, handler).around(call)

    total = in_thread(interrupt, -1)
    assert total > 50
    for at in range(0, total, every):
        in_thread(interrupt, at)
        assert nest.ledger.faults == [], f"interrupted before instruction {at}"
        assert len(nest.ledger.destroyed) == len(nest.ledger.made), "all of a thread that has ended"
    assert nest.ledger.alive == 0


class Stop(BaseException):
    """An interrupt, as ^C raises one."""


def test_an_interrupt_at_any_moment_of_an_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    """It loses no descriptor, and destroys none twice, wherever it is raised: in the cache, in the finaliser, in between."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)  # what a finaliser raises goes no further
    ledger, everywhere = Ledger(), 0

    def stop() -> None:
        raise Stop

    def interrupt(at: int, shared: bool) -> int:
        lru: LRUDescriptorCache[Any] = LRUDescriptorCache(2, Watched.destroy)

        def add(name: str) -> None:
            watched = Watched(ledger, name)
            lru.put(name, Held(watched, lru.owner) if shared else watched)

        add("a")
        add("b")
        interruption = Interruption(at, stop, raises=True)
        with contextlib.suppress(Stop):
            interruption.around(lambda: lru.resize(1))
        assert lru.get("x") is None
        lru.resize(1)
        assert (ledger.destroyed[-1], len(lru)) == ("a", 1), f"interrupted before instruction {at}"
        return interruption.count

    for shared in (False, True):
        total = interrupt(-1, shared)
        assert total > 50
        for at in range(total):
            interrupt(at, shared)
            everywhere += 1
            assert ledger.faults == [], f"interrupted before instruction {at}"
    gc.collect()
    assert (len(ledger.destroyed), ledger.alive) == (2 * everywhere + 4, 0)


def test_an_interrupt_at_any_moment_of_a_call_that_evicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of plans, from the moment when a plan has its descriptor. Each is destroyed by its own thread, once."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    nest = Nest(capacity=1)
    first, call = caller(nest, 1), caller(nest, 2)

    def stop() -> None:
        raise Stop

    def interrupt(at: int) -> int:
        first()
        interruption = Interruption(at, stop, raises=True)
        with contextlib.suppress(Stop):
            interruption.around(call)
        for again in (first, call):
            again()
        return interruption.count

    total = in_thread(interrupt, -1)
    assert total > 50
    for at in range(0, total, 3 if QUICK else 1):
        in_thread(interrupt, at)
        assert nest.ledger.faults == [], f"interrupted before instruction {at}"
        assert len(nest.ledger.made) - len(nest.ledger.destroyed) == 0, f"interrupted before instruction {at}"


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


@pytest.mark.parametrize("settings", [{}, {"notes_capture": True}, {"uses_autograd": True}], ids=str)
def test_a_plan_ends_with_its_last_reference_and_keeps_nothing(settings: dict[str, bool]) -> None:
    """Without the garbage collector: nothing that a plan refers to may refer back to it."""
    backend = WatchingBackend(graph_capture=True, **settings)
    dispatcher = dispatcher_of(backend)
    gc.disable()
    try:
        assert Pool().write(dispatcher, 1.0)
        (entry,) = dispatcher.descriptors.cache("paged_caching_", None).entries.values()
        plan = entry.value
        dispatcher.descriptors.clear()
        assert (entry.value, backend.ledger.destroyed, backend.ledger.alive) == (None, [], 1), "it may be running"
        del plan
        assert (len(backend.ledger.destroyed), backend.ledger.alive, backend.ledger.faults) == (1, 0, [])
    finally:
        gc.enable()


def test_what_only_the_slow_path_takes_is_prepared_once_and_ends_like_all_else() -> None:
    """An int of a class of its own is a length all the same; no guard knows it, and its plan is kept under its exact key."""

    class Length(int):
        pass

    backend = WatchingBackend()
    dispatcher = dispatcher_of(backend)
    caches, new = [torch.zeros(1, 1, 8, 4) for _ in range(2)], torch.ones(1, 1, 1, 4)
    for _ in range(3):
        dispatcher.op("static_update_").call(*caches, new, new.clone(), Length(4))
    assert (len(backend.ledger.made), len(backend.ledger.destroyed), backend.ledger.faults) == (1, 0, [])
    dispatcher.descriptors.clear()
    assert (len(backend.ledger.destroyed), backend.ledger.faults) == (1, [])
    assert dispatcher.descriptors.stats()["static_update_"][None].destroyed == 1
