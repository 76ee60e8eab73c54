"""`paged_caching_`, `gather_paged` and `copy_blocks_` on every memory order: nothing but the addressed places is written."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import kvdock
from opskit import POOLS, SINGLE, SOURCES, Geometry, Memory, Target, check, check_gather, noting

SLOTS = {
    "one": [13],
    "few with padding": [23, -1, 0],
    "run": [*range(2, 15)],
    "scattered with padding": [-1, 23, 0, -1, -1, 7, 8, 3, 16, -1],
}
BATCHES = [[[1], [9]], [[0, 23, 8, -1], [-1, 7, 6, 5], [1, 2, 3, 4]]]
SIZES = [Geometry(), Geometry.even(3, 5), Geometry.even(1, 16), Geometry.even(4, 1)]
OUTPUTS = ["new", "contiguous", "fused qkv", "[B, H, q, D]", "padded heads", "odd steps", "odd address", "even address in an odd storage"]
pool_names = pytest.mark.parametrize("pool", POOLS)
single = pytest.mark.parametrize("target", SINGLE, indirect=True)


@single
@pool_names
def test_write(target: Target, pool: str) -> None:
    """Every pool with every source, in calls of ``[T]`` and of ``[B, S]``."""
    g = Geometry()
    for source in SOURCES:
        with noting(source=source, device=target.device) as memory:
            pools = g.pools(memory, pool)
            for slots in (*SLOTS.values(), *BATCHES):
                mapping = memory.index(slots)
                check(target, memory, "paged_caching_", *pools, *g.tokens(memory, mapping.shape, source), mapping)


@single
@pool_names
def test_write_rows_of_other_sizes(target: Target, pool: str) -> None:
    for g, source in itertools.product(SIZES, ("contiguous", "fused qkv", "odd steps")):
        with noting(g=g, source=source, device=target.device) as memory:
            pools = g.pools(memory, pool)
            for slots in SLOTS.values():
                check(target, memory, "paged_caching_", *pools, *g.tokens(memory, [len(slots)], source), memory.index(slots))


@pool_names
def test_write_rows_shared_among_threads(target: Target, memory: Memory, pool: str) -> None:
    """300 tokens of 4 x 64: more elements than torch leaves to one thread."""
    g = Geometry.even(4, 64, num_blocks=50, block=8)
    pools = g.pools(memory, pool)
    slots = [-1 if i == 250 else i * 7 % g.capacity for i in range(300)]
    for source in ("contiguous", "fused qkv"):
        check(target, memory, "paged_caching_", *pools, *g.tokens(memory, [300], source), memory.index(slots))
    check_gather(target, memory, *pools, memory.index(slots))
    check(target, memory, "copy_blocks_", *pools, memory.index([[i, 49 - i] for i in range(20)]))


@single
@pool_names
def test_read(target: Target, pool: str) -> None:
    for g, out in itertools.product((Geometry(), Geometry.even(3, 5)), OUTPUTS):
        with noting(g=g, out=out, device=target.device) as memory:
            pools = g.pools(memory, pool)
            for slots in SLOTS.values():
                mapping = memory.index(slots)
                if out == "new":
                    check_gather(target, memory, *pools, mapping)
                else:
                    check(target, memory, "gather_paged", *pools, mapping, *g.tokens(memory, [len(slots)], out))


@single
@pool_names
def test_copy(target: Target, pool: str) -> None:
    for g in SIZES:
        with noting(g=g, device=target.device) as memory:
            pools = g.pools(memory, pool)
            for pairs in ([[0, 5]], [[5, 0], [2, 1]], [[4, 0], [4, 1], [4, 2]], [[-1, 3], [2, 3], [0, -1]]):
                check(target, memory, "copy_blocks_", *pools, memory.index(pairs))


@single
@pytest.mark.parametrize("pool", ["nhd", "hnd", "halves [NB, 2, ...]", "page-first", "padded blocks"])
@pytest.mark.parametrize(("num_blocks", "block"), [(1, 1), (1, 6), (6, 1), (1, 24), (24, 1)])
def test_dims_of_size_1_in_a_pool(target: Target, memory: Memory, pool: str, num_blocks: int, block: int) -> None:
    g = Geometry(num_blocks=num_blocks, block=block)
    pools = g.pools(memory, pool)
    last = g.capacity - 1
    for slots in ([0], [last], list(dict.fromkeys([last, -1, 0])), [*range(last, -1, -1)], [*range(last + 1)]):
        for source in ("contiguous", "fused qkv"):
            mapping = memory.index(slots)
            check(target, memory, "paged_caching_", *pools, *g.tokens(memory, [len(slots)], source), mapping)
        check_gather(target, memory, *pools, mapping)


def odd_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Give dims of size 1 strides that mean nothing."""
    strides = [97 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(tensor.shape, strides)


SIZE_1 = {
    "one block": Geometry(num_blocks=1, block=6),
    "blocks of one": Geometry(block=1),
    "one head": Geometry(hk=1, hv=1),
    "dim 1": Geometry(dk=1, dv=1),
    "one slot": Geometry(1, 1),
    "one element": Geometry(1, 1, 1, 1, 1, 1),
}


@pytest.mark.parametrize("g", SIZE_1.values(), ids=SIZE_1)
def test_strides_of_size_1_dims_mean_nothing(target: Target, memory: Memory, g: Geometry) -> None:
    pools = [odd_strides(cache) for cache in g.pools(memory)]
    for count in sorted({1, min(3, g.capacity), g.capacity}):
        k, v = (odd_strides(tokens) for tokens in g.tokens(memory, [count]))
        mapping = memory.index(list(range(count)))
        check(target, memory, "paged_caching_", *pools, k, v, mapping)
        check(target, memory, "gather_paged", *pools, mapping, *(odd_strides(out) for out in g.tokens(memory, [count])))
    check(target, memory, "copy_blocks_", *pools, memory.index([[0, g.num_blocks - 1]] if g.num_blocks > 1 else [[-1, 0]]))


@single
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_other_dtypes(target: Target, dtype: torch.dtype) -> None:
    g = Geometry(hk=3, dk=5, hv=2, dv=16, dtype=dtype)
    for pool in ("nhd", "odd steps", "odd address", "even address in an odd storage", "k and v unlike"):
        with noting(pool=pool, device=target.device) as memory:
            pools = g.pools(memory, pool)
            for slots in SLOTS.values():
                mapping = memory.index(slots)
                for source in ("contiguous", "odd steps", "odd address"):
                    check(target, memory, "paged_caching_", *pools, *g.tokens(memory, [len(slots)], source), mapping)
                check_gather(target, memory, *pools, mapping)


def test_keys_and_values_strided_each_in_its_own_way(target: Target, memory: Memory) -> None:
    g = Geometry(hk=3, dk=5, hv=2, dv=16)
    pools = g.pools(memory, "k and v unlike")
    for slots in SLOTS.values():
        k, _ = g.tokens(memory, [len(slots)], "[B, H, q, D]")
        _, v = g.tokens(memory, [len(slots)], "odd steps")
        check(target, memory, "paged_caching_", *pools, k, v, memory.index(slots))


@pytest.mark.parametrize("count", [1, 13])
def test_a_mapping_made_for_another_block_size_addresses_the_view_it_is_given(target: Target, memory: Memory, count: int) -> None:
    """Slots count places of the view that is passed: one memory seen as blocks of 4, 8 or 16 has the same slots."""
    k16, v16 = Geometry(num_blocks=2, block=16).pools(memory)
    slots = memory.index(list(range(7, 7 + count)))
    for block in (16, 8, 4):
        g = Geometry(num_blocks=32 // block, block=block)
        pools = k16.view(g.k_shape), v16.view(g.v_shape)
        check(target, memory, "paged_caching_", *pools, *g.tokens(memory, [count]), slots)
        check(target, memory, "paged_caching_", k16, v16, *g.tokens(memory, [count]), slots)


def test_a_mapping_for_larger_blocks_than_the_views_leaves_the_pool(target: Target, memory: Memory) -> None:
    """The usual outcome of mixed-up block sizes is a slot beyond the pool, and the message asks for the pool's own."""
    g = Geometry(num_blocks=2, block=4)
    k, v = g.tokens(memory, [2])
    slots = memory.index([1 * 16 + 3, 2])
    assert check(target, memory, "paged_caching_", *g.pools(memory), k, v, slots) == [(0,)]
    if target.host_reads(slots):
        with pytest.raises(kvdock.IndexRangeError, match="block_size") as caught:
            kvdock.ops.paged_caching_(*g.pools(memory), k, v, slots)
        assert "below 8 (num_blocks * block_size)" in str(caught.value)


def test_keys_and_values_of_one_tensor(target: Target, memory: Memory) -> None:
    """k and v as halves of what a projection returned: sources may overlap each other, only not a cache."""
    g = Geometry()
    pools = g.pools(memory)
    rows = memory.tensor(g.dtype, (9, 2, 2, 8))
    slots = memory.index([23, 0, 7, -1, 3, 16, 11, 20, 1])
    check(target, memory, "paged_caching_", *pools, rows[:, 0], rows[:, 1], slots)
    check(target, memory, "paged_caching_", *pools, rows[:, 0], rows[:, 0], slots)


def bound(target: Target, op: str, *pools: torch.Tensor) -> Any:
    """Return an op that knows its pools, as caches hold it."""
    return target.runtime.dispatcher.op(op).bind(*pools, named="portable" if target.name == "portable" else None)


@single
@pool_names
def test_an_op_that_knows_its_pools_does_the_same(target: Target, memory: Memory, pool: str) -> None:
    g = Geometry()
    pools = g.pools(memory, pool)
    for slots in SLOTS.values():
        k, v = g.tokens(memory, [len(slots)], "fused qkv")
        mapping = memory.index(slots)
        before = memory.copy()
        bound(target, "paged_caching_", *pools)(k, v, mapping, None, None)
        after = memory.copy()
        before.restore()
        kvdock.ops.paged_caching_(*pools, k, v, mapping)
        after.assert_same("bound and direct")
        check(target, memory, "paged_caching_", *pools, k, v, mapping)
