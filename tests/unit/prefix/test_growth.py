"""What grows in place, what branches, and the handles to all of it."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvdock.errors import ArgumentValueError, OutOfBlocksError, StaleHandleError, UnsupportedError
from kvdock.prefix import NaivePrefixCache, PrefixHandle, RadixPrefixCache, SizeInfo
from kvdock_conformance.checking.prefix_model import Block, SlowPrefixCache
from support_prefix import blocks_of, inside, seen, tree_of


def spans(cache: RadixPrefixCache) -> list[tuple[int, int]]:
    """Where each node begins and ends, in blocks."""
    return sorted((node.start, node.end) for node in cache._tree.nodes())


def grown(cache: RadixPrefixCache, tokens: list[int], first: int = 0, behind: PrefixHandle | None = None, **options: Any) -> PrefixHandle:
    """Store tokens block by block, each behind the last; returns the end."""
    size = cache.block_size
    for at in range(0, len(tokens) - size + 1, size):
        behind = cache.insert_prefix(tokens[at : at + size], [first + at // size], behind=behind, **options).handle
    assert behind is not None
    return behind


def is_good(cache: RadixPrefixCache, handle: PrefixHandle) -> bool:
    """Whether a handle can be locked."""
    try:
        cache.lock_handle(handle)
    except StaleHandleError:
        return False
    cache.lock_handle(handle, unlock=True)
    return True


# Nodes.


def test_what_is_stored_block_by_block_is_one_node() -> None:
    cache = RadixPrefixCache(16)
    tokens = list(range(1700))
    end = grown(cache, tokens)
    assert (end.cached_len, spans(cache)) == (1696, [(0, 106)])
    assert cache.match_prefix(tokens).blocks.tolist() == list(range(106))
    cache.check_integrity()


def test_a_look_and_a_lock_in_the_middle_split_nothing() -> None:
    cache = RadixPrefixCache(1)
    grown(cache, list(range(10)))
    cache.lock_handle(cache.match_prefix([0, 1, 2]).handle)
    cache.insert_prefix([0, 1], [0, 1])
    assert spans(cache) == [(0, 10)]
    assert cache.size_info == SizeInfo(7, 3)


def test_a_branch_splits_and_its_end_joins_again() -> None:
    cache = RadixPrefixCache(1)
    end = grown(cache, [1, 2, 3, 4])
    middle = cache.match_prefix([1, 2]).handle
    branch = cache.insert_prefix([9, 9], [10, 11], behind=middle).handle
    assert spans(cache) == [(0, 2), (2, 4), (2, 4)]
    cache.check_integrity()
    assert cache.discard_prefix(branch, 0).tolist() == [10, 11]
    assert spans(cache) == [(0, 4)]
    cache.check_integrity()
    assert [is_good(cache, handle) for handle in (end, middle, branch)] == [True, True, False]
    assert cache.match_prefix([1, 2, 3, 4]).blocks.tolist() == [0, 1, 2, 3]


def test_the_first_branch_that_goes_leaves_the_other_as_one_node_of_all() -> None:
    cache = RadixPrefixCache(1)
    end = grown(cache, [1, 2, 3, 4])
    branch = cache.insert_prefix([1, 2, 9, 9], [0, 1, 10, 11]).handle
    assert cache.evict(2).tolist() == [2, 3]
    assert spans(cache) == [(0, 4)]
    assert [is_good(cache, handle) for handle in (end, branch)] == [False, True]
    assert cache.match_prefix([1, 2, 9, 9]).blocks.tolist() == [0, 1, 10, 11]
    assert cache.insert_prefix([5], [20], behind=branch).cached_len == 4
    assert spans(cache) == [(0, 5)]
    cache.check_integrity()


def test_branches_at_the_root_are_never_joined() -> None:
    cache = RadixPrefixCache(1)
    for token in range(3):
        cache.insert_prefix([token], [token])
    cache.evict(2)
    assert spans(cache) == [(0, 1)]
    cache.check_integrity()


@pytest.mark.parametrize("where", [0, 1, 3, 4])
def test_growth_behind_any_place(where: int) -> None:
    cache = RadixPrefixCache(1)
    cache.insert_prefix([1, 2, 3, 4], [0, 1, 2, 3])
    place = cache.match_prefix([1, 2, 3, 4][:where]).handle
    made = cache.insert_prefix([9, 8], [10, 11], behind=place)
    assert (made.cached_len, made.handle.cached_len, made.blocks.tolist()) == (where, where + 2, [10, 11])
    assert cache.match_prefix([*[1, 2, 3, 4][:where], 9, 8]).blocks.tolist() == [*range(where), 10, 11]
    cache.check_integrity()


# Handles.


def test_handles_live_through_splits_joins_and_growth() -> None:
    cache, tokens = RadixPrefixCache(1), list(range(8))
    grown(cache, tokens)
    handles = [cache.match_prefix(tokens[:count]).handle for count in range(9)]
    for round_ in range(3):
        branches = [cache.insert_prefix([99], [100 + at], behind=handles[at]).handle for at in (2, 5, 3, 7)]
        assert all(is_good(cache, handle) for handle in handles + branches)
        for handle in handles:
            cache.lock_handle(handle)
        assert cache.size_info == SizeInfo(4, 8 + round_)
        cache.check_integrity()
        for branch in branches[:: 1 if round_ % 2 else -1]:
            assert cache.discard_prefix(branch, branch.cached_len - 1).size == 1
            cache.check_integrity()
        assert spans(cache) == [(0, 8 + round_)]
        for handle in handles:
            cache.lock_handle(handle, unlock=True)
        handles.append(cache.insert_prefix([round_], [50 + round_], behind=handles[-1]).handle)
    assert cache.evict(4).tolist() == [7, 50, 51, 52]
    assert [is_good(cache, handle) for handle in handles] == [True] * 8 + [False] * 4


@pytest.mark.parametrize("token", [3, 4])
@pytest.mark.parametrize("how", ["evicted", "discarded"])
def test_what_was_trimmed_and_grew_again_is_another_place_whatever_its_tokens(token: int, how: str) -> None:
    cache = RadixPrefixCache(1)
    cache.insert_prefix([1, 2, 3], [0, 1, 2])
    short, long = (cache.match_prefix([1, 2, 3][:count]).handle for count in (2, 3))
    assert (cache.evict(1) if how == "evicted" else cache.discard_prefix(long, 2)).tolist() == [2]
    assert not is_good(cache, long)
    new = cache.insert_prefix([token], [2], behind=short).handle
    assert [is_good(cache, handle) for handle in (short, long, new)] == [True, False, True]
    with pytest.raises(StaleHandleError, match=r"evicted.*match the tokens again"):
        cache.insert_prefix([7], [9], behind=long)
    newest = cache.insert_prefix([7], [9], behind=new).handle
    assert cache.evict(2).tolist() == [2, 9]
    cache.insert_prefix([token, 7], [2, 9], behind=short)
    assert [is_good(cache, handle) for handle in (short, long, new, newest)] == [True, False, False, False]
    assert spans(cache) == [(0, 4)]
    cache.check_integrity()


def test_a_handle_is_stale_after_its_node_was_trimmed_split_joined_and_grown() -> None:
    cache = RadixPrefixCache(1)
    cache.insert_prefix([1, 2, 3, 4], [0, 1, 2, 3])
    handles = [cache.match_prefix([1, 2, 3, 4][:count]).handle for count in (1, 2, 3, 4)]
    cache.evict(1)
    branch = cache.insert_prefix([9], [9], behind=handles[0]).handle
    cache.discard_prefix(branch, 1)
    cache.insert_prefix([4, 5], [3, 4], behind=handles[2])
    assert [is_good(cache, handle) for handle in handles] == [True, True, True, False]
    assert cache.match_prefix([1, 2, 3, 4, 5]).blocks.tolist() == [0, 1, 2, 3, 4]


# Locks.


def test_locks_in_the_middle_hold_what_is_before_them() -> None:
    cache = RadixPrefixCache(1)
    cache.insert_prefix([1, 2, 3, 4, 5], range(5))
    two, four = (cache.match_prefix([1, 2, 3, 4][:count]).handle for count in (2, 4))
    for handle in (two, four, four):
        cache.lock_handle(handle)
    assert cache.size_info == SizeInfo(1, 4)
    with pytest.raises(OutOfBlocksError, match="at most the 1 blocks"):
        cache.evict(2)
    cache.lock_handle(four, unlock=True)
    assert cache.size_info == SizeInfo(1, 4)
    cache.lock_handle(four, unlock=True)
    assert cache.size_info == SizeInfo(3, 2)
    cache.check_integrity()
    assert sorted(cache.evict(3).tolist()) == [2, 3, 4]
    cache.lock_handle(two, unlock=True)
    assert cache.evict(2).tolist() == [0, 1]


def test_a_leaf_that_is_held_whole_grows_and_its_new_end_may_go() -> None:
    cache = RadixPrefixCache(1)
    end = cache.insert_prefix([1, 2], [0, 1]).handle
    cache.lock_handle(end)
    cache.insert_prefix([3], [2], behind=end)
    assert cache.size_info == SizeInfo(1, 2)
    assert cache.evict(1).tolist() == [2]
    cache.insert_prefix([4], [3], behind=end)
    assert cache.evict(1).tolist() == [3]
    cache.lock_handle(end, unlock=True)
    assert cache.evict(2).tolist() == [0, 1]


# Parts that were used unlike.


def test_the_part_behind_a_shorter_prompt_goes_first() -> None:
    cache = RadixPrefixCache(1)
    cache.insert_prefix([1, 2, 3, 4], [0, 1, 2, 3])
    cache.insert_prefix([7, 8], [7, 8])
    cache.match_prefix([1, 2])
    assert [cache.evict(1).tolist() for _ in range(6)] == [[3], [2], [8], [7], [1], [0]]


def test_growth_is_worth_what_it_grew_from_but_for_a_lower_priority() -> None:
    cache = RadixPrefixCache(1, "priority")
    high = cache.insert_prefix([1, 2], [0, 1], priority=5).handle
    cache.insert_prefix([3], [2], priority=3)
    cache.insert_prefix([4], [3], behind=high, priority=1)
    low = cache.insert_prefix([5], [4], behind=cache.match_prefix([1, 2, 4]).handle, priority=1).handle
    assert spans(cache) == [(0, 1), (0, 4)]
    assert cache.evict(3).tolist() == [3, 4, 2]
    assert not is_good(cache, low)
    assert cache.insert_prefix([4], [3], behind=high, priority=7).cached_len == 2
    cache.insert_prefix([3], [2], priority=6)
    assert cache.evict(1).tolist() == [2]
    cache.check_integrity()


# What comes behind what.


def test_behind_a_foreign_a_stale_or_another_namespaces_handle_is_refused() -> None:
    cache, other = RadixPrefixCache(1), RadixPrefixCache(1)
    mine = cache.insert_prefix([1], [0], ("a",)).handle
    gone = cache.insert_prefix([2], [1], ("a",)).handle
    cache.discard_prefix(gone, 0)
    before = inside(cache)
    for handle in (other.match_prefix([1]).handle, NaivePrefixCache(1).match_prefix([1]).handle, gone):
        with pytest.raises(StaleHandleError):
            cache.insert_prefix([3], [3], ("a",), behind=handle)
    for namespace in ((), ("b",), (b"a",)):
        with pytest.raises(ArgumentValueError, match=r"insert_prefix: behind: expected a handle of the namespace.*Fix: "):
            cache.insert_prefix([3], [3], namespace, behind=mine)
    assert inside(cache) == before


def test_behind_a_handle_to_nothing_is_the_beginning() -> None:
    cache = RadixPrefixCache(2)
    miss = cache.match_prefix([1, 2], ("a",)).handle
    made = cache.insert_prefix([1, 2, 3], [4], ("a",), behind=miss)
    assert (made.cached_len, made.handle.cached_len, made.blocks.tolist()) == (0, 2, [4])
    assert cache.insert_prefix([1, 2, 5, 6], [9, 5], ("a",), behind=miss).blocks.tolist() == [4, 5]
    with pytest.raises(ArgumentValueError, match="behind"):
        cache.insert_prefix([1, 2], [7], behind=miss)


def test_nothing_behind_a_handle_is_that_place() -> None:
    cache = RadixPrefixCache(2)
    place = cache.insert_prefix([1, 2, 3, 4], [0, 1]).handle
    for tokens in ([], [9]):
        made = cache.insert_prefix(tokens, [], behind=place)
        assert (made.cached_len, made.handle.cached_len, made.blocks.tolist(), made.indices.tolist()) == (4, 4, [], [])
        assert is_good(cache, made.handle)


def test_wide_token_ids_behind_narrow_ones() -> None:
    cache = RadixPrefixCache(2)
    narrow = cache.insert_prefix([1, 2, 3, 4], [0, 1]).handle
    middle = cache.match_prefix([1, 2]).handle
    made = cache.insert_prefix([3, 4, 5, 2**40], [8, 9], behind=middle)
    assert (made.cached_len, made.blocks.tolist()) == (4, [1, 9])
    assert cache.insert_prefix([7, -(2**35)], [3], behind=made.handle).cached_len == 6
    assert cache.match_prefix([1, 2, 3, 4, 5, 2**40, 7, -(2**35)]).blocks.tolist() == [0, 1, 9, 3]
    assert cache.match_prefix([1, 2, 3, 4, 5, 0]).blocks.tolist() == [0, 1]
    assert is_good(cache, narrow)
    cache.check_integrity()


def test_a_refused_insertion_behind_a_handle_changes_nothing() -> None:
    cache = RadixPrefixCache(1)
    place = cache.insert_prefix([1, 2], [0, 1]).handle
    before = inside(cache)
    for tokens, blocks in (([3], [0]), ([3, 4], [5, 5]), ([2**40], [1]), ([3], [-1]), ([3], [2**31]), ([3], [])):
        with pytest.raises(ArgumentValueError, match="insert_prefix: blocks"):
            cache.insert_prefix(tokens, blocks, behind=place)
        assert inside(cache) == before


# Blocks that begin alike.


def test_a_block_that_begins_alike() -> None:
    cache = RadixPrefixCache(4)
    cache.insert_prefix([0, 0, 0, 0, 1, 2, 3, 4], [0, 1])
    middle = cache.match_prefix([0, 0, 0, 0]).handle
    before = seen(cache)
    assert cache.match_partial(middle, [1]) is None
    assert cache.match_partial(middle, [1, 9, 3, 4]) is None
    for tokens, count in (([1, 2], 2), ([1, 2, 3], 3), ([1, 2, 3, 4], 3), ([1, 2, 9, 4, 5], 2), ([1, 2, 2**40], 2)):
        found = cache.match_partial(middle, tokens)
        assert found is not None
        assert (found.block, found.num_tokens, found.handle.cached_len) == (1, count, 8)
        assert is_good(cache, found.handle)
    assert seen(cache) == before


def test_of_several_blocks_that_begin_alike_the_one_that_does_so_longest() -> None:
    cache = RadixPrefixCache(4)
    for number, tokens in enumerate(([1, 2, 0, 0], [1, 2, 3, 0], [1, 0, 3, 4])):
        cache.insert_prefix(tokens, [number], ("a",))
    root = cache.match_prefix([], ("a",)).handle
    found = cache.match_partial(root, np.array([1, 2, 3, 4]))
    assert found is not None
    assert (found.block, found.num_tokens) == (1, 3)
    assert cache.match_partial(root, [2**40, 2, 3, 4]) is None
    assert cache.match_partial(cache.match_prefix([]).handle, [1, 2, 3, 4]) is None
    cache.discard_prefix(found.handle, 0)
    with pytest.raises(StaleHandleError):
        cache.match_partial(found.handle, [1, 2])
    assert NaivePrefixCache(4).match_partial(root, [1, 2, 3]) is None


# All of it, at random.


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "priority"])
@pytest.mark.parametrize("seed", range(6))
def test_random_calls_against_the_slow_cache(policy: str, seed: int) -> None:
    choose, size = random.Random(seed), 1 + seed % 3  # noqa: S311 - no secret
    cache, model, free = RadixPrefixCache(size, policy), SlowPrefixCache(size, policy), list(range(400))
    held: list[tuple[PrefixHandle, list[Block]]] = [(cache.match_prefix([]).handle, [])]
    model.record([], 0)
    for _ in range(150):
        tokens = [choose.randrange(2) for _ in range(choose.randrange(12 * size))]
        place, path = choose.choice(held)
        is_gone = any(not block.is_stored for block in path)
        assert is_good(cache, place) != is_gone
        kind = choose.choice(["match", "insert", "insert", "behind", "behind", "lock", "unlock", "evict", "discard"])
        if kind == "match":
            found = model.find(tokens, ())
            model.record(found, len(tokens))
            held.append((cache.match_prefix(tokens).handle, found))
        elif kind in ("insert", "behind") and not (is_gone and kind == "behind"):
            before = path if kind == "behind" else []
            blocks, priority = [free.pop() for _ in range(len(tokens) // size)], choose.randrange(2)
            made = cache.insert_prefix(tokens, blocks, behind=place if kind == "behind" else None, priority=priority)
            whole = [token for block in before for token in block.tokens] + tokens
            _, found = model.insert(whole, [*(block.number for block in before), *blocks], (), priority)
            assert made.blocks.tolist() == [block.number for block in found[len(before) :]]
            free += [block for block in blocks if block not in made.blocks]
            held.append((made.handle, found))
        elif kind in ("lock", "unlock") and not is_gone and (kind == "lock" or place.locks):  # type: ignore[attr-defined]
            cache.lock_handle(place, unlock=kind == "unlock")
            for block in path[-1:]:
                block.locks += 1 if kind == "lock" else -1
        elif kind == "evict" or (kind == "discard" and not is_gone):
            keep, evictable = choose.randrange(4), model.size_info().evictable_size // size
            count = choose.randrange(evictable + 1) if len(free) > 100 else evictable
            expected = model.evict(count) if kind == "evict" else model.discard(path, keep)
            gone = cache.evict(count) if kind == "evict" else cache.discard_prefix(place, keep)
            assert sorted(gone.tolist()) == sorted(expected or [])
            free += gone.tolist()
        assert tree_of(cache) == blocks_of(model)
        assert (cache.size_info, cache.stats) == (model.size_info(), model.stats())
        cache.check_integrity()


# Slots.


@pytest.mark.parametrize("size", [1, 2, 16])
def test_indices_are_the_slots_of_the_blocks(size: int) -> None:
    cache = RadixPrefixCache(size)
    made = cache.insert_prefix(range(3 * size), [5, 0, 2])
    slots = [block * size + at for block in (5, 0, 2) for at in range(size)]
    found = cache.match_prefix(range(3 * size + size // 2))
    for one in (made, found):
        assert (one.indices.dtype, one.indices.tolist()) == (np.int32, slots)
        one.indices[:] = 99
        assert one.indices.tolist() == slots
    behind = cache.insert_prefix(range(size), [7], behind=found.handle)
    assert behind.indices.tolist() == slots[:0] + list(range(7 * size, 8 * size))
    assert cache.match_prefix([-5]).indices.dtype == np.int32
    if size == 1:
        assert found.indices.tolist() == found.blocks.tolist()


# Copies.


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps, lambda one: copy.deepcopy([{"deep": one}])])
@pytest.mark.parametrize("make", [RadixPrefixCache, NaivePrefixCache])
def test_caches_and_handles_refuse_to_be_copied(make: Callable[..., Any], how: Callable[[Any], Any]) -> None:
    cache = make(1)
    made = cache.insert_prefix([1, 2], [0, 1])
    found = cache.match_prefix([1, 2])
    for one, fix in ((cache, "make a new one"), (found.handle, "match the tokens again")):
        with pytest.raises(UnsupportedError, match=rf"{type(one).__name__}.*copy or pickle.*Fix: {fix}"):
            how(one)
    if how is not copy.copy:
        for pair in (found, made):
            with pytest.raises(UnsupportedError):
                how(pair)
    cache.check_integrity()


def test_a_part_keeps_its_priority_though_the_policy_does_not_look_at_it() -> None:
    """What grows behind it later is compared with that priority: of a lower one, it is a part that is as old as itself."""
    cache = RadixPrefixCache(1, "fifo")
    first = cache.insert_prefix([1], [0]).handle
    cache.lock_handle(first)
    cache.insert_prefix([2], [1], behind=first)
    cache.insert_prefix([], [], behind=first, priority=1)  # raises the first block only
    both = cache.insert_prefix([2], [1], behind=first).handle
    assert cache.discard_prefix(both, 0).tolist() == [1]
    cache.insert_prefix([9], [2])
    cache.insert_prefix([3], [3], behind=first)  # lower than what it follows: newer than the other leaf
    cache.lock_handle(first, unlock=True)
    assert [cache.evict(1).tolist() for _ in range(3)] == [[2], [3], [0]]
    cache.check_integrity()
