"""Tensors without elements: there is nothing to do, whatever their strides are. Only sizes, dtypes and devices count."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvdock
from opskit import Geometry, Memory, Target, check

G = Geometry()
STRIDES = {"zero": 0, "two": 2, "large": 1 << 40}


def empty(target: Target, shape: tuple[int, ...], stride: int, dtype: torch.dtype = G.dtype) -> torch.Tensor:
    """Return a tensor without elements all of whose strides are one number."""
    tensor = torch.empty(0, dtype=dtype, device=target.device).as_strided(shape, [stride] * len(shape))
    assert tensor.numel() == 0
    return tensor


@pytest.mark.parametrize("stride", STRIDES.values(), ids=STRIDES)
@pytest.mark.parametrize("lead", [(0,), (0, 3), (3, 0)])
def test_no_tokens(target: Target, memory: Memory, lead: tuple[int, ...], stride: int) -> None:
    pools, before = G.pools(memory), memory.copy()
    rows = [empty(target, (*lead, 2, 8), stride) for _ in pools]
    slots = empty(target, lead, stride, torch.int64)
    kvdock.ops.paged_caching_(*pools, *rows, slots)
    kvdock.ops.gather_paged(*pools, slots, out=(rows[0], rows[1]))
    assert kvdock.ops.gather_paged(*pools, slots)[0].shape == (*lead, 2, 8)
    before.assert_same("ops without tokens")


@pytest.mark.parametrize("stride", STRIDES.values(), ids=STRIDES)
@pytest.mark.parametrize(("rows", "new"), [(0, 2), (3, 0), (0, 0)])
def test_no_positions(target: Target, memory: Memory, rows: int, new: int, stride: int) -> None:
    caches = [memory.tensor(G.dtype, (4, 2, 6, 8)) for _ in range(2)]
    before = memory.copy()
    k, v = (empty(target, (rows, 2, new, 8), stride) for _ in caches)
    lengths = empty(target, (0,), stride, torch.int64) if rows == 0 else torch.zeros(rows, dtype=torch.int64, device=target.device)
    for given in (0, lengths):
        kvdock.ops.static_update_(*caches, k, v, given)
    before.assert_same("static_update_ without positions")


def test_no_pairs(target: Target, memory: Memory) -> None:
    """`torch.from_numpy` gives empty arrays strides of 0, and `contiguous` keeps them."""
    pools, before = G.pools(memory), memory.copy()
    from_numpy = torch.from_numpy(np.empty((0, 2), dtype=np.int64))
    for pairs in (
        from_numpy,
        from_numpy.contiguous(),
        from_numpy.numpy(),
        *(empty(target, (0, 2), s, torch.int32) for s in STRIDES.values()),
    ):
        kvdock.ops.copy_blocks_(*pools, pairs)
    before.assert_same("copy_blocks_ without pairs")


@pytest.mark.parametrize("stride", STRIDES.values(), ids=STRIDES)
def test_no_blocks(target: Target, memory: Memory, stride: int) -> None:
    """A pool may have none: then all slots are padding."""
    pools = [empty(target, (0, 4, 2, 8), stride) for _ in range(2)]
    for count in (1, 3, 40):
        rows = G.tokens(memory, [count])
        slots = memory.index([-1] * count)
        check(target, memory, "paged_caching_", *pools, *rows, slots)
        check(target, memory, "gather_paged", *pools, slots, *rows)
    check(target, memory, "copy_blocks_", *pools, memory.index([[-1, 0], [0, -1]]))
