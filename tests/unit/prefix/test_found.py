"""Faults that were found in prefix caches while these tests were written: each the shortest way to see it."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from kvdock.errors import ArgumentTypeError, ArgumentValueError, KVDockError, KVDockWarning, StaleHandleError, WrongThreadError
from kvdock.prefix import EvictionPolicy, NaivePrefixCache, PrefixCache, RadixPrefixCache, Stored, Usage
from support_prefix import inside


@pytest.mark.parametrize("act", ["evict", "reset"])
def test_an_observer_that_evicts_what_was_just_stored_leaves_no_good_handle_to_it(act: str) -> None:
    cache = RadixPrefixCache(1)

    def on(event: object) -> None:
        if isinstance(event, Stored):
            cache.evict(1) if act == "evict" else cache.reset()

    cache.subscribe(on)
    handle = cache.insert_prefix([1], [0]).handle
    with pytest.raises(StaleHandleError):
        cache.lock_handle(handle)
    assert (cache.num_locks, cache.size_info.total_size, cache.size_info.protected_size) == (0, 0, 0)


def test_an_observer_that_matches_what_was_just_stored_comes_after_the_insertion() -> None:
    cache, quiet = RadixPrefixCache(1), RadixPrefixCache(1)

    def on(event: object) -> None:
        if isinstance(event, Stored):
            cache.match_prefix([1])

    cache.subscribe(on)
    cache.insert_prefix([1], [0])
    quiet.insert_prefix([1], [0])
    quiet.match_prefix([1])
    assert inside(cache) == inside(quiet)


def test_a_raising_observer_breaks_nothing_where_warnings_are_errors() -> None:
    cache, told = RadixPrefixCache(1), list[Any]()

    def fails(event: object) -> None:
        raise ValueError("no")

    cache.subscribe(fails)
    cache.subscribe(told.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            made = cache.insert_prefix([1], [0])
        except KVDockWarning:
            made = None
    assert len(told) == 1, "the other observer is told, and once"
    assert made is not None, "the call that stored the block says so"


def test_a_third_thread_is_noticed_where_the_second_has_the_number_of_one_that_ended() -> None:
    cache = RadixPrefixCache(1)
    first = threading.Thread(target=cache.check_integrity)
    first.start()
    number = first.ident
    first.join()
    started, done = threading.Event(), threading.Event()
    caught: list[Exception] = []

    def use() -> None:
        cache.match_prefix([1])
        started.set()
        done.wait(10)

    second = threading.Thread(target=use)
    second.start()
    started.wait(10)
    try:
        if second.ident != number:
            pytest.skip("the number was not used again")
        cache.match_prefix([1])
    except WrongThreadError as error:
        caught.append(error)
    finally:
        done.set()
        second.join()
    assert caught


@pytest.mark.parametrize("make", [RadixPrefixCache, NaivePrefixCache])
@pytest.mark.parametrize("count", ["3", None, -1, 1.5])
def test_recording_a_match_of_no_number_of_tokens_changes_nothing(make: type[PrefixCache], count: Any) -> None:
    cache = make(block_size=1)  # type: ignore[call-arg]
    handle, before = cache.match_prefix([1], record=False).handle, cache.stats
    with pytest.raises(KVDockError):
        cache.record_match(handle, count)
    assert cache.stats == before


def test_a_hit_rate_is_at_most_one() -> None:
    cache = RadixPrefixCache(1)
    cache.insert_prefix([1, 2], [0, 1])
    handle = cache.match_prefix([1, 2], record=False).handle
    with pytest.raises(ArgumentValueError, match="2"):
        cache.record_match(handle, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensors_of_floats_are_no_tokens_whatever_numpy_knows(dtype: torch.dtype) -> None:
    with pytest.raises(ArgumentTypeError, match="integers"):
        RadixPrefixCache(1).match_prefix(torch.zeros(2, dtype=dtype))


def test_a_float_tensor_that_needs_gradients_is_no_tokens() -> None:
    with pytest.raises(ArgumentTypeError, match="integers"):
        RadixPrefixCache(1).match_prefix(torch.zeros(2, requires_grad=True))


@pytest.mark.parametrize("bad", [np.array([1, 2]), np.array([[1], [2]]), torch.tensor([1, 2]), [()], {}, 0])
def test_a_namespace_that_is_an_array_is_a_type_error(bad: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="namespace"):
        RadixPrefixCache(1).match_prefix([1], bad)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32, np.uint64])
def test_slots_are_wide_whatever_the_type_of_the_blocks(dtype: type[np.integer[Any]]) -> None:
    made = RadixPrefixCache(512).insert_prefix(range(512), np.array([127], dtype=dtype))
    assert (made.blocks.dtype, made.blocks.tolist()) == (np.int32, [127])
    assert (made.indices.dtype, made.indices.tolist()) == (np.int32, list(range(127 * 512, 128 * 512)))


def test_a_refused_insertion_changes_nothing_inside_either() -> None:
    cache = RadixPrefixCache(1)
    cache.insert_prefix([1, 2, 3], [0, 1, 2])
    before = inside(cache)
    with pytest.raises(ArgumentValueError):
        cache.insert_prefix([1, 2, 9], [0, 1, 2])
    assert inside(cache) == before


def test_a_refused_insertion_does_not_change_how_evictions_are_counted() -> None:
    cache = RadixPrefixCache(1)
    cache.insert_prefix([1, 2, 3], [0, 1, 2])
    with pytest.raises(ArgumentValueError):
        cache.insert_prefix([1, 2, 9], [0, 1, 2])
    cache.evict(3)
    assert cache.stats.evictions == 1


@pytest.mark.parametrize("call", ["match", "refused insertion"])
def test_looking_up_a_large_token_does_not_double_the_memory_of_all(call: str) -> None:
    cache = RadixPrefixCache(1)
    cache.insert_prefix([1, 2, 3], [0, 1, 2])
    if call == "match":
        assert cache.match_prefix([1, 2**40]).handle.cached_len == 1
    else:
        with pytest.raises(ArgumentValueError):
            cache.insert_prefix([1, 2**40], [0, 2])
    assert sum(len(node.label) for node in cache._tree.nodes()) == 3 * 4


class NoPreference(EvictionPolicy):
    """All are worth the same."""

    name = "none"

    def key(self, usage: Usage) -> int:
        return 0


@pytest.mark.parametrize("record", [True, False])
def test_of_equal_keys_the_first_inserted_goes_first_whatever_was_used(record: bool) -> None:
    cache = RadixPrefixCache(1, NoPreference())
    cache.insert_prefix([1, 2], [10, 11])
    cache.insert_prefix([7], [20])
    cache.match_prefix([1], record=record)
    assert cache.evict(2).tolist() in ([10, 11], [11, 10])


def test_a_namespace_of_bytes_and_one_of_text_are_not_compared() -> None:
    cache = RadixPrefixCache(1)
    cache.insert_prefix([1], [0], ("a",))
    assert cache.match_prefix([1], (b"a",)).handle.cached_len == 0


def test_what_a_naive_cache_returns_and_refuses_is_what_a_radix_tree_does() -> None:
    naive = NaivePrefixCache(1)
    for bad in ("high", True, None, 1.5):
        with pytest.raises(ArgumentTypeError, match="priority"):
            naive.insert_prefix([1], [0], priority=bad)  # type: ignore[arg-type]


def test_checking_a_naive_cache_belongs_to_its_thread_too() -> None:
    naive = NaivePrefixCache(1)
    naive.match_prefix([1])
    caught: list[Exception] = []

    def work() -> None:
        try:
            naive.check_integrity()
        except WrongThreadError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert caught


def corrupt(cache: RadixPrefixCache, fault: str) -> None:
    """Break the bookkeeping."""
    root = next(iter(cache._tree.roots.values()))
    if fault == "an entry that the queue lost":
        cache._tree.queue.clear()
    elif fault == "a root under another namespace's key":
        cache._tree.roots[("other", str)] = cache._tree.roots.pop(())
    elif fault == "a child of a root that is its own root's twin":
        cache._tree.roots[("other", str)] = root
    else:
        cache._tree.stored += 1


@pytest.mark.parametrize(
    "fault",
    [
        "an entry that the queue lost",
        "a root under another namespace's key",
        "a child of a root that is its own root's twin",
        "sizes",
    ],
)
def test_check_integrity_notices(fault: str) -> None:
    cache = RadixPrefixCache(1)
    cache.insert_prefix([1, 2, 3], [0, 1, 2])
    cache.check_integrity()
    corrupt(cache, fault)
    with pytest.raises(KVDockError):
        cache.check_integrity()


def test_a_thread_that_is_just_starting_owns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is listed before it has a number, as what belongs to nobody has none: a server that starts threads met this."""
    starting = threading.Thread(target=print)
    monkeypatch.setitem(threading._limbo, starting, starting)  # type: ignore[attr-defined]
    assert starting.ident is None
    assert starting in threading.enumerate()
    cache = RadixPrefixCache(4)
    assert cache.match_prefix([1, 2, 3, 4]).handle.cached_len == 0
    cache.hand_over()
    assert cache.match_prefix([1, 2, 3, 4]).handle.cached_len == 0
