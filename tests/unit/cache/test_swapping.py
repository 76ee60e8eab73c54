"""Swaps aside: what waits for what. Host pools: their size, and the order in which their pages are locked and unlocked."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import mmap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kvdock
from kvdock.cache import pinned
from kvdock.cache.swapping import Swapper, Ticket, host_cache
from kvdock.plugin import BackendError, Mark, Stream
from support_caches import CPU, SPECS, runtime_of
from support_plugins import InProcessBackend

SPEC = SPECS["uniform"]
PAGE_FIRST = kvdock.KVCacheLayout.PAGE_FIRST


class Journal(InProcessBackend):
    """A backend for host memory that notes what its streams and page locks are asked for.

    Args:
        journal: the notes.
        most: bytes that the system locks; None where there is no such thing.
    """

    def __init__(self, journal: list[Any], most: int | None = 2**40) -> None:
        super().__init__("journal", claims=["cpu"], devices=["cpu"])
        self.journal, self.most, self.locked = journal, most, 0
        self.streams = self.done = 0
        self.may_lock = threading.Event()
        self.may_lock.set()

    def side_stream(self, device: torch.device) -> Stream | None:
        self.streams += 1
        return JournalStream(self)

    def pin(self, memory: torch.Tensor, device: torch.device) -> Callable[[], None] | None:
        assert self.may_lock.wait(10)
        if self.most is None:
            return None
        if self.locked + memory.nbytes > self.most:
            raise BackendError("pin", expected="less", got="too much", fix="ask for less")
        self.locked += memory.nbytes
        address, nbytes = memory.data_ptr(), memory.nbytes
        self.journal.append(("lock", address, nbytes, threading.current_thread().name))

        def undo() -> None:
            self.locked -= nbytes
            self.journal.append(("unlock", address, nbytes))

        return undo


class JournalStream(Stream):
    def __init__(self, backend: Journal) -> None:
        self.backend = backend

    def follow(self) -> None:
        self.backend.journal.append("follow")

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        self.backend.journal.append("enter")
        yield
        self.backend.journal.append("leave")

    def mark(self) -> Mark:
        self.backend.journal.append("mark")
        return JournalMark(self.backend, self.backend.journal.count("mark"))


class JournalMark(Mark):
    def __init__(self, backend: Journal, number: int) -> None:
        self.backend, self.number = backend, number

    def reached(self) -> bool:
        return self.number <= self.backend.done

    def wait(self) -> None:
        self.backend.journal.append(f"wait {self.number}")

    def synchronize(self) -> None:
        self.backend.done = max(self.backend.done, self.number)
        self.backend.journal.append(f"synchronize {self.number}")


def pools(backend: Journal, **options: Any) -> tuple[kvdock.PagedKVCache, kvdock.PagedKVCache, kvdock.OpDispatcher]:
    """Return a cache full of ones, one in host memory for it, and their ops."""
    ops = runtime_of(backend).dispatcher
    cache = kvdock.create_cache(SPEC, kvdock.PagedKVCacheConfig(num_blocks=6, block_size=4), CPU, ops=ops)
    for layer in range(3):
        cache.k_cache(layer).fill_(layer + 1)
        cache.v_cache(layer).fill_(-layer - 1)
    return cache, host_cache(cache, ops=ops, **{"num_blocks": 9, **options}), ops


def holds(cache: kvdock.PagedKVCache, block: int) -> bool:
    return all(bool((cache.k_cache(i)[block] == i + 1).all() and (cache.v_cache(i)[block] == -i - 1).all()) for i in range(3))


# Swaps


def test_a_swap_follows_what_was_launched_and_is_marked_behind_its_launches() -> None:
    backend = Journal([])
    cache, host, ops = pools(backend)
    assert host.host_pages is not None
    assert host.host_pages.wait()
    backend.journal.clear()
    swapper = Swapper(ops)
    ticket = swapper.swap(cache, host, [(0, 8)])
    assert backend.journal == ["follow", "enter", "mark", "leave"]
    assert holds(host, 8)
    assert not ticket.ready()
    ticket.wait()
    assert backend.journal[4:] == ["wait 1"]
    assert not ticket.ready(), "that the stream waits says nothing about the host"
    ticket.synchronize()
    assert ticket.ready()
    ticket.wait()
    ticket.synchronize()
    assert backend.journal[5:] == ["synchronize 1"], "what is done is not waited for"


def test_back_again_goes_by_the_same_stream() -> None:
    backend = Journal([])
    cache, host, ops = pools(backend)
    swapper = Swapper(ops)
    swapper.swap(cache, host, [(0, 8)])
    cache.reset()
    swapper.swap(host, cache, [(8, 3)]).synchronize()
    assert holds(cache, 3)
    assert backend.streams == 1


def test_what_is_on_its_way_is_held_until_it_is_done() -> None:
    backend = Journal([])
    cache, host, ops = pools(backend)
    swapper, index = Swapper(ops), torch.tensor([[0, 1]])
    tickets = [swapper.swap(cache, host, index) for _ in range(3)]
    assert [held for held in gc.get_referrers(index) if isinstance(held, tuple)], "pairs on a device are read when the stream gets there"
    backend.done = 2
    assert [ticket.ready() for ticket in tickets] == [True, True, False]
    swapper.swap(cache, host, [(0, 2)])
    assert len(swapper._pending) == 2
    swapper.synchronize()
    assert not swapper._pending
    assert all(ticket.ready() for ticket in tickets)
    del tickets
    assert not [held for held in gc.get_referrers(index) if isinstance(held, tuple)]


def test_an_error_leaves_no_ticket_behind() -> None:
    backend = Journal([])
    cache, host, ops = pools(backend)
    swapper = Swapper(ops)
    with pytest.raises(kvdock.IndexRangeError, match=r"block_pairs\[0, 1\]"):
        swapper.swap(cache, host, [(0, 9)])
    assert not swapper._pending
    with pytest.raises(kvdock.ArgumentTypeError, match=r"Swapper.swap: dst: expected a cache in blocks, got 3"):
        swapper.swap(cache, 3, [(0, 1)])  # type: ignore[arg-type] # wrong on purpose


def test_without_streams_a_swap_is_done_at_once() -> None:
    ops = runtime_of(InProcessBackend("bare", claims=["cpu"], devices=["cpu"])).dispatcher
    config = kvdock.PagedKVCacheConfig(num_blocks=6, block_size=4)
    cache, other = (kvdock.create_cache(SPEC, config, CPU, ops=ops) for _ in range(2))
    cache.k_cache(2).fill_(7)
    ticket = Swapper(ops).swap(cache, other, [(1, 2)])
    assert bool((other.k_cache(2)[2] == 7).all())
    assert ticket.ready()
    ticket.wait()
    ticket.synchronize()


def test_a_stream_must_be_one() -> None:
    class Wrong(Journal):
        def side_stream(self, device: torch.device) -> Any:
            return "a stream"

    cache, host, ops = pools(Wrong([]))
    with pytest.raises(kvdock.plugin.PluginError, match=r"backend 'journal': side_stream\(\): expected a Stream or None, got 'a stream'"):
        Swapper(ops).swap(cache, host, [(0, 1)])


@pytest.mark.backend
def test_the_process_s_runtime_is_the_default() -> None:
    cache = kvdock.create_cache(SPEC, kvdock.PagedKVCacheConfig(num_blocks=2), CPU)
    host = host_cache(cache, num_blocks=3)
    assert isinstance(Swapper().swap(cache, host, [(0, 2)]), Ticket)


# Host pools


def test_a_host_pool_is_page_first_and_of_exact_size() -> None:
    cache, host, _ = pools(Journal([]))
    assert (host.num_blocks, host.config.layout, host.device, host.spec) == (9, PAGE_FIRST, torch.device("cpu"), cache.spec)
    assert host.nbytes == 9 * cache.nbytes // 6
    assert host.host_pages is not None
    assert host.host_pages.nbytes - host.nbytes < 2 * mmap.PAGESIZE, "no more than pages not full, of keys and of values"
    assert all(not pool.memory.any() and pool.memory.data_ptr() % mmap.PAGESIZE == 0 for pool in host._store.pools)
    assert cache.host_pages is None


def test_a_budget_and_a_layout_may_be_chosen() -> None:
    cache, host, _ = pools(Journal([]), num_blocks=None, max_kv_memory_bytes=10_000, layout=kvdock.KVCacheLayout.LAYER_FIRST)
    assert (host.num_blocks, host.nbytes <= 10_000) == (10_000 // (cache.nbytes // 6), True)
    assert host.config.layout is kvdock.KVCacheLayout.LAYER_FIRST


@pytest.mark.parametrize("alignment", [1, 64, 2 * mmap.PAGESIZE])
def test_pages_are_locked_from_the_end_and_unlocked_from_the_beginning(monkeypatch: pytest.MonkeyPatch, alignment: int) -> None:
    """So what begins in a locked page is locked to its end, at any time, and the first byte tells of all."""
    monkeypatch.setattr(pinned, "CHUNK", mmap.PAGESIZE)
    backend = Journal([])
    backend.may_lock.clear()
    ops = runtime_of(backend).dispatcher
    config = kvdock.PagedKVCacheConfig(num_blocks=400, block_size=4, alignment=alignment, pinned_for=torch.device("cpu"), layout=PAGE_FIRST)
    cache = kvdock.create_cache(SPEC, config, CPU, ops=ops)
    assert all(pool.memory.data_ptr() % alignment == 0 for pool in cache._store.pools)
    pages = cache.host_pages
    assert pages is not None
    cache.k_cache(0).fill_(1)  # it is in use while it is being locked
    assert (pages.locked_bytes, pages.wait(timeout=0.01)) == (0, False)
    backend.may_lock.set()
    assert pages.wait()
    assert pages.locked_bytes == pages.nbytes == backend.locked > 8 * mmap.PAGESIZE
    assert {thread for *_, thread in backend.journal} == {"kvdock-page-locks"}
    locked = [address for _, address, *_ in backend.journal]
    assert sum(a < b for a, b in itertools.pairwise(locked)) <= 1, "one memory after the other, keys and values"
    backend.journal.clear()
    del cache, pages
    gc.collect()
    assert backend.locked == 0
    unlocked = [address for _, address, _ in backend.journal]
    assert sorted(unlocked) == sorted(locked)
    assert sum(a > b for a, b in itertools.pairwise(unlocked)) <= 1


def test_a_view_keeps_its_pages_locked() -> None:
    backend = Journal([])
    _, host, _ = pools(backend)
    assert host.host_pages is not None
    assert host.host_pages.wait()
    view, whole = host.v_cache(1), backend.locked
    del host
    gc.collect()
    assert 0 < backend.locked < whole
    view.fill_(1)
    del view
    gc.collect()
    assert backend.locked == 0


def test_a_cache_that_goes_stops_being_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "CHUNK", mmap.PAGESIZE)
    backend = Journal([])
    backend.may_lock.clear()
    _, host, _ = pools(backend, num_blocks=900)
    pages = host.host_pages
    assert pages is not None
    del host
    gc.collect()
    backend.may_lock.set()
    assert not pages.wait(10)
    assert pages.locked_bytes <= mmap.PAGESIZE


def test_where_nothing_can_be_locked_all_is_staged() -> None:
    cache, host, _ = pools(Journal([], most=None))
    assert host.host_pages is not None
    assert host.host_pages.wait() is False
    cache.swap_blocks(host, [(0, 1)])
    assert holds(host, 1)


def test_too_much_to_lock_is_said_and_the_cache_serves_all_the_same() -> None:
    cache, host, _ = pools(Journal([], most=mmap.PAGESIZE))
    assert host.host_pages is not None
    with pytest.raises(kvdock.CapacityError, match=r"page-locked host memory: expected \d+ bytes .*Fix: ask for fewer blocks") as caught:
        host.host_pages.wait()
    assert isinstance(caught.value.__cause__, BackendError)
    cache.swap_blocks(host, [(0, 1)])
    assert holds(host, 1)


def test_a_deep_copy_is_not_locked() -> None:
    backend = Journal([])
    cache, host, _ = pools(backend)
    assert host.host_pages is not None
    assert host.host_pages.wait()
    before = backend.locked
    twin = copy.deepcopy(host)
    assert twin.host_pages is None
    assert copy.copy(host).host_pages is host.host_pages
    cache.swap_blocks(twin, [(0, 1)])
    assert holds(twin, 1)
    assert not holds(host, 1)
    assert backend.locked == before


@pytest.mark.parametrize(
    ("device", "tensors", "got"), [("meta", None, "one on meta"), ("cpu", [(torch.zeros(2, 16, 1, 8),) * 2], "given tensors")]
)
def test_only_memory_of_its_own_on_the_host_is_locked(device: str, tensors: Any, got: str) -> None:
    ops = runtime_of(InProcessBackend("any", claims=["cpu", "meta"], devices=["cpu", "meta"])).dispatcher
    spec = kvdock.KVSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=8, max_positions=64, dtype=torch.float32)
    config, rank = kvdock.PagedKVCacheConfig(num_blocks=2, pinned_for="cpu"), kvdock.RankInfo(device)
    with pytest.raises(kvdock.ArgumentValueError, match=f"PagedKVCacheConfig: pinned_for: expected .*, got {got}. Fix: "):
        config.build_on(tensors, spec, rank, ops)
    with pytest.raises(kvdock.ArgumentTypeError, match="PagedKVCacheConfig: pinned_for"):
        kvdock.PagedKVCacheConfig(num_blocks=2, pinned_for=2.5)  # type: ignore[arg-type] # wrong on purpose


def test_more_than_there_is_is_an_error_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(pinned, "_Pages", refuse)
    with pytest.raises(kvdock.CapacityError, match="Cannot allocate memory"):
        pools(Journal([]))
