"""Faults looked for in `CacheManager`: each the shortest way to see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvdock.errors import ArgumentTypeError, ArgumentValueError, IndexRangeError, UnsupportedError
from kvdock.prefix import Cleared, RadixPrefixCache, Removed, Stored
from kvdock.scheduler import CacheManager, CacheSequence
from support_prefix_calls import cached, run


@pytest.mark.parametrize("first", [np.uint64, np.uint32, np.int8, np.uint8, np.dtype(">i8"), np.int32])
@pytest.mark.parametrize("then", [np.int64, np.uint64, np.int16, np.dtype(">i4")])
def test_token_ids_of_any_integer_types_can_follow_one_another(first: Any, then: Any) -> None:
    manager = CacheManager(4, 1)
    seq = manager.begin(np.array([1, 2], dtype=first))
    manager.extend(seq, 1)
    manager.commit(seq, np.array([3], dtype=then), computed=3)
    assert seq.tokens.tolist() == [1, 2, 3]
    assert seq.tokens.dtype.kind in "iu"
    assert cached(manager, [1, 2, 3]) == 3


def test_token_ids_beyond_doubles_stay_exact() -> None:
    manager = CacheManager(4, 1)
    seq = manager.begin(np.array([2**62 + 1], dtype=np.uint64))
    manager.extend(seq, 1)
    manager.commit(seq, np.array([5], dtype=np.int64), computed=1)
    assert seq.tokens.tolist() == [2**62 + 1, 5]


def test_a_fully_cached_prompt_leaves_one_token_to_compute() -> None:
    manager = CacheManager(8, 2)
    run(manager, [1, 2, 3, 4])
    assert manager.begin([1, 2, 3, 4]).cached_len == 2
    assert manager.begin([1, 2, 3, 4, 5]).cached_len == 4


def test_only_computed_tokens_become_shareable() -> None:
    manager = CacheManager(8, 2)
    seq = manager.begin([1, 2, 3, 4, 5])
    for computed, shared in ((1, 0), (2, 2), (3, 2), (5, 4)):
        manager.commit(seq, [], computed=computed)
        assert cached(manager, [1, 2, 3, 4, 5]) == shared


def test_an_aborted_request_publishes_nothing_new() -> None:
    manager = CacheManager(8, 2)
    seq = manager.begin([1, 2, 3, 4])
    manager.commit(seq, [], computed=3)
    manager.abort(seq)
    assert cached(manager, [1, 2, 3, 4]) == 2
    assert manager.available_size == 16


def test_truncating_gives_up_the_lock_on_what_is_behind() -> None:
    manager = CacheManager(4, 1)
    seq = manager.begin([1, 2, 3, 4])
    manager.commit(seq, [], computed=4)
    assert manager.available_size == 0
    manager.truncate(seq, 1)
    assert manager.available_size == 3
    assert manager.extend(seq, 3)[0].size == 3


def test_what_is_written_again_after_a_truncation_becomes_shareable() -> None:
    manager = CacheManager(8, 2)
    seq = manager.begin([1, 2, 3, 4])
    manager.commit(seq, [], computed=4)
    manager.truncate(seq, 3)
    _, pairs = manager.extend(seq, 1)
    assert pairs.shape == (1, 2), "the cached block is copied first"
    manager.commit(seq, [9], computed=4)
    assert (cached(manager, [1, 2, 3, 4]), cached(manager, [1, 2, 3, 9])) == (4, 4)
    manager.check_integrity()


def test_as_many_blocks_as_before_are_published_again_after_a_truncation_between_blocks() -> None:
    manager = CacheManager(8, 2)
    seq = manager.begin([1, 2, 3, 4])
    manager.commit(seq, [], computed=4)
    manager.truncate(seq, 2)
    assert manager.extend(seq, 2)[1].shape == (0, 2)
    manager.commit(seq, [8, 9], computed=4)
    assert cached(manager, [1, 2, 8, 9]) == 4


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_sizes_may_be_numpy_integers(kind: type[np.integer[Any]]) -> None:
    """As `evict` and `discard_prefix` take them: engines keep lengths in arrays."""
    manager = CacheManager(8, 1)
    seq = manager.begin([1, 2])
    manager.extend(seq, kind(1))  # type: ignore[arg-type]
    manager.commit(seq, [3], computed=kind(3))  # type: ignore[arg-type]
    manager.truncate(seq, kind(2))  # type: ignore[arg-type]
    assert seq.slot_mapping(kind(0), kind(2)).size == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [(0, 9), (-1, 1), (2, 1)])
def test_a_slot_mapping_reaches_over_the_room_only(bad: tuple[int, int]) -> None:
    seq = CacheManager(4, 1).begin([1, 2])
    with pytest.raises(IndexRangeError):
        seq.slot_mapping(*bad)


def test_tables_are_the_callers_own() -> None:
    manager = CacheManager(4, 1)
    seq = manager.begin([1, 2])
    seq.block_table()[:] = 99
    seq.slot_mapping(0, 2)[:] = 99
    seq.tokens[:] = 99
    assert (seq.block_table().tolist(), seq.slot_mapping(0, 2).tolist(), seq.tokens.tolist()) == ([0, 1], [0, 1], [1, 2])


def test_prompts_do_not_alias_the_callers_memory() -> None:
    manager = CacheManager(8, 1)
    rows = torch.tensor([[1, 2], [3, 4]])
    seq = manager.begin(rows[0])
    rows[:] = 7
    manager.commit(seq, [], computed=2)
    assert cached(manager, [1, 2]) == 2


def test_a_prefix_cache_that_another_manager_has_is_refused() -> None:
    prefix = RadixPrefixCache(1)
    first = CacheManager(4, 1, prefix)
    first.begin([1])
    with pytest.raises(ArgumentValueError):
        CacheManager(4, 1, prefix)


@pytest.mark.parametrize("options", [{"policy": "lfu"}, {"nonsense": 1}])
def test_options_for_a_prefix_cache_that_is_made_already_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentTypeError, match=next(iter(options))):
        CacheManager(4, 1, RadixPrefixCache(1), **options)


def test_no_priority_is_lost_on_a_fork() -> None:
    manager = CacheManager(3, 1, policy="priority")
    seq = manager.begin([1], priority=5)
    fork = manager.fork(seq)
    manager.abort(seq)
    manager.commit(fork, [], computed=1)
    manager.finish(fork)
    run(manager, [2])
    run(manager, [3])
    manager.begin([4])
    assert [cached(manager, [token]) for token in (1, 2, 3)] == [1, 0, 1]


OBSERVED: dict[str, Callable[[CacheManager, CacheSequence], object]] = {
    "begin": lambda manager, seq: manager.begin([8, 9]),
    "extend": lambda manager, seq: manager.extend(seq, 1),
    "commit": lambda manager, seq: manager.commit(seq, [], computed=2),
    "finish": lambda manager, seq: manager.finish(seq),
    "drop": lambda manager, seq: manager.finish(seq, keep=False),
    "abort": lambda manager, seq: manager.abort(seq),
    "reset": lambda manager, seq: manager.reset(),
    "truncate": lambda manager, seq: manager.truncate(seq, 0),
}


@pytest.mark.parametrize("call", OBSERVED)
@pytest.mark.parametrize("kind", [Stored, Removed, Cleared])
def test_an_observer_cannot_call_the_manager_whose_call_is_not_over(kind: type, call: str) -> None:
    """What was just stored was not locked yet, and what was evicted was nobody's: both were handed out twice."""
    manager, heard = CacheManager(4, 1), list[Exception]()
    seq = manager.begin([1, 2])

    def on(event: object) -> None:
        if isinstance(event, kind):
            with pytest.raises(UnsupportedError, match=r"got one from an observer .*Fix: note the event") as caught:
                OBSERVED[call](manager, seq)
            heard.append(caught.value)

    manager.prefix.subscribe(on)
    manager.commit(seq, [], computed=2)
    manager.check_integrity()
    manager.truncate(seq, 0)
    other = manager.begin([5, 6, 7])
    manager.check_integrity()
    manager.abort(other)
    manager.abort(seq)
    manager.reset()
    manager.check_integrity()
    assert (len(heard), manager.available_size) == (1, 4)
