"""`copy_blocks_`: the forms in which pairs come, and pairs whose order matters. What is copied is for the kit, in `tests/backends`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvdock
from opskit import Geometry, Memory, Target, check

G = Geometry()


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
    "onto itself": ([[3, 3]], 0, "destination 3 also as a source", "drop the pair"),
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


def test_blocks_of_unlike_sizes(target: Target, memory: Memory) -> None:
    """K and V may differ in heads, dim, and here also in how many places a block has: the kit's pools do not."""
    k_cache = Geometry(block=3, hk=3, dk=5).pools(memory)[0]
    v_cache = Geometry(block=7, hv=1, dv=46).pools(memory)[1]
    check(target, memory, "copy_blocks_", k_cache, v_cache, memory.index([[0, 5], [3, 2]]))
