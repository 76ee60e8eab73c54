"""The parts of a radix tree by themselves, each against the slowest way to say the same."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdock.errors import ArgumentValueError
from kvdock.prefix.eviction import LRU, EvictionQueue
from kvdock.prefix.inputs import blocks_of, check_distinct
from kvdock.prefix.labels import common_blocks, token_data, tokens_of
from kvdock.prefix.owners import StoredBlocks
from support_prefix import slots_of

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
