"""Threads that end: in the ending thread, once, and whatever they held is given back."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvdock.descriptors.manager import DescriptorCacheManager
from support_descriptors import DEVICES, Ledger, Pool, Watched, WatchingBackend, dispatcher_of, in_thread


@pytest.mark.parametrize("order", [DEVICES, DEVICES[::-1]])
def test_a_thread_destroys_its_own_under_their_devices_when_it_ends(order: tuple[str, str]) -> None:
    backend = WatchingBackend()
    dispatcher = dispatcher_of(backend)
    pools = [Pool(device, heads) for device in (*order, "cpu") for heads in (1, 2)]

    def work() -> int:
        for number in (1.0, 2.0, 3.0, 4.0):
            assert all(pool.write(dispatcher, number) for pool in pools)
        return len(backend.ledger.destroyed)

    for ended in range(1, 4):
        assert in_thread(work) == 6 * (ended - 1), "not before it ends"
        assert len(backend.ledger.destroyed) == 6 * ended, "and before it is joined"
    assert (backend.ledger.faults, backend.ledger.alive) == ([], 0), "also what a thread remembered of its last call is gone"


def test_the_threads_of_a_pool_keep_theirs_between_tasks() -> None:
    backend = WatchingBackend()
    dispatcher = dispatcher_of(backend)
    with ThreadPoolExecutor(1) as pool:
        for number in range(5):
            assert pool.submit(lambda n=number: Pool().write(dispatcher, n + 1.0)).result(50)  # type: ignore[misc]
        assert (len(backend.ledger.made), len(backend.ledger.destroyed)) == (1, 0)
    assert (len(backend.ledger.destroyed), backend.ledger.faults) == (1, [])


def test_a_thread_that_ends_by_an_error() -> None:
    ledger, manager = Ledger(), DescriptorCacheManager()
    manager.declare("add", Watched.destroy)

    def work() -> None:
        manager.cache("add", 0).put(1, Watched(ledger, "one"))
        raise RuntimeError("over")

    with pytest.raises(RuntimeError, match="over"):
        in_thread(work)
    gc.collect()  # the error's traceback holds what the thread saw
    assert (ledger.destroyed, ledger.faults) == (["one"], [])


def test_a_destroyer_that_raises_in_an_ending_thread_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    destroyed: list[str] = []
    manager = DescriptorCacheManager()

    def destroyer(name: str) -> None:
        destroyed.append(name)
        if name == "b":
            raise ValueError("not now")

    manager.declare("add", destroyer)

    def work() -> None:
        for name in "abc":
            manager.cache("add", 0).put(name, name)

    in_thread(work)
    assert sorted(destroyed) == ["a", "b", "c"]
    assert [record.getMessage().partition(" raised")[0] for record in caplog.records] == ["destroying descriptor 'b'"]


def test_a_manager_that_is_dropped_gives_everything_back() -> None:
    """Of every thread: nobody can ask for them any more."""
    ledger, shared = Ledger(), [DescriptorCacheManager()]
    shared[0].declare("add", Watched.destroy)
    filled, dropped = threading.Barrier(3), threading.Event()

    def work() -> None:
        shared[0].cache("add", 0).put(1, Watched(ledger, "one"))
        filled.wait(50)
        dropped.wait(50)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    filled.wait(50)
    gone = weakref.ref(shared.pop())
    gc.collect()
    assert (gone(), ledger.destroyed, ledger.alive) == (None, ["one", "one"], 0), "while the threads run on"
    dropped.set()
    for thread in threads:
        thread.join()
    assert ledger.destroyed == ["one", "one"]


def test_a_dispatcher_that_is_dropped_gives_everything_back() -> None:
    backend = WatchingBackend(graph_capture=True)
    dispatcher = dispatcher_of(backend)
    for number in range(4):
        assert Pool().write(dispatcher, number + 1.0)
    gone = weakref.ref(dispatcher)
    del dispatcher
    gc.collect()
    assert gone() is None
    assert (len(backend.ledger.destroyed), backend.ledger.alive, backend.ledger.faults) == (1, 0, [])


def test_many_threads_leave_nothing_behind() -> None:
    ledger, manager = Ledger(), DescriptorCacheManager({"add": 3})
    settings, _ = manager.declare("add", Watched.destroy)

    def work() -> None:
        for number in range(10):
            manager.cache("add", number % 2).put(number, Watched(ledger, str(number)))

    for _ in range(100):
        in_thread(work)
    assert (len(ledger.made), len(ledger.destroyed), ledger.alive, ledger.faults) == (1000, 1000, 0, [])
    assert settings.living == {}
    assert {device: (stats.evictions, stats.destroyed, stats.size) for device, stats in manager.stats()["add"].items()} == {
        0: (200, 500, 0),
        1: (200, 500, 0),
    }
