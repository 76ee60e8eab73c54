"""The parts of a radix tree by themselves, each against the slowest way to say the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdock.errors import ArgumentTypeError, ArgumentValueError, KVDockError
from kvdock.prefix.eviction import LRU, EvictionQueue
from kvdock.prefix.inputs import (
    as_blocks,
    as_integers,
    check_block_size,
    check_distinct,
    check_priority,
    count_of,
    index_of,
    namespace_key,
    slots_of,
)
from kvdock.prefix.labels import NARROW, WIDE, as_narrow, common_tokens, widened
from kvdock.prefix.owners import StoredBlocks
from kvdock_conformance.checking.prefix_model import slots_of as slowly

SIZES = st.sampled_from([1, 2, 3, 4, 5, 16])
BLOCKS = st.lists(st.integers(0, 40), max_size=12)


def int32(values: list[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


@given(BLOCKS, SIZES)
def test_slots_of_blocks(blocks: list[int], size: int) -> None:
    passed = int32(blocks)
    found = slots_of(passed, size)
    assert found.tolist() == slowly(blocks, size)
    assert found.dtype == np.int32
    assert not np.shares_memory(found, passed)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.uint32])
@pytest.mark.parametrize("block", [2**31, 2**32 - 1, 2**32, 2**40, -1, -(2**40)])
def test_a_wide_block_that_no_pool_has_is_named(block: int, dtype: Any) -> None:
    """Some of these become another block when they are cut to 32 bits."""
    if not np.iinfo(dtype).min <= block <= np.iinfo(dtype).max:
        return
    with pytest.raises(ArgumentValueError, match=f"the blocks: expected blocks from 0 to {2**31 - 1}, .* got block {block}"):
        as_blocks("the blocks", np.array([0, block], dtype=dtype))


def test_the_last_block_of_all_is_one() -> None:
    found = as_blocks("blocks", np.array([2**31 - 1], dtype=np.int64), 1)
    assert (found.tolist(), found.dtype) == ([2**31 - 1], np.int32)
    assert as_blocks("blocks", np.array([], dtype=np.int64)).dtype == np.int32


@pytest.mark.parametrize("values", [[1, 2], np.array([1, 2], dtype=np.int32), np.array([1, 2], dtype=">i4")])
def test_the_number_of_blocks_is_checked(values: Any) -> None:
    assert as_blocks("the blocks", values, 2).tolist() == [1, 2]
    with pytest.raises(ArgumentValueError, match=r"^the blocks: expected 3, one for each whole block of tokens, got 2. Fix: "):
        as_blocks("the blocks", values, 3)


@pytest.mark.parametrize(
    "values", [[2**63], np.array([2**63], dtype=np.uint64), [1.0], np.array([1.0]), ["a"], [True], [None], [-(2**63) - 1]]
)
def test_what_is_no_integer_of_64_bits_is_named(values: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"the ids: expected integers of at most 64 bits, got .*pass ids as int32"):
        as_integers("the ids", values)


@pytest.mark.parametrize("values", [[[1], [2, 3]], [[1, 2]], 5])
def test_what_is_not_one_dimension_is_named(values: Any) -> None:
    with pytest.raises(ArgumentValueError, match="the ids: "):
        as_integers("the ids", values)


@pytest.mark.parametrize(
    "values", [np.array([2**63 - 1], dtype=np.uint64), np.array([], dtype=np.uint64), [], (), np.array([1], dtype=np.int8)]
)
def test_what_is_an_integer_of_64_bits_passes(values: Any) -> None:
    found = as_integers("ids", values)
    assert found.tolist() == list(values)
    assert found.dtype.kind in "iu"


SUBJECTS: dict[str, Callable[[], object]] = {
    "as_blocks": lambda: as_blocks("the size", [1.5]),
    "count_of": lambda: count_of("the size", 1.5),
    "count_of, negative": lambda: count_of("the size", -1),
    "count_of, a bool": lambda: count_of("the size", True),
    "count_of, too few": lambda: count_of("the size", np.int64(2), 3),
    "check_priority": lambda: check_priority("the size", "high"),
    "namespace_key": lambda: namespace_key("the size", [1]),
    "namespace_key, a part": lambda: namespace_key("the size", (1, (1.5,))),
    "check_block_size": lambda: check_block_size("the size", 513),
    "index_of": lambda: index_of("the size", True),
}


@pytest.mark.parametrize("name", sorted(SUBJECTS))
def test_an_error_says_what_it_is_about(name: str) -> None:
    with pytest.raises(KVDockError, match=r"^the size"):
        SUBJECTS[name]()


@pytest.mark.parametrize(
    ("blocks", "text"), [([3, -1], "got block -1"), ([3, 5, 3], "got block 3 twice"), ([2**29], "got block 536870912")]
)
def test_blocks_that_are_not_distinct(blocks: list[int], text: str) -> None:
    check_distinct("slots", int32([]), 4)
    check_distinct("slots", int32([3, 0, 5]), 4)
    with pytest.raises(ArgumentValueError, match=text):
        check_distinct("slots", int32(blocks), 4)


CLAIMS = st.lists(
    st.tuples(
        BLOCKS,
        st.integers(0, 4),
        st.booleans(),
        st.sampled_from(["new", "back", "back and more", "part of it", "mixed"]),
        st.integers(0, 6),
    ),
    max_size=12,
)


@given(CLAIMS)
def test_claims_are_all_or_nothing(claims: list[tuple[list[int], int, bool, str, int]]) -> None:
    """Against a set: what is claimed twice, stored already or negative is refused, and nothing has changed then.

    Between the claims blocks are released, and mostly come back in the same order.
    """
    stored, ids, gone = StoredBlocks(16), set[int](), list[int]()
    for blocks, count, is_own, how, let_go in claims:
        fresh = {"new": blocks, "back": gone, "back and more": gone + blocks, "part of it": gone[:count], "mixed": gone[::-1] + blocks}[how]
        known = sorted(ids)[:count]
        passed = (known if is_own else [50 + place for place in range(len(known))]) + fresh
        others = [block for block, own in zip(passed, [*known, *[None] * len(fresh)], strict=True) if block != own]
        if len(set(others)) < len(others) or ids & set(others):
            with pytest.raises(ArgumentValueError, match=r"twice|stored for other tokens"):
                stored.claim("blocks", int32(passed), int32(known))
        else:
            assert stored.claim("blocks", int32(passed), int32(known)).tolist() == known + fresh
            ids |= set(fresh)
        assert stored.ids().tolist() == sorted(ids)
        if let_go and (gone := sorted(ids)[-let_go:]):
            stored.release(int32(gone))
            ids -= set(gone)
        assert stored.ids().tolist() == sorted(ids)


def test_more_runs_are_released_than_are_kept_in_mind() -> None:
    stored = StoredBlocks(16)
    stored.claim("blocks", np.arange(6000, dtype=np.int32), int32([]))
    for first in range(0, 6000, 2):
        stored.release(int32([first, first + 1]))
        assert len(stored._released) <= 1000
    assert stored.ids().size == 0
    assert stored.claim("blocks", int32([5998, 5999, 0, 1]), int32([])).tolist() == [5998, 5999, 0, 1]
    assert stored.ids().tolist() == [0, 1, 5998, 5999]


@pytest.mark.parametrize("passed", [[2, 3, 2], [2, 3, 7], [2, 3, -1], [2, 3, 2**27], [2, 9]])
def test_what_comes_back_with_something_wrong_behind_it_is_refused_and_still_released(passed: list[int]) -> None:
    stored = StoredBlocks(16)
    stored.claim("blocks", int32([2, 3, 7, 9]), int32([]))
    stored.release(int32([2, 3]))
    with pytest.raises(ArgumentValueError, match=f"got block {passed[-1]}"):
        stored.claim("blocks", int32(passed), int32([]))
    assert stored.ids().tolist() == [7, 9]
    assert stored.claim("blocks", int32([3, 2]), int32([])).tolist() == [3, 2]
    assert stored.ids().tolist() == [2, 3, 7, 9]


RUNS = ([0, 1, 2], [3, 4], [5, 6, 7, 8])


@pytest.mark.parametrize(
    ("passed", "kept", "written"),
    [
        ([0, 1, 2, 3, 4], [5], 0),
        ([3, 4, 0, 1, 2, 5, 6], [7], 0),  # the last is begun
        ([0, 1, 2, 3, 4, 20], [5], 1),
        ([0, 1, 3, 4], [], 4),  # none is as it was released
    ],
)
def test_several_runs_that_come_back_one_behind_the_other_are_compared_and_not_written(
    passed: list[int], kept: list[int], written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, wrote = StoredBlocks(16), [0]
    stored.claim("blocks", np.arange(30, dtype=np.int32), int32([]))
    for run in (*RUNS, [20]):
        stored.release(int32(run))
    write = stored._write
    monkeypatch.setattr(stored, "_write", lambda *how: (wrote.append(how[2].size), write(*how)))
    assert stored.claim("blocks", int32(passed), int32([])).tolist() == passed
    assert (sum(wrote), sorted(stored._released)) == (written, kept)
    assert stored.ids().tolist() == sorted({*range(9, 30)} - {20} | {*passed})


@pytest.mark.parametrize("passed", [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 3, 4], [3, 4, 0, 1, 2, 3], [0, 1, 2, 3, 4, 9]])
def test_runs_that_come_back_twice_or_with_something_wrong_are_refused_and_still_released(passed: list[int]) -> None:
    stored = StoredBlocks(16)
    stored.claim("blocks", np.arange(10, dtype=np.int32), int32([]))
    for run in RUNS:
        stored.release(int32(run))
    with pytest.raises(ArgumentValueError, match=r"twice|stored for other tokens"):
        stored.claim("blocks", int32(passed), int32([]))
    assert stored.ids().tolist() == [9]
    assert stored.claim("blocks", int32([0, 1, 2, 3, 4]), int32([])).tolist() == [0, 1, 2, 3, 4]
    assert stored.ids().tolist() == [0, 1, 2, 3, 4, 9]


@pytest.mark.parametrize("block", [-1, -(2**27), -(2**31), 2**27, 2**31 - 1])
def test_a_block_that_no_pool_has_is_refused_before_memory_is_taken(block: int) -> None:
    stored = StoredBlocks(16)
    with pytest.raises(ArgumentValueError, match=f"blocks from 0 to {2**27 - 1}, .*got block {block}"):
        stored.claim("blocks", int32([0, block]), int32([]))
    assert (stored.ids().size, stored._table.size) == (0, 0)


def test_blocks_are_released_and_claimed_again() -> None:
    stored = StoredBlocks(16)
    stored.claim("blocks", int32([2000, 7]), int32([]))
    stored.release(int32([7]))
    with pytest.raises(ArgumentValueError, match="block 2000, which is stored for other tokens"):
        stored.claim("blocks", int32([7, 2000]), int32([]))
    stored.claim("blocks", int32([7]), int32([]))
    assert stored.ids().tolist() == [7, 2000]
    stored.clear()
    assert stored.ids().size == 0


@given(st.lists(st.integers(0, 1), max_size=9000), st.integers(0, 9000), st.integers(0, 9), st.sampled_from([NARROW, WIDE]))
def test_common_tokens(label: list[int], differs: int, before: int, dtype: np.dtype[Any]) -> None:
    """A label that begins somewhere, and tokens that differ from it at one place or end before it does."""
    tokens = [token if at != differs else 2 for at, token in enumerate(label)]
    same = next((at for at, token in enumerate(tokens) if token != label[at]), len(label))
    stored = bytearray(np.array([9] * before + label, dtype=dtype).tobytes())
    assert common_tokens(stored, before, np.array(tokens, dtype=dtype)) == same
    assert common_tokens(stored, before, np.array(tokens[:5], dtype=dtype)) == min(same, 5)
    stored += b"grows"  # no view is left


@given(st.lists(st.integers(-(2**40), 2**40) | st.integers(-3, 3), max_size=9))
def test_what_fits_into_four_bytes(ids: list[int]) -> None:
    found = as_narrow(np.array(ids, dtype=np.int64))
    first = next((at for at, token in enumerate(ids) if not -(2**31) <= token < 2**31), len(ids))
    assert (found.tolist(), found.dtype) == (ids[:first], NARROW)
    assert np.frombuffer(widened(found.tobytes()), dtype=WIDE).tolist() == ids[:first]


@attrs.define
class Leaf:
    """A candidate."""

    number: int
    last_use: int
    uses: int = 0
    created: int = 0
    priority: int = 0
    is_queued: bool = False
    is_evictable: bool = True


@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "use", "hold", "drop"]), st.integers(0, 7)), max_size=60))
def test_the_queue_names_what_was_used_least_recently(calls: list[tuple[str, int]]) -> None:
    """Against the least of all leaves that may go, looked for one by one."""
    leaves = [Leaf(number, number % 3) for number in range(8)]
    queue: EvictionQueue[Leaf] = EvictionQueue(LRU())
    stored = set[int]()
    for time, (call, which) in enumerate(calls, 10):
        leaf = leaves[which]
        if call == "push" and leaf.is_evictable:
            queue.push(leaf)
            stored.add(which)
        elif call == "use":
            leaf.last_use = time
        elif call == "hold" and which in stored:
            leaf.is_evictable = not leaf.is_evictable
            if leaf.is_evictable:
                queue.push(leaf)
        elif call == "drop" and which in stored:
            stored.discard(which)
            leaf.is_evictable = False
            queue.discard(leaf)
        elif call == "pop" and (candidates := [leaves[number] for number in stored if leaves[number].is_evictable]):
            least = min(candidates, key=lambda leaf: (leaf.last_use, leaf.number))
            assert queue.least() is least
            if time % 2:  # else only its end went
                stored.discard(least.number)
                queue.discard(least)
                least.is_evictable = not least.is_queued
        queued = queue.items()
        assert len(queued) == len({id(item) for item in queued}), "one entry each"
        assert all(item.is_queued for item in queued)
        assert all(leaves[number] in queued for number in stored if leaves[number].is_evictable)
        if call == "drop":
            leaf.is_evictable = which not in stored and not leaf.is_queued
