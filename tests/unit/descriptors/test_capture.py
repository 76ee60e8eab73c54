"""Graphs: nothing is prepared while one is captured, and what it launches stays for the life of the process."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvdock
from kvdock import BackendError
from support_descriptors import DEVICES, Pool, WatchedDescriptor, WatchedKernel, WatchingBackend, dispatcher_of, in_thread
from support_scripts import Interpreters

NOTING = pytest.mark.parametrize("notes", [False, True], ids=["core asks", "the descriptor notes"])


class Captured:
    """A dispatcher of capacity 2 after a call of it was captured on a device."""

    def __init__(self, notes: bool, device: str = "cpu") -> None:
        self.backend = WatchingBackend(graph_capture=True, notes_capture=notes)
        self.dispatcher = dispatcher_of(self.backend, 2)
        self.pools = {heads: Pool(device, heads) for heads in range(1, 7)}
        self.write(1)
        self.backend.capturing = True
        self.write(1)
        self.backend.capturing = False

    def write(self, heads: int) -> None:
        assert self.pools[heads].write(self.dispatcher, heads + 0.5)

    @property
    def prepared(self) -> int:
        return len(self.backend.own["paged_caching_"].prepared)

    @property
    def destroyed(self) -> int:
        return len(self.backend.ledger.destroyed)


@pytest.mark.parametrize("device", ["cpu", *DEVICES])
def test_a_miss_says_that_it_must_be_warmed_up(device: str) -> None:
    backend = WatchingBackend(graph_capture=True)
    dispatcher = dispatcher_of(backend)
    pools = [Pool(device, 1), Pool(device, 2)]
    assert pools[0].write(dispatcher, 1.0)
    backend.capturing = True
    assert pools[0].write(dispatcher, 2.0), "a hit is captured"
    text = rf"paged_caching_ on {device}: got a new signature while a graph is captured. Fix: warm up first: call it once with tensors like"
    for _ in range(2):
        with pytest.raises(BackendError, match=text):
            pools[1].write(dispatcher, 3.0)
    backend.capturing = False
    assert pools[1].write(dispatcher, 3.0)
    (stats,) = dispatcher.descriptors.stats()["paged_caching_"].values()
    assert (stats.hits, stats.misses, stats.size) == (1, 4, 2), "a look-up that raises is a miss too"


@NOTING
@pytest.mark.parametrize("device", ["cpu", *DEVICES])
def test_it_survives_eviction(notes: bool, device: str) -> None:
    captured = Captured(notes, device)
    for heads in (2, 3, 4, 5, 6):
        captured.write(heads)
    assert (captured.prepared, captured.destroyed) == (6, 3)
    captured.write(1)
    assert captured.prepared == 6, "it is still found"
    assert captured.backend.ledger.faults == []


@NOTING
def test_it_survives_clear_and_resize(notes: bool) -> None:
    captured = Captured(notes)
    captured.write(2)
    captured.dispatcher.descriptors.set_capacity("paged_caching_", 1)
    for device in (None,):
        captured.dispatcher.descriptors.cache("paged_caching_", device)
    assert captured.destroyed == 0, "a pinned one does not count"
    captured.dispatcher.descriptors.clear()
    assert captured.destroyed == 1
    for heads in (1, 2, 3, 1):
        captured.write(heads)
    assert captured.backend.ledger.made[0]() is not None
    assert captured.backend.ledger.faults == []


@NOTING
def test_it_survives_a_change_of_what_is_registered(notes: bool) -> None:
    captured = Captured(notes)
    captured.write(2)
    captured.dispatcher.chooser.register_kernel(  # type: ignore[attr-defined]
        "watching", "paged_caching_", captured.backend.own["paged_caching_"], override=True
    )
    captured.write(2)
    assert (captured.prepared, captured.destroyed, captured.backend.ledger.faults) == (3, 1, [])


@pytest.mark.parametrize("cause", ["evicted", "cleared"])
def test_it_survives_though_it_left_its_cache_before_it_was_captured(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """During the call that is captured then: when that ends, nobody holds the plan but the graph."""
    backend = WatchingBackend(graph_capture=True, notes_capture=True)
    dispatcher = dispatcher_of(backend, 1)
    pools = [Pool("cpu", heads) for heads in (1, 2)]
    assert pools[0].write(dispatcher, 1.0)
    call = WatchedDescriptor.__call__

    def leave_first(self: WatchedDescriptor, *args: Any) -> None:
        monkeypatch.setattr(WatchedDescriptor, "__call__", call)
        backend.capturing = False
        assert pools[1].write(dispatcher, 1.0)
        if cause == "cleared":
            dispatcher.descriptors.clear()
        backend.capturing = True
        call(self, *args)

    monkeypatch.setattr(WatchedDescriptor, "__call__", leave_first)
    dispatcher.descriptors.clear()
    before = len(backend.ledger.destroyed)
    captured = len(backend.ledger.made)
    assert pools[0].write(dispatcher, 2.0)
    backend.capturing = False
    gc.collect()
    assert len(backend.ledger.destroyed) == before + (cause == "cleared")
    assert (backend.ledger.made[captured]() is not None, backend.ledger.faults) == (True, [])


@NOTING
def test_it_survives_its_thread(notes: bool) -> None:
    made: list[Captured] = []
    in_thread(lambda: made.append(Captured(notes)))
    in_thread(made[0].write, 2)
    assert (made[0].prepared, made[0].destroyed, made[0].backend.ledger.alive) == (2, 1, 1)


@NOTING
def test_calls_that_are_remembered_are_noted_too(notes: bool) -> None:
    """The third call alike skips most of the way; it must not skip this."""
    captured = Captured(notes)
    captured.dispatcher.descriptors.clear()
    for _ in range(4):
        captured.write(3)
    captured.backend.capturing = True
    captured.write(3)
    captured.backend.capturing = False
    for heads in (4, 5, 6):
        captured.write(heads)
    before = captured.prepared
    captured.write(3)
    assert captured.prepared == before


def at(address: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor like another, at an address."""
    count = 1 + sum((size - 1) * step for size, step in zip(like.shape, like.stride(), strict=True))
    memory = (ctypes.c_char * (count * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())


class FixingDescriptor(WatchedDescriptor):
    """One that settles calls beforehand. What it makes of them takes care of capture as its own calls do."""

    def fix(self, *args: Any) -> Callable[..., None]:
        self.backend.asked.append("fix")

        def run_fixed(*addresses: int) -> None:
            self.backend.asked.append("fixed call")
            self(*(at(*pair) for pair in zip(addresses, args[:5], strict=False)), None, None)

        return run_fixed


class FixingKernel(WatchedKernel):
    """Prepares `FixingDescriptor`."""

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        made = super().prepare(request)
        made.__class__ = FixingDescriptor
        return made


class Fixed(Captured):
    """A dispatcher of capacity 2 after calls alike, so many that they are remembered, the last of which was captured, and others."""

    def __init__(self, graph_capture: bool = True, **settings: bool) -> None:
        self.backend = WatchingBackend(graph_capture=graph_capture, **settings)
        self.backend.own["paged_caching_"] = FixingKernel(self.backend.own["paged_caching_"].run, self.backend, settings)
        self.dispatcher = dispatcher_of(self.backend, 2)
        self.pools = {heads: Pool("cpu", heads) for heads in range(1, 5)}
        for _ in range(4):
            self.write(1)
        self.settled = "fix" in self.backend.asked
        self.backend.asked.clear()
        self.backend.capturing = graph_capture
        self.write(1)
        self.backend.capturing = False
        self.captured_as = list(self.backend.asked)
        for heads in (2, 3, 4, 1):
            self.write(heads)


def test_what_a_descriptor_settled_takes_care_of_capture_itself() -> None:
    fixed = Fixed(notes_capture=True)
    assert (fixed.settled, fixed.captured_as) == (True, ["fixed call"])
    assert (fixed.prepared, fixed.backend.ledger.faults) == (4, []), "it was pinned, and is still found"


def test_a_descriptor_that_leaves_capture_to_core_is_not_asked_to_settle_anything() -> None:
    fixed = Fixed(notes_capture=False)
    assert (fixed.settled, fixed.captured_as) == (False, ["is_capturing"])
    assert fixed.prepared == 4, "core keeps it"


def test_nor_is_one_that_leaves_autograd_to_core() -> None:
    fixed = Fixed(notes_capture=True, uses_autograd=True)
    assert (fixed.settled, fixed.captured_as, fixed.prepared) == (False, [], 4)


def test_a_descriptor_of_a_backend_that_captures_nothing_may_settle_its_calls() -> None:
    fixed = Fixed(graph_capture=False)
    assert (fixed.settled, fixed.captured_as) == (True, ["fixed call"])
    assert fixed.prepared == 5, "nothing is kept for a graph"


def test_a_backend_that_captures_nothing_is_not_asked() -> None:
    backend = WatchingBackend(graph_capture=False)
    dispatcher = dispatcher_of(backend)
    pool = Pool()
    assert pool.write(dispatcher, 1.0)
    backend.asked.clear()
    for number in range(4):
        assert pool.write(dispatcher, number + 2.0)
    assert "is_capturing" not in backend.asked


AT_EXIT = """
import atexit, json
from support_descriptors import Pool, WatchingBackend, dispatcher_of, in_thread

backend = WatchingBackend(graph_capture=True)
atexit.register(lambda: print(json.dumps([len(backend.ledger.made), len(backend.ledger.destroyed), backend.ledger.faults])))
import kvdock.descriptors.lifetimes as lifetimes  # imported before, so that it is through when the line above runs
atexit.unregister(lifetimes.close_all)
atexit.register(lifetimes.close_all)
dispatcher, pools = dispatcher_of(backend), [Pool("cpu", heads) for heads in (1, 2)]

def work():
    assert all(pool.write(dispatcher, 1.0) for pool in pools)
    backend.capturing = True
    assert pools[0].write(dispatcher, 2.0)
    backend.capturing = False

work()
in_thread(work)
print(json.dumps([len(backend.ledger.made), len(backend.ledger.destroyed), backend.ledger.faults]))
"""


def test_it_is_destroyed_when_the_interpreter_exits(interpreters: Interpreters) -> None:
    before, after = interpreters.answers(AT_EXIT)
    assert before == [4, 1, []]
    made, destroyed, faults = after
    assert made == destroyed == 4
    assert faults == ["paged_caching_ on cpu: destroyed by another thread"], "its own has ended; whoever exits does it"
