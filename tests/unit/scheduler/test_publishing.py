"""Who published what: ``finish(keep=False)`` takes back exactly what a sequence published itself and nobody else uses."""

from __future__ import annotations

from typing import Any

import pytest

from kvdock.scheduler import CacheManager, CacheSequence
from support_prefix_calls import cached, run

PROMPT = list(range(8))


def published(manager: CacheManager, ids: list[int], **how: Any) -> CacheSequence:
    """A sequence, all of it computed."""
    seq = manager.begin(ids, **how)
    manager.commit(seq, [], computed=len(ids))
    return seq


def grow(manager: CacheManager, seq: CacheSequence, ids: list[int]) -> None:
    manager.extend(seq, len(ids))
    manager.commit(seq, ids, computed=seq.num_tokens)


def drop(manager: CacheManager, seq: CacheSequence) -> None:
    manager.finish(seq, keep=False)
    manager.check_integrity()


def test_a_fork_from_before_a_commit_leaves_what_the_other_kept() -> None:
    manager = CacheManager(16, 4)
    seq = manager.begin(PROMPT)
    fork = manager.fork(seq)
    manager.commit(seq, [], computed=8)
    manager.commit(fork, [], computed=8)
    manager.finish(seq)
    drop(manager, fork)
    assert cached(manager, PROMPT) == 8


def test_a_fork_from_before_a_commit_takes_back_nothing_of_the_other_that_still_runs() -> None:
    manager = CacheManager(16, 4)
    seq = manager.begin(PROMPT)
    fork = manager.fork(seq)
    manager.commit([seq, fork], [], computed=[8, 8])
    drop(manager, seq)
    assert cached(manager, PROMPT) == 8, "the fork uses it"
    drop(manager, fork)
    assert cached(manager, PROMPT) == 8, "and it is not the fork's to take back"


@pytest.mark.parametrize("cut", [7, 5, 4, 1, 0])
def test_a_sequence_cut_into_a_block_that_it_found_leaves_it(cut: int) -> None:
    manager = CacheManager(16, 4)
    run(manager, PROMPT)
    seq = manager.begin([*PROMPT, 8])
    manager.truncate(seq, cut)
    grow(manager, seq, [50, 51, 52, 53, 54])
    assert cached(manager, [*PROMPT[:cut], 50, 51, 52, 53, 54]) >= 4
    drop(manager, seq)
    assert cached(manager, PROMPT) == 8
    assert manager.prefix.size_info.total_size == 8, "what it published itself is gone"


@pytest.mark.parametrize("then", [[], [50], [50, 51, 52, 53, 54, 55, 56, 57, 58]])
@pytest.mark.parametrize("ahead", [[], [9, 9]])
@pytest.mark.parametrize("cut", [8, 7, 5, 4, 3, 0])
def test_what_was_published_and_then_truncated_goes(cut: int, ahead: list[int], then: list[int]) -> None:
    """Also where other ids are known already of the places that were cut, and where it is copied and written anew."""
    manager = CacheManager(16, 4)
    seq = published(manager, PROMPT)
    manager.truncate(seq, cut)
    manager.commit(seq, ahead, computed=cut)
    if then:
        grow(manager, seq, then)
    assert cached(manager, PROMPT) == 8
    drop(manager, seq)
    assert (cached(manager, PROMPT), manager.prefix.size_info.total_size, manager.available_size) == (0, 0, 64)


def test_what_is_drafted_again_and_again_goes() -> None:
    manager = CacheManager(64, 2)
    run(manager, [0, 1])
    seq = manager.begin([0, 1, 2])
    for step in range(6):
        grow(manager, seq, [100 + step, 101, 102, 103, 104])
        manager.truncate(seq, seq.num_tokens - 3)
    assert manager.prefix.size_info.total_size > 20
    drop(manager, seq)
    assert manager.prefix.size_info.total_size == 2


def test_only_what_it_brought_goes_and_nothing_else() -> None:
    manager = CacheManager(8, 1)
    run(manager, [1, 2])
    run(manager, [1, 2, 3, 4], keep=False)
    assert cached(manager, [1, 2, 3, 4]) == 2


def test_what_others_published_stays_also_between() -> None:
    """Two that brought parts in turn: each part is whose it was first, and what is behind another's stays with it."""
    manager = CacheManager(12, 1)
    one, two = manager.begin([1, 2, 3]), manager.begin([1, 2, 3])
    for seq, upto in ((one, 1), (two, 2), (one, 3)):
        manager.commit(seq, [], computed=upto)
    manager.finish(two)
    drop(manager, one)
    assert cached(manager, [1, 2, 3]) == 2, "the second was brought, and kept, by the other; the first is before it"


def test_what_another_has_come_to_use_stays() -> None:
    manager = CacheManager(16, 2)
    seq = published(manager, PROMPT)
    other = manager.begin([*PROMPT[:4], 90])
    drop(manager, seq)
    assert cached(manager, PROMPT) == 4
    drop(manager, other)
    assert cached(manager, PROMPT) == 4, "it did not publish them"


def test_what_is_pinned_or_has_something_behind_it_stays() -> None:
    manager = CacheManager(16, 2)
    seq = published(manager, PROMPT)
    pin = manager.pin(PROMPT[:4])
    drop(manager, seq)
    assert cached(manager, PROMPT) == 4
    pin.release()
    seq = published(manager, [50, 51, 52, 53, 54, 55])
    run(manager, [50, 51, 52, 53, 60, 61])
    drop(manager, seq)
    assert (cached(manager, [50, 51, 52, 53, 54, 55]), cached(manager, [50, 51, 52, 53, 60, 61])) == (4, 6)


def test_blocks_that_were_evicted_and_published_by_another_are_the_others() -> None:
    manager = CacheManager(4, 2)
    seq = published(manager, [1, 2, 3, 4])
    manager.truncate(seq, 2)
    manager.finish(manager.begin(range(10, 16)))
    assert cached(manager, [1, 2, 3, 4]) == 2
    run(manager, [1, 2, 3, 4])
    drop(manager, seq)
    assert cached(manager, [1, 2, 3, 4]) == 4


def test_a_fork_that_is_not_kept_takes_its_own_only() -> None:
    manager = CacheManager(8, 1)
    seq = published(manager, [1, 2])
    fork = manager.fork(seq)
    grow(manager, fork, [3])
    manager.finish(seq)
    drop(manager, fork)
    assert cached(manager, [1, 2, 3]) == 2


def test_it_takes_back_in_its_own_namespace() -> None:
    manager = CacheManager(16, 2)
    run(manager, PROMPT)
    drop(manager, published(manager, PROMPT, namespace=("a",)))
    assert (cached(manager, PROMPT), cached(manager, PROMPT, ("a",))) == (8, 0)


@pytest.mark.parametrize("prefix", ["radix", "naive"])
def test_blocks_come_back_free(prefix: str) -> None:
    manager = CacheManager(8, 2, prefix)
    seq = published(manager, PROMPT)
    fork = manager.fork(seq)
    grow(manager, fork, [70, 71, 72])
    drop(manager, seq)
    drop(manager, fork)
    assert manager.allocator.num_free == 8 - (4 if prefix == "radix" else 0), "what the fork still used when the first ended stays"
