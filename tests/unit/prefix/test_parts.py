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
    as_integers,
    block_count,
    blocks_of,
    check_block_size,
    check_distinct,
    check_priority,
    check_start,
    count_of,
    index_of,
    namespace_key,
)
from kvdock.prefix.labels import common_blocks, token_data, tokens_of
from kvdock.prefix.owners import StoredBlocks
from kvdock_conformance.checking.prefix_model import slots_of

SIZES = st.sampled_from([1, 2, 3, 4, 5, 16])
BLOCKS = st.lists(st.integers(0, 40), max_size=12)


def int32(values: list[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


@given(BLOCKS, SIZES, st.sampled_from([np.int32, np.int64, np.uint16]))
def test_blocks_of_slots(blocks: list[int], size: int, dtype: Any) -> None:
    found = blocks_of("slots", np.array(slots_of(blocks, size), dtype=dtype), size)
    assert found.tolist() == blocks
    assert found.dtype == np.int32


@given(BLOCKS.filter(len), SIZES.filter(lambda size: size > 1), st.data())
def test_one_slot_out_of_its_place_is_named(blocks: list[int], size: int, data: st.DataObject) -> None:
    slots = slots_of(blocks, size)
    at = data.draw(st.integers(0, len(slots) - 1))
    wrong = data.draw(st.integers(0, 41 * size).filter(lambda slot: slot != slots[at]))
    places = [*slots[:at], wrong, *slots[at + 1 :]]
    first = at - at % size
    base = places[first] - places[first] % size  # a first slot says which block it is; the others follow from it
    wanted = next(place for place in range(first, first + size) if places[place] != base + place - first)
    with pytest.raises(ArgumentValueError) as caught:
        blocks_of("slots", int32(places), size)
    assert f"expected slot {base + wanted - first} at position {wanted}, got {places[wanted]}" in str(caught.value)


@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize("block", [2**31, 2**32, 2**40, -1, -(2**40)])
def test_a_wide_slot_that_no_pool_has_is_named(block: int, size: int) -> None:
    """Some of these become the slot of another block when they are cut to 32 bits."""
    with pytest.raises(ArgumentValueError, match=f"the slots: expected slots from 0 to {2**31 - 1}, got slot {block * size}"):
        blocks_of("the slots", np.array(slots_of([0, block], size), dtype=np.int64), size)


def test_the_last_slot_of_all_is_one() -> None:
    last = (2**31 - 1) // 16
    assert blocks_of("slots", np.array(slots_of([last], 16), dtype=np.int64), 16).tolist() == [last]
    assert blocks_of("slots", np.array([], dtype=np.int64), 16).dtype == np.int32


@pytest.mark.parametrize(
    "values", [[2**63], np.array([2**63], dtype=np.uint64), [1.0], np.array([1.0]), ["a"], [True], [None], [-(2**63) - 1]]
)
def test_what_is_no_integer_of_64_bits_is_named(values: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"the ids: expected integers of at most 64 bits, got .*pass token ids or slots as int32"):
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
    "block_count": lambda: block_count("the size", -1, 16),
    "count_of": lambda: count_of("the size", 1.5),
    "check_start": lambda: check_start("the size", 17, 16),
    "check_start, negative": lambda: check_start("the size", -16, 16),
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


@pytest.mark.parametrize(("blocks", "text"), [([3, -1], "got slot -4"), ([3, 5, 3], "got slot 12 twice")])
def test_blocks_that_are_not_distinct(blocks: list[int], text: str) -> None:
    check_distinct("slots", int32([]), 4)
    check_distinct("slots", int32([3, 0, 5]), 4)
    with pytest.raises(ArgumentValueError, match=text):
        check_distinct("slots", int32(blocks), 4)


@given(st.lists(st.tuples(BLOCKS, st.integers(0, 4), st.booleans()), max_size=8))
def test_claims_are_all_or_nothing(claims: list[tuple[list[int], int, bool]]) -> None:
    """Against a set: what is claimed twice, stored already or negative is refused, and nothing has changed then."""
    stored, ids = StoredBlocks(16), set[int]()
    for blocks, count, is_own in claims:
        known = sorted(ids)[:count]
        passed = (known if is_own else [50 + place for place in range(len(known))]) + blocks
        others = [block for block, own in zip(passed, [*known, *[None] * len(blocks)], strict=True) if block != own]
        if len(set(others)) < len(others) or ids & set(others):
            with pytest.raises(ArgumentValueError):
                stored.claim("slots", int32(passed), int32(known))
        else:
            assert stored.claim("slots", int32(passed), int32(known)) == (passed[: len(known)] == known)
            ids |= set(blocks)
        assert stored.ids().tolist() == sorted(ids)


@pytest.mark.parametrize(("block", "text"), [(-1, "got slot -16"), (-(2**27), f"got slot {-(2**31)}")])
def test_a_negative_block_is_refused(block: int, text: str) -> None:
    stored = StoredBlocks(16)
    with pytest.raises(ArgumentValueError, match=text):
        stored.claim("slots", int32([0, block]), int32([]))
    assert stored.ids().size == 0


def test_blocks_are_released_and_claimed_again() -> None:
    stored = StoredBlocks(16)
    assert stored.claim("slots", int32([2000, 7]), int32([]))
    stored.release(int32([7]))
    with pytest.raises(ArgumentValueError, match="slot 32000 of block 2000, which is stored"):
        stored.claim("slots", int32([7, 2000]), int32([]))
    assert stored.claim("slots", int32([7]), int32([]))
    assert stored.ids().tolist() == [7, 2000]
    stored.clear()
    assert stored.ids().size == 0


@given(st.lists(st.integers(0, 1), max_size=9000), st.integers(0, 9000), st.integers(0, 9), st.sampled_from([4, 8]))
def test_common_blocks(label: list[int], differs: int, before: int, width: int) -> None:
    """A label of many blocks, and tokens that differ from it at one place or end before it does."""
    label = label + [0] * (-len(label) % 4)
    tokens = [token if at != differs else 2 for at, token in enumerate(label)]
    same = next((at for at, token in enumerate(tokens) if token != label[at]), len(label))
    data = token_data(np.array([9] * 4 * before + tokens, dtype=np.int64), width)
    assert data is not None
    stored = np.array(label, dtype={4: np.int32, 8: np.int64}[width]).tobytes()
    assert common_blocks(stored, data, 4 * before * width, 4 * width) == same // 4
    assert tokens_of(stored, width).tolist() == label


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
def test_the_queue_pops_what_was_used_least_recently(calls: list[tuple[str, int]]) -> None:
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
            assert queue.pop() is least
            stored.discard(least.number)
        queued = queue.items()
        assert len(queued) == len({id(item) for item in queued}), "one entry each"
        assert all(item.is_queued for item in queued)
        assert all(leaves[number] in queued for number in stored if leaves[number].is_evictable)
        if call == "drop":
            leaf.is_evictable = which not in stored and not leaf.is_queued
