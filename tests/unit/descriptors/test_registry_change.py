"""What is registered changes: plans made of what was there before are never used again, and destroyed once."""

from __future__ import annotations

import threading

import pytest

from kvdock.ops.dispatcher import OpDispatcher
from kvdock.ops.portable import PORTABLE_KERNELS
from kvdock.plugins.registry import Registry
from support_descriptors import DEVICES, Pool, WatchedKernel, WatchingBackend, dispatcher_of
from support_plugins import InProcessBackend, plugin


def replace(dispatcher: OpDispatcher, backend: WatchingBackend) -> WatchedKernel:
    """Register another kernel over the one there is."""
    kernel = WatchedKernel(PORTABLE_KERNELS["paged_caching_"], backend)
    registry = dispatcher.chooser
    assert isinstance(registry, Registry)
    registry.register_kernel("watching", "paged_caching_", kernel, override=True)
    return kernel


@pytest.mark.parametrize("device", ["cpu", *DEVICES])
@pytest.mark.parametrize("times", [1, 4], ids=["found", "remembered"])
def test_a_kernel_that_is_replaced(device: str, times: int) -> None:
    backend = WatchingBackend()
    dispatcher = dispatcher_of(backend)
    pools = [Pool(device, heads) for heads in (1, 2, 3)]
    for pool in pools * times:
        assert pool.write(dispatcher, 1.0)
    kernel = replace(dispatcher, backend)
    assert backend.ledger.destroyed == [], "nobody touches another's caches"
    assert pools[0].write(dispatcher, 2.0)
    assert (len(backend.own["paged_caching_"].prepared), len(kernel.prepared)) == (3, 1)
    assert len(backend.ledger.destroyed) == 3
    for pool in pools:
        assert pool.write(dispatcher, 3.0)
    assert (len(kernel.prepared), len(backend.ledger.destroyed), backend.ledger.faults) == (3, 3, [])


def test_all_devices_of_a_thread_at_its_first_call() -> None:
    backend = WatchingBackend()
    dispatcher = dispatcher_of(backend)
    pools = [Pool(device) for device in ("cpu", *DEVICES)]
    for pool in pools:
        assert pool.write(dispatcher, 1.0)
    replace(dispatcher, backend)
    assert pools[1].write(dispatcher, 2.0)
    assert (len(backend.ledger.destroyed), backend.ledger.faults) == (3, [])


def test_each_thread_destroys_its_own_once() -> None:
    backend = WatchingBackend()
    dispatcher = dispatcher_of(backend)
    kernels: list[WatchedKernel] = []
    counts: list[int] = []
    filled = threading.Barrier(4, lambda: kernels.append(replace(dispatcher, backend)))
    done = threading.Barrier(4, lambda: counts.append(len(backend.ledger.destroyed)))

    def work() -> None:
        pool = Pool()
        assert pool.write(dispatcher, 1.0)
        filled.wait(50)
        assert pool.write(dispatcher, 2.0)
        done.wait(50)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (counts, len(kernels[0].prepared)) == ([4], 4)
    assert (len(backend.ledger.destroyed), backend.ledger.faults) == (8, [])


def test_a_plugin_that_joins_later_changes_no_result() -> None:
    backend = WatchingBackend()
    dispatcher = dispatcher_of(backend)
    pool = Pool()
    for number in range(5):
        assert pool.write(dispatcher, number + 1.0)
        registry = dispatcher.chooser
        assert isinstance(registry, Registry)
        registry.register(plugin(InProcessBackend(f"other{number}")), f"plugin {number}")
    assert (len(backend.ledger.made), len(backend.ledger.destroyed), backend.ledger.faults) == (5, 4, [])
