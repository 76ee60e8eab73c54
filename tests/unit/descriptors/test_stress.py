"""Sixteen threads, two devices, room for two: no wrong result, nothing destroyed twice or while in use, nothing leaked."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable

import pytest

from kvdock.descriptors.lifetimes import Held
from kvdock.descriptors.manager import DescriptorCacheManager
from kvdock.descriptors.stats import CacheStats
from support_descriptors import DEVICES, Ledger, Pool, RowsKernel, Watched, WatchingBackend, dispatcher_of
from support_slow import first_of

THREADS = 16
CAPACITY = 2


def in_threads(work: Callable[[int], None]) -> None:
    """Run something in all threads at once, and raise what any of them raises."""
    errors: list[BaseException] = []
    start = threading.Barrier(THREADS)

    def run(number: int) -> None:
        try:
            start.wait(100)
            work(number)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def orders(number: int) -> tuple[str, ...]:
    """Return the devices, one before the other or the other way round."""
    return DEVICES if number % 2 else DEVICES[::-1]


def check(ledger: Ledger, stats: dict[str, CacheStats], calls: int) -> None:
    """Check what is so when all threads have ended."""
    gc.collect()
    total = sum(stats.values(), CacheStats())
    assert ledger.faults == []
    assert (total.hits + total.misses, total.misses) == (calls, len(ledger.made))
    assert (total.destroyed, total.failures, total.size, total.capacity) == (len(ledger.made), 0, 0, 0)
    assert (len(ledger.destroyed), ledger.alive) == (len(ledger.made), 0)
    assert 0 < total.hits < calls
    assert total.evictions > calls // 20, "it was a stress"


@pytest.mark.parametrize("calls", first_of((25_000, 100_000)))
def test_the_caches_by_hand(calls: int) -> None:
    """Look-ups; now and then somebody clears all or changes the capacity, and what is looked up is used."""
    ledger, manager = Ledger(), DescriptorCacheManager({"gemm": CAPACITY})
    manager.declare("gemm", Watched.destroy)
    rounds = calls // THREADS // 2

    def work(number: int) -> None:
        rng = random.Random(number)  # noqa: S311 - for variety
        for step in range(rounds):
            for device in orders(number):
                name = f"{device} {rng.choice('aaaabbcd')}"
                cache = manager.cache("gemm", device)
                found = cache.get(name)
                if found is None:
                    found = Held(Watched(ledger, name), cache.owner)
                    cache.put(name, found)
                watched = found.ending.value
                with watched.in_use():
                    if watched.name != name:
                        ledger.faults.append(f"{watched.name} instead of {name}")
                    if step % 500 == number:
                        manager.clear("gemm")
                        manager.set_capacity("gemm", rng.randint(1, 3))

    in_threads(work)
    check(ledger, manager.stats()["gemm"], rounds * THREADS * 2)


@pytest.mark.parametrize("calls", first_of((3_000, 100_000)))
def test_the_dispatcher(calls: int) -> None:
    """Calls of an op on both devices and on the host, by turns; each checks what it wrote."""
    backend = WatchingBackend({"paged_caching_": RowsKernel()})
    dispatcher = dispatcher_of(backend, CAPACITY)
    rounds = calls // THREADS // 4

    def work(number: int) -> None:
        rng = random.Random(number)  # noqa: S311 - for variety
        pools = {device: [Pool(device, heads) for heads in (1, 2, 3)] for device in ("cpu", *DEVICES)}
        for step in range(rounds):
            first, second = orders(number)
            for device in (first, second, first, "cpu"):
                pool = pools[device][rng.choice((0, 0, 0, 1, 1, 2))]
                assert pool.write(dispatcher, step % 100 + 1.0, slot=rng.randint(0, 2), tokens=rng.randint(1, 3)), "a wrong result"

    in_threads(work)
    check(backend.ledger, dispatcher.descriptors.stats()["paged_caching_"], rounds * THREADS * 4)


def test_the_dispatcher_while_what_is_registered_changes() -> None:
    backend = WatchingBackend({"paged_caching_": RowsKernel()})
    dispatcher = dispatcher_of(backend, CAPACITY)
    registry = dispatcher.chooser
    kernel = backend.own["paged_caching_"]

    def work(number: int) -> None:
        pools = [Pool(device, heads) for device in orders(number) for heads in (1, 2)]
        for step in range(20):
            for pool in pools:
                assert pool.write(dispatcher, step + 1.0), "a wrong result"
            if step % 5 == number % 5:
                registry.register_kernel("watching", "paged_caching_", kernel, override=True)  # type: ignore[attr-defined]

    in_threads(work)
    gc.collect()
    assert backend.ledger.faults == []
    assert (len(backend.ledger.destroyed), backend.ledger.alive) == (len(backend.ledger.made), 0)
