"""The composition root: one runtime for a process, and as many as tests and embedders like."""

from __future__ import annotations

import threading

import pytest
import torch

import kvdock
from kvdock import runtime
from kvdock.ops.dispatcher import active_dispatcher
from kvdock.ops.portable import SKIPPED
from kvdock.ops.portable.paged_caching import PagedCaching
from kvdock.ops.portable.rows import PortableDescriptor
from support_caches import CPU, SPECS, counting_runtime, needs_backends, runtime_of
from support_plugins import InProcessBackend


def test_there_is_one_default() -> None:
    found: list[kvdock.Runtime] = []
    barrier = threading.Barrier(4)

    def ask() -> None:
        barrier.wait()
        found.append(runtime.default())

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert {id(one) for one in found} == {id(runtime.default())}
    assert active_dispatcher() is runtime.default().dispatcher


@needs_backends
def test_a_runtime_of_ones_own_is_apart_from_the_default() -> None:
    own, calls = counting_runtime("mine")
    assert own is not runtime.default()
    cache = kvdock.create_cache(SPECS["uniform"], kvdock.PagedKVCacheConfig(num_blocks=2), CPU, ops=own.dispatcher)
    cache.copy_blocks([(0, 1)])
    assert calls == {("mine", "copy_blocks_"): 1}
    kvdock.ops.copy_blocks_(cache.k_cache(0), cache.v_cache(0), [(1, 0)])
    assert calls == {("mine", "copy_blocks_"): 1}, "kvdock.ops goes through the default"
    with kvdock.use_backend("mine"), pytest.raises(kvdock.BackendUnavailableError, match="mine"):
        kvdock.ops.copy_blocks_(cache.k_cache(0), cache.v_cache(0), [(1, 0)])


def test_the_dispatcher_asks_the_registry() -> None:
    own, _ = counting_runtime("mine")
    assert own.dispatcher.chooser is own.registry
    assert own.dispatcher.choose("paged_caching_", torch.device("cpu"), None).backend.name == "mine"


@needs_backends
def test_an_environment_may_be_given() -> None:
    bare = kvdock.Runtime(environ={"KVDOCK_DISABLE_AUTOLOAD": "1"})
    assert not bare.registry.loaded()
    assert all(record.state.name == "BLOCKED" for record in bare.registry.records())
    only = kvdock.Runtime(environ={"KVDOCK_BACKENDS": "cpu"})
    assert set(only.registry.loaded()) == {"cpu"}


class Counting(InProcessBackend):
    """A backend that has skipped writes."""

    def skipped_writes(self, device: torch.device) -> int:
        assert isinstance(device, torch.device)
        return 5


def test_skipped_writes_are_those_of_the_backend_and_of_the_portable_kernels() -> None:
    own = runtime_of(Counting("lossy", claims=["cpu"], devices=["cpu"]))
    before = own.skipped_writes("cpu")
    assert before == 5 + SKIPPED.read(torch.device("cpu"))
    # As on a device: there the portable kernels cannot raise.
    write = PortableDescriptor(PagedCaching().run, "paged_caching_", SKIPPED.prepare(torch.device("cpu")), on_host=False)
    k_cache, v_cache = torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 4)
    write(k_cache, v_cache, torch.ones(4, 1, 4), torch.ones(4, 1, 4), torch.tensor([3, -1, 4, 2**40]), None, None)
    assert own.skipped_writes(torch.device("cpu")) == before + 2, "padding does not count"
    assert int(k_cache.sum()) == int(v_cache.sum()) == 4


def test_skipped_writes_are_those_of_the_backend_that_is_named() -> None:
    own = runtime_of(InProcessBackend("usual", claims=["cpu"], devices=["cpu"]), Counting("lossy", claims=[], devices=["cpu"]))
    assert own.skipped_writes("cpu") == SKIPPED.read(torch.device("cpu"))
    with kvdock.use_backend("lossy"):
        assert own.skipped_writes("cpu") == 5 + SKIPPED.read(torch.device("cpu"))


def test_skipped_writes_on_a_device_that_nobody_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SKIPPED, "_counts", {})  # another test may have written to that device in this process
    with pytest.raises(kvdock.NoBackendError, match="claims meta"):
        runtime_of(InProcessBackend("lossy", claims=["cpu"], devices=["cpu"])).skipped_writes("meta")


def test_a_runtime_may_be_made_the_processs_and_then_serves_every_public_call() -> None:
    before = runtime.made()
    own, calls = counting_runtime("mine")
    k, v = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
    runtime.set_default(own)
    try:
        kvdock.ops.copy_blocks_(k, v, [(0, 1)])
        kvdock.create_cache(SPECS["uniform"], kvdock.PagedKVCacheConfig(num_blocks=2), CPU).copy_blocks([(0, 1)])
        assert calls == {("mine", "copy_blocks_"): 2}
        assert active_dispatcher() is own.dispatcher
        other, others = counting_runtime("other")
        runtime.set_default(other)
        kvdock.ops.copy_blocks_(k, v, [(0, 1)])
        assert (calls, others) == ({("mine", "copy_blocks_"): 2}, {("other", "copy_blocks_"): 1}), "ops are resolved anew"
        runtime.set_default(None)
        assert runtime.made() is None
        assert runtime.default() not in (own, other)
    finally:
        runtime.set_default(before)
