"""The step of a batch: many sequences in one call, as if each had been called by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdock.errors import IndexRangeError, OutOfBlocksError
from kvdock.prefix import InsertResult, Namespace, PrefixHandle, RadixPrefixCache
from kvdock.scheduler import CacheManager, CacheSequence
from kvdock.scheduler import ids as token_ids
from support_prefix_calls import cached, run
from support_slow import examples

CALL = st.tuples(
    st.sampled_from(["extend", "commit", "commit one", "fork", "truncate"]),
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.lists(st.integers(0, 3), min_size=4, max_size=4),
)


class Player:
    """Makes calls on many sequences, in one call or one by one."""

    def __init__(self, block_size: int, prefix: str, *, is_batched: bool) -> None:
        with patch.object(token_ids, "_CHUNK", 4):
            self.manager = CacheManager(400, block_size, prefix)
        self.is_batched = is_batched
        self.sequences = [self.manager.begin(ids) for ids in ([1], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [2, 2])]

    def play(self, what: str, which: list[int], numbers: list[int]) -> None:
        some = [self.sequences[at] for at in dict.fromkeys(at % len(self.sequences) for at in which)]
        numbers = numbers[: len(some)]
        if what == "extend":
            self.extend(some, numbers)
        elif what.startswith("commit"):
            new = [[number % 2] * (1 if what == "commit one" else number) for number in numbers]
            computed = [min(seq.num_tokens, seq.num_known + len(ids)) for seq, ids in zip(some, new, strict=True)]
            if self.is_batched:
                self.manager.commit(some, np.array(new)[:, 0] if what == "commit one" else new, computed=computed)
            else:
                for seq, ids, upto in zip(some, new, computed, strict=True):
                    self.manager.commit(seq, ids, computed=upto)
        elif what == "fork" and len(self.sequences) < 8:
            self.sequences.append(self.manager.fork(some[0]))
        elif what == "truncate":
            self.manager.truncate(some[0], some[0].num_tokens * numbers[0] // 3)

    def extend(self, some: list[CacheSequence], n: list[int]) -> None:
        starts, out = [seq.num_tokens for seq in some], np.full(sum(n), -9, dtype=np.int64)
        if self.is_batched:
            self.manager.extend(some, n, slots=out)
        else:
            out = np.concatenate([self.manager.extend(seq, count)[0] for seq, count in zip(some, n, strict=True)])
        wanted = [seq.slot_mapping(start, start + count) for seq, start, count in zip(some, starts, n, strict=True)]
        assert out.tolist() == np.concatenate(wanted).tolist()

    def state(self) -> list[object]:
        """All that can be seen, with blocks numbered as they first come."""
        self.manager.check_integrity()
        rows, numbers = self.manager._rows, dict[int, int]()
        prefix = self.manager.prefix
        clock = prefix._tree.clock if isinstance(prefix, RadixPrefixCache) else 0
        found: list[object] = [self.manager.allocator.num_free, prefix.size_info, prefix.stats, clock]
        for seq in self.sequences:
            table = [numbers.setdefault(block, len(numbers)) for block in seq.block_table().tolist()]
            found.append(
                (
                    table,
                    seq.tokens.tolist(),
                    [int(getattr(rows, name)[seq._row]) for name in rows._INTEGERS if name not in ("version", "replaced")],
                )
            )
        return found


@settings(max_examples=examples(150), deadline=None)
@given(block_size=st.sampled_from([1, 2, 3]), prefix=st.sampled_from(["radix", "radix", "naive"]), calls=st.lists(CALL, max_size=14))
def test_calls_on_a_batch_are_calls_on_each(block_size: int, prefix: str, calls: list[Any]) -> None:
    batched, single = (Player(block_size, prefix, is_batched=is_batched) for is_batched in (True, False))
    for call in calls:
        batched.play(*call)
        single.play(*call)
        assert batched.state() == single.state()


def two(block_size: int = 2, num_blocks: int = 16) -> tuple[CacheManager, list[CacheSequence]]:
    manager = CacheManager(num_blocks, block_size)
    return manager, [manager.begin([1, 2, 3]), manager.begin([4, 5])]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_slots_are_written_into_the_callers_array(dtype: Any) -> None:
    manager, (one, two_) = two()
    both = np.full(8, -7, dtype=dtype)
    assert manager.extend([one, two_], [2, 3], slots=both[1:6]).shape == (0, 2)
    assert both.tolist() == [-7, *one.slot_mapping(3, 5).tolist(), *two_.slot_mapping(2, 5).tolist(), -7, -7]
    tensor = torch.full((2,), -7, dtype=torch.int64 if dtype is np.int64 else torch.int32)
    manager.extend([two_, one], 1, slots=tensor.numpy())
    assert tensor.tolist() == [*two_.slot_mapping(5, 6).tolist(), *one.slot_mapping(5, 6).tolist()]


def test_a_batch_grows_in_all_or_in_none() -> None:
    manager, (one, two_) = two(num_blocks=5)
    fork, out = manager.fork(one), np.full(9, -7, dtype=np.int32)
    versions = [seq.table_version for seq in (one, two_, fork)]
    with pytest.raises(OutOfBlocksError, match=r"at most 2 blocks.*got a request for 5"):
        manager.extend([one, fork, two_], [3, 4, 2], slots=out)
    assert [seq.num_tokens for seq in (one, two_, fork)] == [3, 2, 3]
    assert ([seq.table_version for seq in (one, two_, fork)], set(out.tolist())) == (versions, {-7})
    manager.check_integrity()


TOKENS: dict[str, tuple[Any, list[list[int]]]] = {
    "one each": (np.array([7, 8]), [[7], [8]]),
    "a list": ([7, 8], [[7], [8]]),
    "a tensor": (torch.tensor([7, 8]), [[7], [8]]),
    "rows": (np.array([[7, 8], [9, 10]]), [[7, 8], [9, 10]]),
    "rows of a tensor": (torch.tensor([[7, 8], [9, 10]], dtype=torch.int32), [[7, 8], [9, 10]]),
    "rows of none": (np.zeros((2, 0), dtype=np.int64), [[], []]),
    "ragged lists": ([[7, 8, 9, 10, 11], []], [[7, 8, 9, 10, 11], []]),
    "arrays of several types": ([np.array([7], np.uint64), np.array([8, 9], np.int32)], [[7], [8, 9]]),
    "none": ([], [[], []]),
    "lists of none": ([[], []], [[], []]),
    "wide": ([2**62 + 1, -(2**40)], [[2**62 + 1], [-(2**40)]]),
    "wide and ragged": ([[1, 2**62 + 1, 3], [2**33]], [[1, 2**62 + 1, 3], [2**33]]),
}


@pytest.mark.parametrize("kind", TOKENS)
def test_ids_of_a_batch_come_in_many_forms(kind: str) -> None:
    manager, (one, two_) = two()
    tokens, (first, second) = TOKENS[kind]
    manager.extend([one, two_], 6)
    manager.commit([one, two_], tokens, computed=[3 + len(first), 2 + len(second)])
    assert (one.tokens.tolist(), two_.tokens.tolist()) == ([1, 2, 3, *first], [4, 5, *second])
    assert (one.num_known, one.computed) == (3 + len(first), 3 + len(first))
    assert cached(manager, [1, 2, 3, *first]) == (3 + len(first)) // 2 * 2
    manager.commit([two_, one], [2**50, 3], computed=[two_.num_known, one.num_known])
    assert (one.tokens.tolist(), two_.tokens.tolist()) == ([1, 2, 3, *first, 3], [4, 5, *second, 2**50])


def test_ids_may_run_ahead_of_the_room_and_of_what_is_computed() -> None:
    manager, (one, two_) = two()
    manager.commit([one, two_], [[7, 8, 9], [6]], computed=[3, 2])
    assert ((one.num_known, one.num_tokens, one.computed), two_.num_known) == ((6, 3, 3), 3)
    with pytest.raises(IndexRangeError, match=r"computed of sequence 1: expected 2 \(as before\) to 2 \(ids known: 3, room: 2\), got 3"):
        manager.commit([one, two_], [], computed=[3, 3])
    manager.extend(one, 3)
    manager.commit(one, [], computed=6)
    assert cached(manager, [1, 2, 3, 7, 8, 9]) == 6


@pytest.mark.parametrize("wide", [None, 5, 127, 128, 300], ids=lambda at: f"wide at {at}")
@pytest.mark.parametrize("block_size", [1, 3, 16, 200])
def test_ids_of_long_sequences_are_all_known(block_size: int, wide: int | None) -> None:
    """However they come, and wherever they are cut; a wide one makes those of others wide too."""
    ids = [at % 50 if at != wide else 2**40 for at in range(400)]
    manager = CacheManager(4000 // block_size + 8, block_size)
    many, single = manager.begin(ids[:130]), manager.begin(ids[:2])
    manager.extend([many, single], [270, 398])
    for at in range(2, 400):
        manager.commit([single], [ids[at]], computed=[at + 1])
    manager.commit(many, ids[130:], computed=400)
    assert many.tokens.tolist() == single.tokens.tolist() == ids
    assert many.block_table().tolist()[: 400 // block_size] == single.block_table().tolist()[: 400 // block_size]
    for cut in (399, 300, 256, 255, 129, 128, 127, 1, 0):
        manager.truncate(many, cut)
        assert many.tokens.tolist() == ids[:cut]
        manager.extend(many, 1)
        manager.commit(many, [7], computed=cut + 1)
        assert many.tokens.tolist() == [*ids[:cut], 7]
        assert manager.fork(many, 0).tokens.tolist() == [*ids[:cut], 7]
        manager.check_integrity()


def test_nothing_is_done_to_no_sequences_and_for_no_tokens() -> None:
    manager, (one, two_) = two()
    versions, free = [one.table_version, two_.table_version], manager.allocator.num_free
    assert manager.extend([], 3).shape == manager.extend([], []).shape == (0, 2)
    assert manager.extend([], 1, slots=np.zeros(0, dtype=np.int32)).shape == (0, 2)
    manager.commit([], [], computed=[])
    fork = manager.fork(one)
    assert manager.extend([one, two_, fork], 0).shape == (0, 2), "no copy, though the block is shared"
    slots, pairs = manager.extend(one, 0)
    assert (slots.shape, pairs.shape, slots.dtype, pairs.dtype) == ((0,), (0, 2), np.int64, np.int64)
    manager.commit(one, [], computed=0)
    assert ([one.table_version, two_.table_version], manager.allocator.num_free) == (versions, free)


def versions_of(manager: CacheManager) -> dict[str, tuple[Callable[[], object], bool]]:
    """Calls on ``manager`` by name, and whether each changes the blocks of the first sequence."""
    one, two_ = manager._rows.open()[:2]
    return {
        "room in the last block": (lambda: manager.extend(one, 1), False),
        "another block": (lambda: manager.extend([two_, one], [0, 1]), True),
        "no room": (lambda: manager.extend(one, 0), False),
        "ids": (lambda: manager.commit(one, [7, 8], computed=1), False),
        "published": (lambda: manager.commit(one, [], computed=4), False),
        "another's": (lambda: manager.extend(two_, 9), False),
        "cut by a block of one": (lambda: manager.truncate(one, 4), True),
        "cut by nothing": (lambda: manager.truncate(one, 4), False),
        "cut within a block": (lambda: manager.truncate(one, 3), False),
        "cut by a block": (lambda: manager.truncate(one, 2), True),
        "cut in what is shared": (lambda: manager.truncate(one, 1), False),
        "copied": (lambda: manager.extend(one, 1), True),
    }


def test_the_version_changes_exactly_when_blocks_do_and_is_nobody_elses() -> None:
    manager, (one, two_) = two()
    fork, other = manager.fork(one, 2), manager.fork(one, 0)
    for name, (call, changes) in versions_of(manager).items():
        before, table = one.table_version, one.block_table().tolist()
        call()
        assert (one.table_version != before) == (one.block_table().tolist() != table) == changes, name
        assert len({seq.table_version for seq in (one, two_, fork, other)}) == 4, name
    old = {seq.table_version for seq in (one, two_, fork, other)}
    manager.abort(one)
    assert manager.begin([9]).table_version not in old, "a row that is used again has another"


def test_the_version_of_a_fork_stays_where_its_block_only_becomes_cached() -> None:
    manager = CacheManager(8, 2)
    seq = manager.begin([1, 2, 3])
    fork = manager.fork(seq)
    before = fork.table_version, fork.block_table().tolist()
    manager.commit(seq, [], computed=3)
    assert (fork.table_version, fork.block_table().tolist()) == before
    twin = manager.begin([5])
    manager.abort(twin)


def test_the_version_changes_where_a_cached_block_takes_the_place_of_an_equal_one() -> None:
    manager = CacheManager(8, 2)
    one, two_ = manager.begin([1, 2, 3]), manager.begin([1, 2, 3])
    fork = manager.fork(two_)
    manager.commit(one, [], computed=3)
    before = two_.table_version, fork.table_version
    manager.commit(two_, [], computed=3)
    assert two_.table_version != before[0]
    assert fork.table_version != before[1]
    assert fork.block_table()[0] == two_.block_table()[0] == one.block_table()[0]
    manager.check_integrity()


class Forgetful(RadixPrefixCache):
    """Stores at most so many blocks of each insertion, as one that is full might."""

    def __init__(self, block_size: int, most: int) -> None:
        super().__init__(block_size)
        self.most = most

    def insert_prefix(
        self, tokens: Any, blocks: Any, namespace: Namespace = (), *, behind: PrefixHandle | None = None, priority: int = 0
    ) -> InsertResult:
        part = slice(self.most * self.block_size)
        return super().insert_prefix(tokens[part], blocks[: self.most], namespace, behind=behind, priority=priority)


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_prefix_cache_that_stores_only_a_part_keeps_working(most: int) -> None:
    manager = CacheManager(24, 2, Forgetful(2, most))
    for _ in range(3):
        seq = manager.begin(range(9))
        fork = manager.fork(seq)
        manager.commit([seq, fork], [], computed=[9, 9])
        manager.check_integrity()
        assert seq.slot_mapping(0, 9).size == 9
        manager.extend([seq, fork], 3)
        manager.commit([seq, fork], [[5, 6, 7], [5, 6, 8]], computed=[12, 12])
        manager.check_integrity()
        manager.truncate(fork, 3)
        manager.extend(fork, 1)
        manager.check_integrity()
        manager.finish(seq)
        manager.finish(fork, keep=False)
        manager.check_integrity()
    assert cached(manager, range(9)) >= 2 * min(most, 1)
    assert manager.available_size == 48


@pytest.mark.parametrize("block_size", [1, 512])
@pytest.mark.parametrize("prefix", ["radix", "naive"])
def test_the_smallest_and_the_largest_blocks(block_size: int, prefix: str) -> None:
    manager = CacheManager(8, block_size, prefix)
    prompt = np.arange(2 * block_size + 1)
    run(manager, prompt.tolist())
    seq = manager.begin(prompt)
    assert seq.cached_len == (2 * block_size if prefix == "radix" else 0)
    slots, pairs = manager.extend(seq, block_size)
    manager.commit(seq, prompt[:block_size], computed=3 * block_size)
    assert (slots.size, pairs.size, seq.block_table().size) == (block_size, 0, -(-(3 * block_size + 1) // block_size))
    manager.truncate(seq, 0)
    manager.check_integrity()
    assert (seq.num_tokens, seq.tokens.size, seq.block_table().size, manager.available_size) == (0, 0, 0, 8 * block_size)
    manager.extend(seq, 1)
    manager.commit(seq, [7], computed=1)
    manager.finish(seq, keep=False)
    manager.check_integrity()
