"""`paged_caching_`, `gather_paged` and `copy_blocks_`: views of one memory, bound pools, and work shared among torch's threads."""

from __future__ import annotations

import pytest

import kvdock
from opskit import POOLS, TARGETS, Geometry, Memory, Target, check, check_gather


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("target", TARGETS, indirect=True)
def test_write_rows_shared_among_threads(target: Target, memory: Memory, pool: str) -> None:
    """300 tokens of 4 x 64: more elements than torch leaves to one thread."""
    g = Geometry.even(4, 64, num_blocks=50, block=8)
    pools = g.pools(memory, pool)
    slots = [-1 if i == 250 else i * 7 % g.capacity for i in range(300)]
    for source in ("contiguous", "fused qkv"):
        check(target, memory, "paged_caching_", *pools, *g.tokens(memory, [300], source), memory.index(slots))
    check_gather(target, memory, *pools, memory.index(slots))
    check(target, memory, "copy_blocks_", *pools, memory.index([[i, 49 - i] for i in range(20)]))


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


@pytest.mark.parametrize("pool", POOLS)
def test_an_op_that_knows_its_pools_does_the_same(target: Target, memory: Memory, pool: str) -> None:
    g = Geometry()
    pools = g.pools(memory, pool)
    write = target.runtime.dispatcher.op("paged_caching_").bind(*pools, named="portable" if target.name == "portable" else None)
    for slots in ([13], [23, -1, 0], [*range(2, 15)], [-1, 23, 0, -1, -1, 7, 8, 3, 16, -1]):
        k, v = g.tokens(memory, [len(slots)], "fused qkv")
        mapping = memory.index(slots)
        before = memory.copy()
        write(k, v, mapping, None, None)
        after = memory.copy()
        before.restore()
        check(target, memory, "paged_caching_", *pools, k, v, mapping)
        after.assert_same("bound and direct")
