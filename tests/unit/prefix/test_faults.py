"""Faults that have shipped in public prefix caches, one test each; see also the state machine beside this."""

from __future__ import annotations

import copy
import gc
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvdock.errors import ArgumentValueError, IntegrityError, OutOfBlocksError, StaleHandleError, UnsupportedError
from kvdock.prefix import EvictionPolicy, RadixPrefixCache, SizeInfo, Usage
from kvdock.prefix.marks import Mark
from kvdock_conformance.checking.containers import CONTAINERS, overwrite
from support_isolated import answer
from support_prefix import inside, seen


def filled(*prompts: list[int], block_size: int = 1, **options: Any) -> RadixPrefixCache:
    """A cache with prompts in blocks 0, 1, 2, ..."""
    cache, number = RadixPrefixCache(block_size, **options), 0
    for prompt in prompts:
        count = len(prompt) // block_size
        cache.insert_prefix(prompt, range(number, number + count))
        number += count
    return cache


# Handles and locks.


def test_the_matched_node_itself_is_locked_not_its_parent_and_not_the_root() -> None:
    cache = RadixPrefixCache(1)
    cache.insert_prefix([1, 2], [0, 1])
    cache.insert_prefix([1, 2, 3], [0, 1, 2])
    found = cache.match_prefix([1, 2, 3, 4])
    assert found.handle.cached_len == 3
    cache.lock_handle(found.handle)
    assert cache.size_info == SizeInfo(0, 3)
    with pytest.raises(OutOfBlocksError):
        cache.evict(1)
    cache.lock_handle(found.handle, unlock=True)
    assert cache.size_info == SizeInfo(3, 0)


def test_locking_a_handle_that_was_evicted_raises_and_no_count_goes_negative() -> None:
    cache = filled([1, 2])
    handle = cache.match_prefix([1, 2]).handle
    cache.evict(1)
    before = inside(cache)
    for unlock in (False, True):
        with pytest.raises(StaleHandleError, match="evicted"):
            cache.lock_handle(handle, unlock=unlock)
    assert inside(cache) == before


def test_a_second_unlock_raises_though_another_handle_holds_the_same_place() -> None:
    cache = filled([1])
    one, other = cache.match_prefix([1]).handle, cache.match_prefix([1]).handle
    cache.lock_handle(one)
    cache.lock_handle(other)
    cache.lock_handle(one, unlock=True)
    before = inside(cache)
    with pytest.raises(StaleHandleError, match="unlock once per lock"):
        cache.lock_handle(one, unlock=True)
    assert inside(cache) == before
    assert cache.size_info == SizeInfo(0, 1)


def test_a_handle_to_a_miss_can_be_locked_and_protects_nothing() -> None:
    cache = filled([1])
    found = cache.match_prefix([2])
    assert found.blocks.size == found.handle.cached_len == 0
    cache.lock_handle(found.handle)
    assert (cache.num_locks, cache.size_info) == (1, SizeInfo(1, 0))
    cache.lock_handle(found.handle, unlock=True)
    with pytest.raises(StaleHandleError):
        cache.lock_handle(found.handle, unlock=True)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_lock_in_the_middle_holds_what_is_before_it_and_no_more(block_size: int) -> None:
    prompt = list(range(4 * block_size))
    cache = filled(prompt, block_size=block_size)
    whole = cache.match_prefix(prompt).handle
    cache.lock_handle(whole)
    half = cache.match_prefix(prompt[: 2 * block_size]).handle
    assert cache.size_info == SizeInfo(0, 4 * block_size)
    cache.lock_handle(half)
    cache.lock_handle(whole, unlock=True)
    assert cache.size_info == SizeInfo(2 * block_size, 2 * block_size)
    assert cache.evict(2).tolist() == [2, 3]
    cache.lock_handle(half, unlock=True)
    cache.check_integrity()
    with pytest.raises(StaleHandleError):
        cache.lock_handle(whole)


def test_the_part_behind_a_shorter_prompt_keeps_its_last_use_and_number_of_uses() -> None:
    for policy in ("lru", "lfu", "fifo"):
        cache = filled([1, 2], [7, 8], policy=policy)
        for _ in range(2):
            cache.match_prefix([1, 2])
        cache.insert_prefix([1, 5], [0, 9])  # a split; now the first block was used once more
        order = [int(cache.evict(1)[0]) for _ in range(5)]
        assert order == {"lru": [3, 2, 1, 9, 0], "lfu": [3, 2, 9, 1, 0], "fifo": [1, 3, 2, 9, 0]}[policy]


def test_a_split_is_found_by_the_right_keys_at_once() -> None:
    cache = filled([1, 2, 3, 4])
    for length in (3, 1, 2):
        cache.insert_prefix([*[1, 2, 3, 4][:length], 9], [*range(length), 9 + length])
        cache.check_integrity()
    assert cache.match_prefix([1, 2, 3, 4]).blocks.tolist() == [0, 1, 2, 3]
    assert cache.match_prefix([1, 2, 9]).blocks.tolist() == [0, 1, 11]
    assert cache.match_prefix([2, 3, 4]).blocks.tolist() == []


@pytest.mark.parametrize("how", ["evicted", "trimmed", "discarded", "reset"])
def test_a_handle_is_stale_once_its_end_is_gone_even_if_the_same_tokens_come_back(how: str) -> None:
    cache = filled([1, 2])
    handle = cache.match_prefix([1, 2]).handle
    if how == "reset":
        assert cache.reset().tolist() == [0, 1]
    elif how == "discarded":
        assert cache.discard_prefix(handle, 0).tolist() == [0, 1]
    else:
        cache.evict(2 if how == "evicted" else 1)
    cache.insert_prefix([1, 2], [0, 5])
    with pytest.raises(StaleHandleError):
        cache.lock_handle(handle)
    cache.check_integrity()


def test_unlocking_after_a_reset_is_an_error_and_counts_stay_right() -> None:
    cache = filled([1, 2])
    handle = cache.match_prefix([1, 2]).handle
    cache.lock_handle(handle)
    cache.reset()
    cache.insert_prefix([1, 2], [0, 1])
    with pytest.raises(StaleHandleError, match="reset"):
        cache.lock_handle(handle, unlock=True)
    assert (cache.num_locks, cache.size_info) == (0, SizeInfo(2, 0))
    cache.check_integrity()


# Sizes.


def test_shared_blocks_are_counted_once() -> None:
    cache = RadixPrefixCache(1)
    cache.insert_prefix([1, 2, 3], [0, 1, 2])
    cache.insert_prefix([1, 2, 4], [0, 1, 3])
    handles = [cache.match_prefix([1, 2, last]).handle for last in (3, 4)]
    for handle in handles:
        cache.lock_handle(handle)
    assert cache.size_info == SizeInfo(0, 4)
    cache.lock_handle(handles[0], unlock=True)
    assert cache.size_info == SizeInfo(1, 3)
    cache.lock_handle(handles[1], unlock=True)
    assert cache.size_info == SizeInfo(4, 0)


@pytest.mark.parametrize("length", [0, 1, 15])
def test_what_is_shorter_than_a_block_is_neither_stored_nor_found(length: int) -> None:
    cache = RadixPrefixCache(16)
    made = cache.insert_prefix([5] * length, [])
    assert (made.cached_len, made.handle.cached_len, made.blocks.tolist()) == (0, 0, [])
    assert cache.match_prefix([5] * length).handle.cached_len == 0
    assert cache.size_info.total_size == 0
    cache.lock_handle(made.handle)
    cache.check_integrity()


@pytest.mark.parametrize("rest", [1, 15])
def test_a_rest_shorter_than_a_block_is_ignored(rest: int) -> None:
    cache = RadixPrefixCache(16)
    made = cache.insert_prefix([5] * (16 + rest), [3])
    assert made.handle.cached_len == made.indices.size == cache.size_info.total_size == 16
    assert cache.match_prefix([5] * (16 + rest)).handle.cached_len == 16
    assert cache.stats.lookup_tokens == 16 + rest


# Eviction.


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
def test_evict_returns_exactly_the_blocks_asked_for(block_size: int) -> None:
    for count in range(5):
        cache = filled(list(range(4 * block_size)), block_size=block_size)
        assert cache.evict(count).tolist() == list(range(4 - count, 4))
        assert cache.size_info.total_size == (4 - count) * block_size


@pytest.mark.parametrize("options", [["-O"], pytest.param([], marks=pytest.mark.slow)])
def test_evicting_too_much_is_the_documented_error_and_evicts_nothing_even_without_assertions(options: list[str]) -> None:
    code = """if True:
        import json
        from kvdock.errors import KVDockError
        from kvdock.prefix import RadixPrefixCache
        cache = RadixPrefixCache(1)
        cache.insert_prefix([1, 2], [0, 1])
        handle = cache.match_prefix([1, 2]).handle
        cache.evict(1)
        found = []
        other = cache.match_prefix([1]).handle
        for call in (lambda: cache.evict(2), lambda: cache.lock_handle(handle), lambda: cache.lock_handle(other, True),
                     lambda: cache.insert_prefix([1], [-1]), lambda: cache.insert_prefix([3], [0]), lambda: cache.match_prefix([1.0])):
            try:
                found.append(repr(call()))
            except KVDockError as error:
                found.append(type(error).__name__)
        cache._tree.stored += 1
        try:
            found.append(repr(cache.check_integrity()))
        except KVDockError as error:
            found.append(type(error).__name__)
        print(json.dumps([found, cache.stored_blocks().tolist()]))
    """
    errors = ["OutOfBlocksError", "StaleHandleError", "StaleHandleError", "ArgumentValueError", "ArgumentValueError", "ArgumentTypeError"]
    assert answer(code, options=options) == [[*errors, "IntegrityError"], [0]]


def test_evicted_blocks_are_not_found_and_may_be_stored_for_other_tokens() -> None:
    cache = filled([1, 2, 3])
    assert cache.evict(2).tolist() == [1, 2]
    assert cache.match_prefix([1, 2, 3]).blocks.tolist() == [0]
    assert cache.insert_prefix([8, 9], [1, 2]).blocks.tolist() == [1, 2]


def test_matching_evicts_nothing_and_what_is_matched_and_locked_stays() -> None:
    cache = filled([1, 2], [3, 4])
    found = cache.match_prefix([1, 2])
    cache.lock_handle(found.handle)
    assert cache.evict(2).tolist() == [2, 3]
    assert cache.match_prefix([1, 2]).blocks.tolist() == found.blocks.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("policy", "order"),
    [("lru", [2, 1, 3, 0]), ("lfu", [2, 3, 1, 0]), ("fifo", [0, 1, 2, 3]), ("priority", [2, 3, 0, 1])],
)
def test_each_policy_by_hand(policy: str, order: list[int]) -> None:
    cache = RadixPrefixCache(1, policy)
    for token, priority in ((10, 1), (11, 2), (12, 0), (13, 0)):
        cache.insert_prefix([token], [token - 10], priority=priority)
    for token in (10, 10, 11, 11, 11, 13, 10):
        cache.match_prefix([token])
    assert [int(cache.evict(1)[0]) for _ in range(4)] == order


def test_of_equal_tokens_the_highest_priority_counts_and_its_prefix_has_it_too() -> None:
    cache = RadixPrefixCache(1, "priority")
    cache.insert_prefix([1, 2], [0, 1], priority=0)
    cache.insert_prefix([5], [2], priority=3)
    cache.insert_prefix([1], [0], priority=7)
    cache.insert_prefix([1], [0], priority=1)
    assert [int(cache.evict(1)[0]) for _ in range(3)] == [1, 2, 0]


class FirstCome(EvictionPolicy):
    """One's own: what came first; of that, what was used least."""

    name = "first come"

    def key(self, usage: Usage) -> tuple[int, int]:
        return usage.created, usage.uses


def test_a_policy_of_ones_own() -> None:
    cache = filled([1], [2], policy=FirstCome())
    cache.match_prefix([1])
    assert cache.policy.name == "first come"
    assert cache.evict(1).tolist() == [0]


def test_looking_without_recording_changes_neither_order_nor_statistics() -> None:
    cache = filled([1], [2])
    before = inside(cache)
    found = cache.match_prefix([1], record=False)
    assert inside(cache) == before
    cache.record_match(found.handle, 1)
    assert cache.evict(1).tolist() == [1]
    assert (cache.stats.lookups, cache.stats.hit_rate) == (1, 1.0)


def test_statistics_by_hand() -> None:
    cache = filled([1, 2, 3, 4], block_size=2)
    assert cache.stats.hit_rate == cache.stats.mean_age == 0.0
    cache.match_prefix([1, 2, 3])  # 2 of 3
    cache.match_prefix([9])  # 0 of 1
    cache.match_prefix([], ("empty",))
    stats = cache.stats
    assert (stats.lookups, stats.lookup_tokens, stats.hit_tokens, stats.hit_rate) == (3, 4, 2, 0.5)
    cache.evict(1)  # inserted at 1, now 4
    cache.evict(1)  # matched at 2
    stats = cache.stats
    assert (stats.inserted_tokens, stats.evicted_tokens, stats.evictions, stats.age_sum, stats.age_max) == (4, 4, 2, 5, 3)
    assert stats.mean_age == 2.5


# Canonical blocks, owners.


def test_insert_says_what_is_canonical_so_that_no_table_points_at_a_freed_duplicate() -> None:
    cache = filled([1, 2])
    made = cache.insert_prefix([1, 2, 3], [10, 11, 12])
    assert (made.cached_len, made.blocks.tolist()) == (2, [0, 1, 12])
    assert cache.stored_blocks().tolist() == [0, 1, 12]
    assert cache.insert_prefix([7, 8], [10, 11]).blocks.tolist() == [10, 11], "the duplicates are the caller's"


def test_canonical_blocks_are_those_of_the_insertion_however_late_they_are_read() -> None:
    cache = filled([1, 2])
    made = cache.insert_prefix([1, 2, 3], [10, 11, 12])
    cache.reset()
    cache.insert_prefix([1, 2, 3], [5, 6, 7])
    assert made.indices.tolist() == [0, 1, 12]


@pytest.mark.parametrize("blocks", [[1, 0], [0, 1], [0, 2], [2, 3], [0, 0]])
def test_a_block_that_other_tokens_own_is_refused(blocks: list[int]) -> None:
    cache = filled([1, 2], [3])
    before = seen(cache)
    with pytest.raises(ArgumentValueError, match="block"):
        cache.insert_prefix([1, 9], blocks)
    assert seen(cache) == before


def test_two_insertions_of_the_same_new_blocks_cannot_both_have_them() -> None:
    cache = RadixPrefixCache(1)
    cache.insert_prefix([1], [0])
    with pytest.raises(ArgumentValueError, match="stored for other tokens"):
        cache.insert_prefix([1], [0], ("other",))
    cache.evict(1)
    assert cache.insert_prefix([1], [0], ("other",)).cached_len == 0


# Memory.


@pytest.mark.parametrize("how", sorted(CONTAINERS))
def test_what_is_stored_never_aliases_the_callers_memory(how: str) -> None:
    cache = RadixPrefixCache(2)
    tokens, blocks = CONTAINERS[how]([1, 2, 3, 4]), CONTAINERS[how]([3, 1])
    cache.insert_prefix(tokens, blocks)
    overwrite(tokens)
    overwrite(blocks)
    assert cache.match_prefix([1, 2, 3, 4]).blocks.tolist() == [3, 1]
    cache.check_integrity()


@pytest.mark.parametrize("block_size", [1, 16])
def test_nothing_that_is_stored_pins_more_than_itself(block_size: int) -> None:
    cache = RadixPrefixCache(block_size)
    rows = torch.arange(4 * 64 * block_size).reshape(4, -1)
    blocks = torch.arange(4 * 80, dtype=torch.int32).reshape(4, -1)
    for row, ids in zip(rows, blocks, strict=True):
        cache.insert_prefix(row, ids[:64])
        cache.insert_prefix(torch.cat((row[: 3 * block_size], row[:block_size])), torch.cat((ids[:3], ids[64:65])))
    assert sum(1 for _ in cache._tree.nodes()) == 12
    for node in cache._tree.nodes():
        assert node.room.base is None
        assert node.room.size == len(node.blocks)
        assert len(node.label) == 4 * block_size * len(node.blocks)


def test_a_trimmed_run_pins_at_most_as_much_again() -> None:
    cache = filled(list(range(64)))
    for _ in range(63):
        cache.evict(1)
        (node,) = cache._tree.nodes()
        assert node.room.base is None
        assert node.room.size <= 2 * len(node.blocks)
        assert len(node.label) <= 2 * 4 * len(node.blocks)


def test_what_is_returned_is_the_callers_own() -> None:
    cache = filled([1, 2, 3])
    for found in (cache.match_prefix([1, 2, 3]).blocks, cache.insert_prefix([1, 2, 3], [0, 1, 2]).blocks, cache.stored_blocks()):
        found[:] = 99
    cache.check_integrity()
    assert cache.evict(3).tolist() == [0, 1, 2]


# Names of namespaces.

SPACES: list[tuple[Any, ...]] = [
    (),
    (1,),
    (True,),
    ("1",),
    (b"1",),
    ("",),
    (None,),
    ((),),
    ((1,),),
    (1, 1),
    ("a", "b"),
    ("ab",),
    ("a|b",),
    (0,),
    (False,),
]


def test_no_two_namespaces_share_a_block() -> None:
    cache = RadixPrefixCache(1)
    for number, space in enumerate(SPACES):
        assert cache.insert_prefix([1, 2], [2 * number, 2 * number + 1], space).cached_len == 0
    for number, space in enumerate(SPACES):
        assert cache.match_prefix([1, 2], space).blocks.tolist() == [2 * number, 2 * number + 1]
    assert cache.evict(2 * len(SPACES)).size == 2 * len(SPACES)
    assert not cache._tree.roots, "nothing is left of a namespace without blocks"


# Tokens of any width.


@pytest.mark.parametrize("twins", [(0, 2**32), (-1, 2**32 - 1), (5, 2**63 - 1), (-(2**63), 0), (7, 7 + 2**40)])
def test_tokens_that_are_equal_in_their_lower_half_are_not_taken_for_one_another(twins: tuple[int, int]) -> None:
    for first, second in (twins, twins[::-1]):
        cache = filled([first, 1, 2])
        assert cache.match_prefix([second, 1, 2]).blocks.size == 0
        cache.insert_prefix([second, 1, 2], [10, 11, 12])
        assert cache.match_prefix([first, 1, 2]).blocks.tolist() == [0, 1, 2]
        assert cache.match_prefix([second, 1, 2]).blocks.tolist() == [10, 11, 12]
        cache.check_integrity()


# Depth.


def chain(length: int) -> RadixPrefixCache:
    """Nodes one behind the other, of one block each, since something branches off behind each."""
    cache = RadixPrefixCache(1)
    handle = None
    for number in range(length):
        cache.insert_prefix([1], [2 * number + 1], behind=handle)
        handle = cache.insert_prefix([0], [2 * number], behind=handle).handle
    return cache


def test_chains_of_2_000_nodes_need_no_recursion() -> None:
    length = 2_000
    limit, tokens = sys.getrecursionlimit(), np.zeros(length, dtype=np.int32)
    cache = chain(length)
    assert sum(1 for _ in cache._tree.nodes()) == 2 * length
    with pytest.raises(UnsupportedError, match=r"RadixPrefixCache.*Fix: make a new one"):
        copy.deepcopy(cache)
    sys.setrecursionlimit(200)
    try:
        found = cache.match_prefix(tokens)
        assert found.handle.cached_len == length
        cache.lock_handle(found.handle)
        assert cache.size_info == SizeInfo(length, length)
        cache.check_integrity()
        cache.lock_handle(found.handle, unlock=True)
        cache.insert_prefix([2**40], [2 * length])
        cache.check_integrity()
        assert cache.evict(length).size == length
        cache.check_integrity()
        assert cache.reset().size == length + 1
        del found, cache
        gc.collect()
    finally:
        sys.setrecursionlimit(limit)


def test_a_chain_of_nodes_is_dropped_without_recursion() -> None:
    cache = chain(2_000)
    del cache
    gc.collect()


# Ranks.

CALLS = """if True:
    import json, random, sys
    from kvdock.prefix import RadixPrefixCache
    told = []
    cache = RadixPrefixCache(2, sys.argv[1])
    cache.subscribe(lambda event: told.append(repr(event)))
    order, choose, free = [], random.Random(3), list(range(60))
    for _ in range(400):
        space = choose.choice([(), ("a",), ("b", 1), (b"c", None)])
        tokens = [choose.randrange(3) for _ in range(2 * choose.randrange(6))]
        count = len(tokens) // 2
        if len(free) < count:
            gone = cache.evict(count).tolist()
            order.append(gone)
            free += gone
        blocks = [free.pop(0) for _ in range(count)]
        made = cache.insert_prefix(tokens, blocks, space)
        stored = set(cache.stored_blocks().tolist())
        free += [block for block in blocks if block not in stored]
        order.append(made.blocks.tolist())
        cache.match_prefix(tokens[:choose.randrange(12)], space)
    print(json.dumps([order, told, repr(cache.stats)]))
"""


@pytest.mark.parametrize("policy", ["lru", *(pytest.param(policy, marks=pytest.mark.slow) for policy in ("lfu", "fifo", "priority"))])
def test_ranks_decide_alike_whatever_the_seed_of_hashes(
    policy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = "777" if os.environ.get("PYTHONHASHSEED") != "777" else "1"
    other = answer(CALLS, policy, env={**os.environ, "PYTHONHASHSEED": seed})
    monkeypatch.setattr(sys, "argv", ["", policy])
    exec(CALLS, {})  # noqa: S102 - the same script, with this process's own seed
    own = json.loads(capsys.readouterr().out)
    assert json.dumps(own) == json.dumps(other)
    assert any(len(one) > 0 for one in own[0])


# Integrity.


def none() -> Any:
    """No blocks."""
    return np.empty(0, dtype=np.int32)


BROKEN: dict[str, Callable[[RadixPrefixCache, Any], object]] = {
    "held": lambda cache, node: setattr(node, "held", 0),
    "held children": lambda cache, node: setattr(node.parent, "held_children", 0),
    "a lock that nobody counts": lambda cache, node: node.locks.update({node.end: 2}),
    "a lock at a place of another": lambda cache, node: node.locks.update({node.start: 1}),
    "no lock": lambda cache, node: node.locks.clear(),
    "a block in two nodes": lambda cache, node: node.room.__setitem__(0, 5),
    "a label that is short": lambda cache, node: node.label.__delitem__(slice(4)),
    "a label of other tokens": lambda cache, node: node.label.__setitem__(0, 9),
    "blocks behind the end": lambda cache, node: setattr(node, "end", node.end + 1),
    "no parent": lambda cache, node: setattr(node, "parent", None),
    "a wrong key": lambda cache, node: setattr(node, "key", b"1234"),
    "a block that nobody owns": lambda cache, node: cache._owned.release(np.array([0], dtype=np.int32)),
    "a stray block": lambda cache, node: cache._owned.claim("blocks", np.array([49], dtype=np.int32), none()),
    "stored": lambda cache, node: setattr(cache._tree, "stored", 1),
    "protected": lambda cache, node: setattr(cache._tree, "protected", 1),
    "locks that are not counted": lambda cache, node: setattr(cache, "_num_locks", 0),
    "not queued": lambda cache, node: setattr(node, "is_queued", False),
    "not stored": lambda cache, node: setattr(node, "is_stored", False),
    "gone into another": lambda cache, node: setattr(node, "into", node.parent),
    "a use after its parent's": lambda cache, node: setattr(node, "last_use", 99),
    "a part that ends where it begins": lambda cache, node: setattr(node, "earlier", [Mark(node.start, node)]),
    "a part that ends where the node does": lambda cache, node: setattr(node, "earlier", [Mark(node.end, node)]),
    "parts out of order": lambda cache, node: setattr(node, "earlier", [Mark(at, node) for at in (node.start + 2, node.start + 1)]),
    "an inner node without a branch": lambda cache, node: [node.parent.children.pop(key) for key in list(node.parent.children)[:1]],
    "a root without children": lambda cache, node: cache._tree.root(((1, int),), (1,)),
    "a queue that lost it": lambda cache, node: cache._tree.queue.clear(),
}


@pytest.mark.parametrize("fault", sorted(BROKEN))
def test_check_integrity_notices(fault: str) -> None:
    cache = filled([1, 2, 3, 4, 5, 6])
    cache.insert_prefix([1, 2, 9], [0, 1, 9])
    cache.insert_prefix([7, 8], [6, 7])
    cache.lock_handle(cache.match_prefix([1, 2, 3, 4]).handle)
    cache.check_integrity()
    leaf = next(node for node in cache._tree.nodes() if (node.start, node.end) == (2, 6))
    BROKEN[fault](cache, leaf)
    with pytest.raises(IntegrityError):
        cache.check_integrity()
