"""`LRUDescriptorCache` as its user sees it."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from kvdock import ArgumentTypeError, ArgumentValueError, LRUDescriptorCache, UnsupportedError, WrongThreadError
from kvdock.descriptors.lifetimes import Held
from kvdock.descriptors.manager import DescriptorCacheManager
from kvdock.descriptors.stats import CacheStats
from support_descriptors import Ledger, Watched, in_thread


def filled(capacity: int, names: str, destroyed: list[str]) -> LRUDescriptorCache[str]:
    """Return a cache of letters, each under its capital."""
    lru: LRUDescriptorCache[str] = LRUDescriptorCache(capacity, destroyed.append)
    for name in names:
        lru.put(name.upper(), name)
    return lru


def test_what_was_put_is_found_and_what_was_not_is_none() -> None:
    lru = filled(3, "ab", [])
    assert (lru.get("A"), lru.get("B"), lru.get("C")) == ("a", "b", None)
    assert (len(lru), "A" in lru, "C" in lru, lru.capacity) == (2, True, False, 3)


def test_the_least_recently_used_leaves() -> None:
    destroyed: list[str] = []
    lru = filled(3, "abc", destroyed)
    lru.get("A")
    lru.put("D", "d")
    assert destroyed == ["b"]
    assert [lru.get(key) for key in "ABCD"] == ["a", None, "c", "d"]
    lru.put("E", "e")
    assert destroyed == ["b", "a"]


def test_looking_whether_something_is_there_is_no_use() -> None:
    destroyed: list[str] = []
    lru = filled(2, "ab", destroyed)
    assert "A" in lru
    lru.put("C", "c")
    assert destroyed == ["a"]


def test_replacing_destroys_what_was_there_and_is_a_use() -> None:
    destroyed: list[str] = []
    lru = filled(2, "ab", destroyed)
    lru.put("A", "new")
    assert (destroyed, lru.get("A"), len(lru)) == (["a"], "new", 2)
    lru.put("C", "c")
    assert destroyed == ["a", "b"]


def test_putting_the_same_object_again_destroys_nothing() -> None:
    destroyed: list[Watched] = []
    lru: LRUDescriptorCache[Watched] = LRUDescriptorCache(2, destroyed.append)
    one = Watched(Ledger())
    lru.put("a", one)
    lru.put("a", one)
    assert (destroyed, lru.get("a"), len(lru)) == ([], one, 1)


def test_resizing_lets_the_oldest_go_at_once() -> None:
    destroyed: list[str] = []
    lru = filled(5, "abcde", destroyed)
    lru.get("A")
    lru.resize(2)
    assert (destroyed, len(lru), lru.capacity) == (["b", "c", "d"], 2, 2)
    lru.resize(3)
    lru.put("F", "f")
    assert (destroyed, len(lru)) == (["b", "c", "d"], 3)


def test_clearing_destroys_everything_once_and_leaves_it_usable() -> None:
    destroyed: list[str] = []
    lru = filled(5, "abc", destroyed)
    lru.clear()
    lru.clear()
    assert (sorted(destroyed), len(lru), lru.get("A")) == (["a", "b", "c"], 0, None)
    lru.put("A", "again")
    assert lru.get("A") == "again"


def test_everything_is_counted() -> None:
    lru = filled(2, "abc", [])
    for key in "BCA":
        lru.get(key)
    lru.put("C", "other", prepare_s=0.25)
    lru.put("D", "d", prepare_s=0.5)
    lru.misses += 1
    assert lru.stats == CacheStats(hits=2, misses=2, evictions=2, destroyed=3, size=2, capacity=2, prepare_s=0.75)
    lru.clear()
    assert attrs.asdict(lru.stats) | {"destroyed": 5, "size": 0, "evictions": 2} == attrs.asdict(lru.stats)


def test_without_a_destroyer_things_just_leave() -> None:
    lru: LRUDescriptorCache[str] = LRUDescriptorCache(1)
    lru.put(1, "a")
    lru.put(2, "b")
    assert (lru.get(1), lru.get(2), lru.stats.destroyed) == (None, "b", 1)


class Collider:
    """A key whose hash says nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Collider) and other.name == self.name


def test_keys_of_one_hash_do_not_collide() -> None:
    assert hash((-1, "x")) == hash((-2, "x")), "CPython's own pair of unequal ints with one hash"
    lru: LRUDescriptorCache[str] = LRUDescriptorCache(4)
    for key, value in (((-1, "x"), "minus one"), ((-2, "x"), "minus two"), (Collider("a"), "a"), (Collider("b"), "b")):
        lru.put(key, value)
    assert (lru.get((-1, "x")), lru.get((-2, "x"))) == ("minus one", "minus two")
    assert (lru.get(Collider("a")), lru.get(Collider("b")), lru.get(Collider("c"))) == ("a", "b", None)


@pytest.mark.parametrize("bad", [0, -1])
def test_a_capacity_that_holds_nothing_is_refused(bad: int) -> None:
    with pytest.raises(ArgumentValueError, match=f"LRUDescriptorCache: capacity: expected at least 1, got {bad}"):
        LRUDescriptorCache(bad)
    lru = filled(2, "a", [])
    with pytest.raises(ArgumentValueError, match=f"expected at least 1, got {bad}"):
        lru.resize(bad)
    assert (lru.capacity, lru.get("A")) == (2, "a")


@pytest.mark.parametrize("bad", [None, 2.0, "2", True])
def test_a_capacity_that_is_no_int_is_refused(bad: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=f"expected an int of at least 1, got {bad!r}"):
        LRUDescriptorCache(bad)


class TestDestroyer:
    def test_one_that_raises_is_reported_and_the_others_are_destroyed(self, caplog: pytest.LogCaptureFixture) -> None:
        destroyed: list[str] = []

        def destroyer(name: str) -> None:
            if name in "bd":
                raise ValueError(f"{name} does not want to")
            destroyed.append(name)

        lru: LRUDescriptorCache[str] = LRUDescriptorCache(9, destroyer)
        for name in "abcde":
            lru.put(name, name)
        with caplog.at_level(logging.ERROR, "kvdock.descriptors"):
            lru.clear()
        assert sorted(destroyed) == ["a", "c", "e"]
        assert (lru.stats.destroyed, lru.stats.failures, len(lru)) == (5, 2, 0)
        texts = [(record.getMessage(), str(record.exc_info and record.exc_info[1])) for record in caplog.records]
        assert [text.partition(" raised;")[0] for text, _ in texts] == ["destroying descriptor 'b'", "destroying descriptor 'd'"]
        assert [cause for _, cause in texts] == ["b does not want to", "d does not want to"]
        lru.clear()
        assert lru.stats.failures == 2, "none is tried twice"

    @pytest.mark.parametrize("cause", ["evict", "replace", "resize", "close", "drop"])
    def test_it_may_raise_whatever_the_cause(self, cause: str, caplog: pytest.LogCaptureFixture) -> None:
        tried: list[str] = []

        def destroyer(name: str) -> None:
            tried.append(name)
            raise OSError("no")

        lru: LRUDescriptorCache[str] = LRUDescriptorCache(2, destroyer)
        lru.put(1, "a")
        lru.put(2, "b")
        if cause == "evict":
            lru.put(3, "c")
        elif cause == "replace":
            lru.put(1, "c")
        elif cause == "resize":
            lru.resize(1)
        elif cause == "close":
            lru.close()
        assert tried == {"evict": ["a"], "replace": ["a"], "resize": ["a"], "close": ["a", "b"], "drop": []}[cause]
        del lru
        gc.collect()
        assert sorted(tried) == (["a", "b", "c"] if cause in ("evict", "replace") else ["a", "b"])
        assert len(caplog.records) == len(tried)

    def test_it_may_use_the_cache_itself(self) -> None:
        """What it puts there is kept, and nothing is destroyed twice or lost on the way."""
        destroyed: list[int] = []

        def destroyer(value: int) -> None:
            destroyed.append(value)
            if value < 50:
                lru.put(("again", value), value + 100)
                lru.get(("again", value - 1))

        lru: LRUDescriptorCache[int] = LRUDescriptorCache(3, destroyer)
        for value in range(10):
            lru.put(value, value)
        lru.clear()
        lru.clear()
        assert sorted(destroyed) == [*range(10), *range(100, 110)]

    def test_a_request_clears_once_though_destroyers_use_the_cache(self) -> None:
        lru: LRUDescriptorCache[int] = LRUDescriptorCache(9, lambda value: lru.put(value + 100, value + 100) if value < 5 else None)
        for value in range(5):
            lru.put(value, value)
        lru.clear()
        assert sorted(lru.entries) == [100, 101, 102, 103, 104]  # type: ignore[type-var]

    def test_an_interrupt_does_not_lose_the_others(self) -> None:
        destroyed: list[str] = []

        def destroyer(name: str) -> None:
            destroyed.append(name)
            if name == "b":
                raise KeyboardInterrupt

        lru: LRUDescriptorCache[str] = LRUDescriptorCache(9, destroyer)
        for name in "abc":
            lru.put(name, name)
        with pytest.raises(KeyboardInterrupt):
            lru.clear()
        assert destroyed == ["a", "b"]
        lru.get("x")
        assert destroyed == ["a", "b", "c"]


class TestPinned:
    def test_it_never_leaves_and_does_not_count(self) -> None:
        ledger = Ledger()
        lru: LRUDescriptorCache[Watched] = LRUDescriptorCache(2, Watched.destroy)
        for name in "abcde":
            lru.put(name, Watched(ledger, name, pinned=name in "bd"))
        assert [name for name in "abcde" if name in lru] == ["b", "c", "d", "e"]
        lru.resize(1)
        assert [name for name in "abcde" if name in lru] == ["b", "d", "e"]
        lru.clear()
        assert [name for name in "abcde" if name in lru] == ["b", "d"]
        for name in "vwxyz":
            lru.put(name, Watched(ledger, name))
        assert (len(lru), ledger.destroyed) == (3, ["a", "c", "e", "v", "w", "x", "y"])

    @pytest.mark.parametrize("cause", ["replace", "close", "drop"])
    def test_it_outlives_its_cache(self, cause: str) -> None:
        """A graph that launches it may be replayed when the thread that captured it is gone."""
        ledger = Ledger()
        lru: LRUDescriptorCache[Watched] = LRUDescriptorCache(2, Watched.destroy)
        lru.put("a", Watched(ledger, "a", pinned=True))
        lru.put("b", Watched(ledger, "b"))
        if cause == "replace":
            lru.put("a", Watched(ledger, "new"))
        elif cause == "close":
            lru.close()
        if cause != "replace":
            del lru
        gc.collect()
        assert ledger.destroyed == ([] if cause == "replace" else ["b"])
        assert ledger.made[0]() is not None

    def test_it_may_become_so_later(self) -> None:
        ledger = Ledger()
        lru: LRUDescriptorCache[Watched] = LRUDescriptorCache(1, Watched.destroy)
        lru.put("a", Watched(ledger, "a"))
        found = lru.get("a")
        assert found is not None
        found.pinned = True
        lru.put("b", Watched(ledger, "b"))
        lru.clear()
        assert (lru.get("a"), ledger.destroyed) == (found, ["b"])


class TestHeld:
    """What is put as a `Held` ends when its last holder lets go."""

    @pytest.mark.parametrize("cause", ["evict", "replace", "clear", "resize", "close", "drop"])
    def test_the_cache_lets_go_and_the_last_holder_ends_it(self, cause: str) -> None:
        ledger = Ledger()
        lru: LRUDescriptorCache[Held] = LRUDescriptorCache(2, Watched.destroy)
        one = Held(Watched(ledger, "a"), lru.owner)
        lru.put("a", one)
        lru.put("b", Held(Watched(ledger, "b"), lru.owner))
        assert lru.get("a") is one
        lru.get("b")
        entry = lru.entries["a"]
        owner = lru.owner
        if cause == "evict":
            lru.put("c", Held(Watched(ledger, "c"), owner))
        elif cause == "replace":
            lru.put("a", Held(Watched(ledger, "new"), owner))
        elif cause == "resize":
            lru.resize(1)
        elif cause == "drop":
            del lru
        else:
            getattr(lru, cause)()
        others = ["b"] if cause in ("clear", "close", "drop") else []
        assert (entry.value, ledger.destroyed) == (None, others), "who has found the entry does not run it any more"
        del one
        assert (ledger.destroyed, owner.destroyed, ledger.faults) == ([*others, "a"], len(others) + 1, [])
        assert ledger.made[0]() is None

    def test_one_that_becomes_pinned_after_it_has_left_stays(self) -> None:
        ledger = Ledger()
        lru: LRUDescriptorCache[Held] = LRUDescriptorCache(1, Watched.destroy)
        one = Held(Watched(ledger, "a"), lru.owner)
        lru.put("a", one)
        lru.clear()
        one.ending.captured = True
        del one
        lru.get("a")
        del lru
        gc.collect()
        assert (ledger.destroyed, ledger.alive) == ([], 1)

    def test_what_another_thread_lets_go_of_is_ended_by_its_own(self) -> None:
        """As when a traceback or a cycle of garbage held it last."""
        ledger = Ledger()
        lru: LRUDescriptorCache[Held] = LRUDescriptorCache(1, Watched.destroy)
        holders = [Held(Watched(ledger, "a"), lru.owner)]
        lru.put("a", holders[0])
        lru.clear()
        in_thread(holders.clear)
        assert (ledger.destroyed, ledger.alive) == ([], 1)
        lru.get("a")
        assert (ledger.destroyed, ledger.alive, ledger.faults) == (["a"], 0, [])

    def test_or_by_whoever_does_it_once_its_own_has_ended(self) -> None:
        ledger, manager, holders = Ledger(), DescriptorCacheManager(), []
        manager.declare("add", Watched.destroy)

        def work() -> None:
            cache = manager.cache("add", 0)
            holders.append(Held(Watched(ledger, "a"), cache.owner))
            cache.put("a", holders[0])

        in_thread(work)
        assert (ledger.destroyed, manager.stats()["add"]) == ([], {})
        holders.clear()
        assert (ledger.destroyed, manager.stats()["add"][0]) == (["a"], CacheStats(destroyed=1))

    def test_a_guard_that_refuses_is_reported(self, caplog: pytest.LogCaptureFixture) -> None:
        def guard() -> Any:
            raise OSError("no such device")

        ledger = Ledger()
        lru: LRUDescriptorCache[Held] = LRUDescriptorCache(1, Watched.destroy)
        lru.put("a", Held(Watched(ledger, "a"), lru.owner, guard))
        lru.clear()
        lru.get("a")
        assert (lru.stats.destroyed, lru.stats.failures, ledger.destroyed) == (1, 1, [])
        assert [str(record.exc_info and record.exc_info[1]) for record in caplog.records] == ["no such device"], "once"


class TestThreads:
    @pytest.mark.parametrize("call", ["get", "put", "resize"])
    def test_only_the_owner_may_use_it(self, call: str) -> None:
        lru = filled(2, "a", [])
        act = {"get": lambda: lru.get("A"), "put": lambda: lru.put("B", "b"), "resize": lambda: lru.resize(1)}[call]
        with pytest.raises(WrongThreadError, match=rf"expected calls from thread {threading.get_ident()}, which made it, got a call from"):
            in_thread(act)
        assert (lru.get("A"), lru.get("B"), lru.capacity) == ("a", None, 2)

    def test_clearing_from_elsewhere_is_carried_out_by_the_owner(self) -> None:
        ledger = Ledger()
        lru: LRUDescriptorCache[Watched] = LRUDescriptorCache(4, Watched.destroy)
        for name in "ab":
            lru.put(name, Watched(ledger, name))
        in_thread(lru.clear)
        assert ledger.destroyed == []
        assert lru.get("a") is None
        assert (ledger.destroyed, ledger.faults) == (["a", "b"], [])
        lru.put("c", Watched(ledger, "c"))
        assert lru.get("c") is not None, "one request clears once"

    @pytest.mark.parametrize("call", ["put", "resize", "clear"])
    def test_every_call_of_the_owner_carries_it_out(self, call: str) -> None:
        destroyed: list[str] = []
        lru = filled(4, "ab", destroyed)
        in_thread(lru.clear)
        {"put": lambda: lru.put("C", "c"), "resize": lambda: lru.resize(9), "clear": lru.clear}[call]()
        assert destroyed == ["a", "b"]

    def test_dropping_it_destroys_what_is_left(self) -> None:
        destroyed: list[str] = []
        lru = filled(4, "ab", destroyed)
        del lru
        assert sorted(destroyed) == ["a", "b"]

    def test_any_thread_may_read_the_statistics(self) -> None:
        lru = filled(1, "ab", [])
        assert in_thread(lambda: lru.stats) == CacheStats(evictions=1, destroyed=1, size=1, capacity=1)


def test_nothing_is_kept_of_what_has_left() -> None:
    ledger = Ledger()
    lru: LRUDescriptorCache[Watched] = LRUDescriptorCache(3, Watched.destroy)
    for number in range(100):
        lru.put(number, Watched(ledger, str(number)))
    assert (ledger.alive, len(ledger.destroyed)) == (3, 97)
    lru.clear()
    assert (ledger.alive, ledger.faults) == (0, [])


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused_since_two_would_destroy_the_same(way: Callable[[Any], Any]) -> None:
    destroyed: list[str] = []
    lru = filled(3, "ab", destroyed)
    with pytest.raises(UnsupportedError, match=r"LRUDescriptorCache: .*Fix: make another, LRUDescriptorCache\(3\)"):
        way(lru)
    gc.collect()
    assert destroyed == []
    assert lru.get("A") == "a"
