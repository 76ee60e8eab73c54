"""`DescriptorCacheManager`: any op's caches, for each thread and device."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import kvdock.descriptors
from kvdock import ArgumentTypeError, ArgumentValueError
from kvdock.descriptors.manager import DEFAULT_CAPACITY, DescriptorCacheManager
from kvdock.descriptors.stats import CacheStats
from kvdock.ops.catalog import CATALOG
from support_descriptors import DEVICES, Ledger, Watched, in_thread

OPS = (
    "add",
    "rms_norm",
    "gemm",
    "rope",
    "rearrange",
    "causal_softmax",
    "topk_router",
    "swiglu",
    "random_sample",
    "dequantize_awq",
    "an op that a plugin makes up",
)
"""The ops that the describing documents name, and one more."""


def fill(manager: DescriptorCacheManager, op: str, device: Any, ledger: Ledger, names: str) -> None:
    """Look letters up, and put what is missing."""
    cache = manager.cache(op, device)
    for name in names:
        if cache.get(name) is None:
            cache.put(name, Watched(ledger, f"{op} {name}"), prepare_s=0.5)


@pytest.mark.parametrize("op", OPS)
def test_any_op_has_caches_of_its_own(op: str) -> None:
    ledger, manager = Ledger(), DescriptorCacheManager({op: 2, "another": 3})
    for name in (op, "another"):
        manager.declare(name, Watched.destroy)
        fill(manager, name, torch.device("cpu"), ledger, "abcb")
    stats = manager.stats()
    assert stats[op] == {torch.device("cpu"): CacheStats(1, 3, 1, 1, 0, 2, 2, 1.5)}
    assert stats["another"] == {torch.device("cpu"): CacheStats(1, 3, 0, 0, 0, 3, 3, 1.5)}
    manager.clear(op)
    assert ledger.destroyed == [f"{op} {name}" for name in "abc"]


def test_there_is_no_code_for_any_op() -> None:
    folder = Path(kvdock.descriptors.__file__).parent
    text = " ".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    words = set(re.findall(r"\w+", text))
    assert len(words) > 100
    assert not {*OPS, *CATALOG, *(op.rstrip("_") for op in CATALOG)} & words


def test_each_device_and_each_thread_has_its_own() -> None:
    manager = DescriptorCacheManager()
    manager.declare("add")
    first, second = (manager.cache("add", torch.device(name)) for name in DEVICES)
    assert first is manager.cache("add", torch.device(DEVICES[0]))
    assert len({id(cache) for cache in (first, second, manager.cache("add", None), in_thread(manager.cache, "add", None))}) == 4
    assert first.capacity == DEFAULT_CAPACITY == 100


def test_a_cache_is_made_on_first_touch() -> None:
    manager = DescriptorCacheManager()
    manager.declare("add")
    assert manager.stats() == {"add": {}}
    manager.cache("add", None)
    assert manager.stats() == {"add": {None: CacheStats(capacity=100)}}


def test_a_cache_of_an_op_that_nobody_declared() -> None:
    manager = DescriptorCacheManager()
    with pytest.raises(ArgumentValueError, match=r"expected a declared op: none yet, got 'add'\. Fix: declare\(op\) first"):
        manager.cache("add", None)
    manager.declare("gemm")
    manager.declare("add")
    for call in (lambda: manager.cache("rope", None), lambda: manager.clear("rope")):
        with pytest.raises(ArgumentValueError, match="expected a declared op: add, gemm, got 'rope'"):
            call()


class TestDeclaring:
    def test_twice_in_the_same_way_is_once(self) -> None:
        manager = DescriptorCacheManager()
        assert manager.declare("add", Watched.destroy) == manager.declare("add", Watched.destroy)

    def test_twice_in_another_way_is_refused(self) -> None:
        manager = DescriptorCacheManager()
        manager.declare("add", Watched.destroy)
        with pytest.raises(
            ArgumentValueError, match="descriptor caches of add: expected one owner, got a second declaration, with destroyer"
        ):
            manager.declare("add", print)

    def test_from_many_threads_at_once(self) -> None:
        manager, barrier, found = DescriptorCacheManager(), threading.Barrier(8), []

        def declare() -> None:
            barrier.wait()
            found.append(manager.declare("add", Watched.destroy))

        threads = [threading.Thread(target=declare) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(settings) for settings, _ in found}) == 1


class TestCapacity:
    @pytest.mark.parametrize("early", [True, False])
    def test_it_can_be_set_before_and_after_an_op_is_declared(self, early: bool) -> None:
        manager = DescriptorCacheManager({"gemm": 7})
        if early:
            manager.set_capacity("add", 3)
        manager.declare("add")
        manager.set_capacity("add", 3)
        manager.declare("gemm")
        assert (manager.cache("add", None).capacity, manager.cache("gemm", None).capacity) == (3, 7)

    def test_every_thread_follows_when_it_asks(self) -> None:
        ledger, manager = Ledger(), DescriptorCacheManager()
        manager.declare("add", Watched.destroy)
        for device in DEVICES:
            fill(manager, "add", device, ledger, "abcd")
        in_thread(manager.set_capacity, "add", 1)
        assert ledger.destroyed == [], "only the owner touches its caches"
        assert len(manager.cache("add", DEVICES[0])) == 1
        assert ledger.destroyed == ["add a", "add b", "add c"]
        assert len(manager.cache("add", DEVICES[1])) == 1
        assert (len(ledger.destroyed), ledger.faults) == (6, [])

    @pytest.mark.parametrize(("bad", "error"), [(0, ArgumentValueError), (1.5, ArgumentTypeError), (None, ArgumentTypeError)])
    def test_a_bad_one_is_refused_and_changes_nothing(self, bad: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match=r"descriptor capacity of add: expected .*at least 1, got"):
            DescriptorCacheManager({"add": bad})
        manager = DescriptorCacheManager({"add": 4})
        manager.declare("add")
        with pytest.raises(error, match="descriptor capacity of add"):
            manager.set_capacity("add", bad)
        assert manager.cache("add", None).capacity == 4


class TestClearing:
    def test_the_caller_destroys_its_own_at_once_and_every_other_thread_when_it_asks(self) -> None:
        ledger, manager = Ledger(), DescriptorCacheManager()
        manager.declare("add", Watched.destroy)
        filled, cleared = threading.Event(), threading.Event()

        def other() -> list[int]:
            fill(manager, "add", 0, ledger, "ab")
            fill(manager, "add", 1, ledger, "ab")
            filled.set()
            assert cleared.wait(50)
            before = len(ledger.destroyed)
            manager.cache("add", 0)
            return [before, len(ledger.destroyed)]

        def main() -> None:
            assert filled.wait(50)
            fill(manager, "add", 0, ledger, "xyz")
            manager.clear("add")
            cleared.set()

        thread = threading.Thread(target=main)
        thread.start()
        counts = other()
        thread.join()
        assert counts == [3, 7], "all devices of a thread are cleared by its first call"
        assert ledger.faults == []

    def test_one_op_or_all(self) -> None:
        ledger, manager = Ledger(), DescriptorCacheManager()
        for op in ("add", "gemm", "rope"):
            manager.declare(op, Watched.destroy)
            fill(manager, op, None, ledger, "a")
        manager.clear("gemm")
        assert ledger.destroyed == ["gemm a"]
        manager.clear()
        assert sorted(ledger.destroyed) == ["add a", "gemm a", "rope a"]

    def test_clears_at_once_from_many_threads_are_all_noticed(self) -> None:
        manager = DescriptorCacheManager()
        settings, _ = manager.declare("add")
        seen: set[int] = set()
        for _ in range(50):
            threads = [threading.Thread(target=manager.clear) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert settings.generation not in seen
            seen.add(settings.generation)


class TestStatistics:
    def test_threads_that_have_ended_count(self) -> None:
        ledger, manager = Ledger(), DescriptorCacheManager({"add": 2})
        manager.declare("add", Watched.destroy)
        for _ in range(5):
            in_thread(fill, manager, "add", "d0", ledger, "abca")
            in_thread(fill, manager, "add", "d1", ledger, "aa")
        fill(manager, "add", "d0", ledger, "a")
        assert manager.stats()["add"] == {
            "d0": CacheStats(hits=0, misses=21, evictions=10, destroyed=20, size=1, capacity=2, prepare_s=10.5),
            "d1": CacheStats(hits=5, misses=5, destroyed=5, prepare_s=2.5),
        }

    def test_threads_that_run_count(self) -> None:
        ledger, manager = Ledger(), DescriptorCacheManager()
        manager.declare("add", Watched.destroy)
        counted: list[Any] = []
        barrier = threading.Barrier(4, lambda: counted.append(manager.stats()["add"][0]))

        def work() -> None:
            fill(manager, "add", 0, ledger, "aab")
            barrier.wait(50)
            barrier.wait(50)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert counted[0] == CacheStats(hits=4, misses=8, size=8, capacity=400, prepare_s=4.0)
        assert manager.stats()["add"][0] == CacheStats(hits=4, misses=8, destroyed=8, prepare_s=4.0)

    def test_destroyers_that_raise_count_after_their_thread(self, caplog: pytest.LogCaptureFixture) -> None:
        manager = DescriptorCacheManager()

        def destroyer(value: str) -> None:
            raise OSError(value)

        manager.declare("add", destroyer)
        for name in "abc":
            in_thread(lambda name=name: manager.cache("add", 0).put(name, name))
        assert manager.stats()["add"][0] == CacheStats(destroyed=3, failures=3)
        assert len(caplog.records) == 3
