"""`copy_blocks_`: whole blocks of K and V, inside one pool."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvdock
from opskit import SINGLE, Geometry, Memory, Target, check

G = Geometry()

PAIRS = {
    "one": [[0, 5]],
    "several": [[5, 0], [2, 1]],
    "one source for many": [[4, 0], [4, 1], [4, 2], [4, 3], [4, 5]],
    "first and last": [[0, 5], [1, 4]],
    "padding": [[-1, -1]],
    "some padding": [[-1, 3], [2, 3], [0, -1], [-7, -9], [4, 1]],
    "padding beside ids beyond": [[-1, 99], [99, -1], [2, 3]],
    "the smallest ints": [[-(2**31), 0], [1, -(2**31)], [2, 3]],
}
BEYOND = {"source": [[6, 0]], "destination": [[0, 6]], "both": [[7, 8]], "one of several": [[0, 1], [2, 3], [2, 2**31 - 1], [4, 5]]}


@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_pairs(target: Target, memory: Memory, pairs: list[list[int]], dtype: torch.dtype) -> None:
    assert check(target, memory, "copy_blocks_", *G.pools(memory), memory.index(pairs, dtype)) == []


@pytest.mark.parametrize("pairs", BEYOND.values(), ids=BEYOND)
def test_a_block_beyond_the_pool(target: Target, memory: Memory, pairs: list[list[int]]) -> None:
    assert len(check(target, memory, "copy_blocks_", *G.pools(memory), memory.index(pairs))) == 1


@pytest.mark.parametrize("bad", [2**40, 2**63 - 1])
def test_a_block_far_beyond_the_pool(target: Target, memory: Memory, bad: int) -> None:
    pairs = memory.index([[0, 1], [bad, 2], [3, bad], [-1, bad]])
    assert check(target, memory, "copy_blocks_", *G.pools(memory), pairs) == [(1,), (2,)]


def test_strided_pairs(target: Target, memory: Memory) -> None:
    check(target, memory, "copy_blocks_", *G.pools(memory), memory.index([[0, 1], [9, 9], [2, 3], [9, 9]])[::2])
    check(target, memory, "copy_blocks_", *G.pools(memory), memory.index([[0, 3, 9], [1, 4, 9]])[:, :2])


def test_blocks_of_unlike_sizes(target: Target, memory: Memory) -> None:
    """K and V may differ in heads, dim, and here also in how many places a block has."""
    k_cache = Geometry(block=3, hk=3, dk=5).pools(memory)[0]
    v_cache = Geometry(block=7, hv=1, dv=46).pools(memory)[1]
    check(target, memory, "copy_blocks_", k_cache, v_cache, memory.index([[0, 5], [3, 2]]))


FORMS = {
    "lists": [[0, 5], [3, 2]],
    "tuples": ((0, 5), (3, 2)),
    "int64 array": np.array([[0, 5], [3, 2]]),
    "int32 array": np.array([[0, 5], [3, 2]], dtype=np.int32),
    "transposed array": np.array([[0, 3], [5, 2]]).T,
    "every other row of an array": np.array([[0, 5], [9, 9], [3, 2]])[::2],
    "read-only array": np.broadcast_to(np.array([[0, 5], [3, 2]]), (2, 2)),
    "pairs of numpy integers": [(np.int64(0), np.int64(5)), (np.int32(3), np.int32(2))],
}


@pytest.mark.parametrize("pairs", FORMS.values(), ids=FORMS)
def test_pairs_come_in_many_forms(target: Target, memory: Memory, pairs: Any) -> None:
    pools = G.pools(memory)
    check(target, memory, "copy_blocks_", *pools, pairs)


NONE = {"list": [], "tuple": (), "array": np.zeros((0, 2), dtype=np.int64), "tensor": torch.zeros((0, 2), dtype=torch.int64)}


@pytest.mark.parametrize("pairs", NONE.values(), ids=NONE)
def test_no_pairs_change_nothing(target: Target, memory: Memory, pairs: Any) -> None:
    pools, before = G.pools(memory), memory.copy()
    kvdock.ops.copy_blocks_(*pools, pairs)
    with torch.device("meta"):
        kvdock.ops.copy_blocks_(*pools, pairs)
    before.assert_same("copy_blocks_")


DEPENDENT = {
    "doubled destination": ([[0, 5], [1, 4], [2, 5]], 2, "destination 5 twice", "drop the doubled pair"),
    "the same pair twice": ([[0, 5], [0, 5]], 1, "destination 5 twice", "drop the doubled pair"),
    "chained": ([[0, 1], [1, 2]], 0, "destination 1 also as a source", "split chained copies into two calls"),
    "chained backwards": ([[1, 2], [0, 1]], 1, "destination 1 also as a source", "split chained copies into two calls"),
    "swapped": ([[0, 1], [1, 0]], 0, "destination 1 also as a source", "split chained copies into two calls"),
    "onto itself": ([[3, 3]], 0, "destination 3 also as a source", "split chained copies into two calls"),
}


@pytest.mark.parametrize(("pairs", "row", "got", "fix"), DEPENDENT.values(), ids=DEPENDENT)
def test_pairs_whose_order_matters(target: Target, memory: Memory, pairs: list[list[int]], row: int, got: str, fix: str) -> None:
    """An error wherever the host can read the pairs: as lists always, as tensors where they lie in host memory."""
    pools, before = G.pools(memory), memory.copy()
    index = torch.tensor(pairs)
    for form in [index, *([pairs, np.array(pairs)] if target.host_reads(index) else [])]:
        if target.host_reads(form if isinstance(form, torch.Tensor) else index):
            with pytest.raises(kvdock.ArgumentValueError) as caught:
                kvdock.ops.copy_blocks_(*pools, form)
            text = str(caught.value)
            assert text.startswith(f"copy_blocks_: block_pairs[{row}]: expected destinations that occur once and are no source, ")
            assert f"got {got}. Fix: {fix}" in text
    before.assert_same("raised")


def test_padding_does_not_make_pairs_dependent(target: Target, memory: Memory) -> None:
    check(target, memory, "copy_blocks_", *G.pools(memory), memory.index([[1, -1], [0, 1], [-1, 1], [-1, 2], [0, 2], [2, -1]]))


def test_a_pool_without_blocks_takes_padding_only(target: Target, memory: Memory) -> None:
    pools = Geometry(num_blocks=0).pools(memory)
    check(target, memory, "copy_blocks_", *pools, memory.index([[-1, -1], [-1, 4]]))
    assert len(check(target, memory, "copy_blocks_", *pools, memory.index([[0, 0]]))) == 1


@pytest.mark.parametrize("target", SINGLE, indirect=True)
def test_more_pairs_than_a_grid_has_rows(target: Target, memory: Memory) -> None:
    g = Geometry(num_blocks=140_000, block=1, hk=1, dk=4, hv=1, dv=1)
    k_cache, v_cache = g.pools(memory)
    pairs = memory.index(torch.stack([torch.arange(0, 140_000, 2), torch.arange(1, 140_000, 2)], 1).tolist())
    after = memory.copy()
    for cache in (after.twin(k_cache), after.twin(v_cache)):
        bits = cache.view(torch.int16)
        bits[1::2] = bits[::2]
    kvdock.ops.copy_blocks_(k_cache, v_cache, pairs)
    after.assert_same("copy_blocks_")
