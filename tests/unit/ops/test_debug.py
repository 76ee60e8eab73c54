"""`kvdock.debug`: index values are checked before the launch on every device, and equal slots are reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvdock
from opskit import SINGLE, Geometry, Memory, Target, check

G = Geometry()
pytestmark = pytest.mark.parametrize("target", SINGLE, indirect=True)


def call(memory: Memory, slots: Any) -> None:
    """Write tokens of their own to some slots of a new pool."""
    mapping = memory.index(slots)
    kvdock.ops.paged_caching_(*G.pools(memory), *G.tokens(memory, mapping.shape), mapping)


@pytest.mark.parametrize("slots", [[24], [3, -1, 24, 99], [[0, 1], [2**40, 3]]], ids=["one", "several", "batch"])
def test_a_slot_beyond_the_pool_raises_on_every_device(target: Target, memory: Memory, slots: Any) -> None:
    pools, mapping = G.pools(memory), memory.index(slots)
    tokens, before, counted = G.tokens(memory, mapping.shape), memory.copy(), target.skipped()
    with (
        kvdock.debug(),
        pytest.raises(kvdock.IndexRangeError, match=r"paged_caching_: slot_mapping\[(0|2|1, 0)\]: expected a slot below 24"),
    ):
        kvdock.ops.paged_caching_(*pools, *tokens, mapping)
    with kvdock.debug(), pytest.raises(kvdock.IndexRangeError, match=r"gather_paged: slot_mapping\["):
        kvdock.ops.gather_paged(*pools, mapping)
    before.assert_same("raised")
    assert target.skipped() == counted, "what raised was not skipped"


@pytest.mark.parametrize("lengths", [[8], [0, 1, -1, 2, 3, 4], [0, 1, 2, 3, 4, 8]], ids=str)
def test_a_length_that_does_not_fit_raises_on_every_device(target: Target, memory: Memory, lengths: list[int]) -> None:
    tensors = [memory.tensor(G.dtype, (6, 2, size, 8)) for size in (10, 10, 3, 3)]
    index, before = memory.index(lengths), memory.copy()
    with kvdock.debug(), pytest.raises(kvdock.IndexRangeError, match=r"static_update_: cache_lengths(\[\d\])?: expected between 0 and 7"):
        kvdock.ops.static_update_(*tensors, index)
    before.assert_same("raised")


@pytest.mark.parametrize(
    ("pairs", "error"),
    [([[0, 6]], kvdock.IndexRangeError), ([[0, 1], [1, 2]], kvdock.ArgumentValueError), ([[0, 1], [2, 1]], kvdock.ArgumentValueError)],
    ids=["beyond", "chained", "doubled"],
)
def test_bad_pairs_raise_on_every_device(target: Target, memory: Memory, pairs: list[list[int]], error: type[Exception]) -> None:
    pools, index = G.pools(memory), memory.index(pairs)
    before = memory.copy()
    with kvdock.debug(), pytest.raises(error, match="copy_blocks_: block_pairs"):
        kvdock.ops.copy_blocks_(*pools, index)
    before.assert_same("raised")


@pytest.mark.parametrize("slots", [[5, 7, 5], [[1, 2], [2, 1]], [9] * 20], ids=["two", "batch", "all"])
def test_equal_slots_are_reported_and_written(target: Target, memory: Memory, slots: Any) -> None:
    with (
        kvdock.debug(),
        pytest.warns(kvdock.KVDockWarning, match=r"paged_caching_: \d slots? occurs? more than once, first \d: which token wins") as caught,
    ):
        call(memory, slots)
    assert len(caught) == 1
    assert caught[0].filename == __file__, "the warning points at the caller"


def test_equal_padding_and_slots_read_twice_are_no_finding(target: Target, memory: Memory) -> None:
    with kvdock.debug():
        call(memory, [-1, 4, -1, -1, 5])
        kvdock.ops.gather_paged(*G.pools(memory), memory.index([3, 3, 3]))
        call(memory, [])


def test_equal_slots_are_not_looked_for_otherwise(target: Target, memory: Memory) -> None:
    call(memory, [5, 7, 5])
    with kvdock.debug(), kvdock.debug(False):
        call(memory, [5, 7, 5])


def test_good_calls_do_the_same_in_debug_mode(target: Target, memory: Memory) -> None:
    pools = G.pools(memory)
    with kvdock.debug():
        for slots in ([3], [9, -1, 0], list(range(20))):
            check(target, memory, "paged_caching_", *pools, *G.tokens(memory, [len(slots)]), memory.index(slots))
            check(target, memory, "gather_paged", *pools, memory.index(slots), *G.tokens(memory, [len(slots)]))
        check(target, memory, "copy_blocks_", *pools, memory.index([[0, 1], [-1, 2]]))
        for lengths in (3, torch.tensor(3), torch.tensor([0, 7, 2, 1])):
            tensors = [memory.tensor(G.dtype, (4, 2, size, 8)) for size in (10, 10, 3, 3)]
            check(target, memory, "static_update_", *tensors, lengths if isinstance(lengths, int) else memory.index(lengths.tolist()))


def test_bad_arguments_raise_before_values_are_read(target: Target, memory: Memory) -> None:
    with kvdock.debug(), pytest.raises(kvdock.ArgumentTypeError, match="slot_mapping: expected one of"):
        kvdock.ops.paged_caching_(*G.pools(memory), *G.tokens(memory, [2]), memory.index([1, 2]).float())
    with kvdock.debug(), pytest.raises(kvdock.ArgumentTypeError, match="k: expected a"):
        kvdock.ops.paged_caching_(*G.pools(memory), None, None, memory.index([1, 2]))  # type: ignore[arg-type]


def test_a_bound_op_is_checked_too(target: Target, memory: Memory) -> None:
    named = "portable" if target.name == "portable" else None
    write = target.runtime.dispatcher.op("paged_caching_").bind(*G.pools(memory), named=named)
    k, v = G.tokens(memory, [2])
    with kvdock.debug(), pytest.raises(kvdock.IndexRangeError, match=r"paged_caching_: slot_mapping\[1\]"):
        write(k, v, memory.index([0, 24]), None, None)
    with kvdock.debug(), pytest.warns(kvdock.KVDockWarning, match="1 slot"):
        write(k, v, memory.index([7, 7]), None, None)
