"""`paged_caching_`: which slots are written, which are padding, and which are refused."""

from __future__ import annotations

import itertools

import pytest
import torch

import kvdock
from opskit import Geometry, Memory, Target, bits_of, check, noting

G = Geometry()  # 6 blocks of 4: slots 0 to 23
INT32_MIN, INT64_MIN = -(2**31), -(2**63)

SLOTS = {
    "zero tokens": [],
    "one token": [13],
    "one padding": [-1],
    "all negative": [-1] * 9,
    "some negative": [3, -1, 7, -1, -1, 0, 22, -1],
    "negative at the ends": [-1, 4, 5, 6, 7, 8, 9, -1],
    "few, some negative": [-1, 20, -1],
    "other negatives": [-2, INT32_MIN, 4, -G.capacity, -G.capacity - 1, 9, -G.block],
    "first of the pool": [0],
    "last of the pool": [G.capacity - 1],
    "first and last of the pool": [G.capacity - 1, 0],
    "last of block 0 and first of block 1": [3, 4],
    "across every edge between blocks": [3, 4, 7, 8, 11, 12, 15, 16, 19, 20],
    "reversed": list(reversed(range(G.capacity))),
    "consecutive": list(range(2, 21)),
    "every slot": list(range(G.capacity)),
    "random permutation": torch.randperm(G.capacity, generator=torch.Generator().manual_seed(1)).tolist(),
    "whole blocks in random order": [16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23],
}
INDEX = [torch.int32, torch.int64]
named_slots = pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
index_dtype = pytest.mark.parametrize("dtype", INDEX, ids=str)


@named_slots
def test_slots(target: Target, memory: Memory, slots: list[int]) -> None:
    for dtype, source in itertools.product(INDEX, ("contiguous", "fused qkv")):
        k, v = G.tokens(memory, [len(slots)], source)
        assert check(target, memory, "paged_caching_", *G.pools(memory), k, v, memory.index(slots, dtype)) == []


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_batch_of_rows(target: Target, rows: int) -> None:
    for name, slots in SLOTS.items():
        if len(slots) % rows or not slots:
            continue
        with noting(slots=name, device=target.device) as memory:
            mapping = memory.index(torch.tensor(slots).view(rows, -1).tolist())
            k, v = G.tokens(memory, mapping.shape, "[B, H, q, D]")
            check(target, memory, "paged_caching_", *G.pools(memory), k, v, mapping)


@pytest.mark.parametrize("lead", [(0,), (0, 3), (3, 0), (0, 0)])
def test_zero_tokens_in_any_shape_change_nothing(target: Target, memory: Memory, lead: tuple[int, ...]) -> None:
    k, v = G.tokens(memory, lead)
    check(target, memory, "paged_caching_", *G.pools(memory), k, v, memory.index(torch.zeros(lead).tolist()).view(lead))


@index_dtype
@pytest.mark.parametrize("step", [2, 3])
@pytest.mark.parametrize("lead", [(1,), (12,), (3, 4)])
def test_strided_slot_mapping(target: Target, memory: Memory, lead: tuple[int, ...], step: int, dtype: torch.dtype) -> None:
    slots = torch.arange(12)[: torch.Size(lead).numel()].view(lead) * 2
    k, v = G.tokens(memory, lead)
    check(target, memory, "paged_caching_", *G.pools(memory), k, v, memory.index(slots.tolist(), dtype, step=step))


def test_transposed_and_expanded_slot_mappings(target: Target, memory: Memory) -> None:
    k_cache, v_cache = G.pools(memory)
    k, v = G.tokens(memory, [2, 3])
    check(target, memory, "paged_caching_", k_cache, v_cache, k, v, memory.index([[1, 2], [3, 4], [5, 6]]).T)
    check(target, memory, "paged_caching_", k_cache, v_cache, k, v, memory.index([-1]).expand(2, 3))


def test_a_mapping_strided_across_rows(target: Target, memory: Memory) -> None:
    k, v = G.tokens(memory, [3, 2])
    check(target, memory, "paged_caching_", *G.pools(memory), k, v, memory.index([list(range(i, i + 8)) for i in (0, 8, 16)])[:, 3:5])


@pytest.mark.parametrize("count", [2, 30])
@pytest.mark.parametrize("source", ["contiguous", "fused qkv"])
def test_which_of_equal_slots_wins_is_open_and_all_else_is_not(target: Target, memory: Memory, count: int, source: str) -> None:
    """Every element of the doubled slot comes from one of its tokens, and every other place is as the reference says."""
    slots = [5] + [i % 20 for i in range(count - 2)] + [5]
    k_cache, v_cache = G.pools(memory)
    k, v = G.tokens(memory, [count], source)
    others = memory.copy()
    kvdock.ops.paged_caching_(k_cache, v_cache, k, v, memory.index(slots, device="cpu").to(target.device))
    for cache, tokens in ((k_cache, k), (v_cache, v)):
        before, after, sources = bits_of(others.twin(cache)), bits_of(cache), bits_of(tokens)
        for slot in range(G.capacity):
            place = after[slot // G.block, slot % G.block]
            candidates = [sources[i] for i, s in enumerate(slots) if s == slot] or [before[slot // G.block, slot % G.block]]
            assert torch.stack([place == candidate for candidate in candidates]).any(0).all(), f"slot {slot}"


BEYOND = {"capacity": G.capacity, "capacity + 1": G.capacity + 1, "2**31 - 1": 2**31 - 1, "2**40": 2**40, "2**63 - 1": 2**63 - 1}


@pytest.mark.parametrize("bad", BEYOND.values(), ids=BEYOND)
@pytest.mark.parametrize("slots", [[2], [2, -1, 9], list(range(12)), [3, -1, 7, -1, -1, 0, 22, -1]], ids=["one", "few", "run", "padding"])
def test_slot_beyond_the_pool(target: Target, slots: list[int], bad: int) -> None:
    """On the host it raises, names the first such position, and writes nothing; on a device it is skipped and counted."""
    for position, dtype in itertools.product({0, len(slots) // 2, len(slots) - 1}, INDEX if bad < 2**31 else [torch.int64]):
        with noting(position=position, dtype=dtype, device=target.device) as memory:
            wrong = [bad if i == position else slot for i, slot in enumerate(slots)]
            k, v = G.tokens(memory, [len(slots)])
            assert check(target, memory, "paged_caching_", *G.pools(memory), k, v, memory.index(wrong, dtype)) == [(position,)]


@pytest.mark.parametrize("count", [1, 3, 16])
def test_nothing_but_slots_beyond_the_pool(target: Target, memory: Memory, count: int) -> None:
    for bad in (G.capacity, 2**31 - 1):
        k, v = G.tokens(memory, [count])
        assert len(check(target, memory, "paged_caching_", *G.pools(memory), k, v, memory.index([bad] * count, torch.int32))) == count


def test_the_first_bad_position_is_named_in_a_batch(target: Target, memory: Memory) -> None:
    k, v = G.tokens(memory, [2, 5])
    slots = memory.index([[0, 1, 2, -1, 3], [4, -1, 24, 5, 99]])
    assert check(target, memory, "paged_caching_", *G.pools(memory), k, v, slots) == [(1, 2), (1, 4)]


def test_a_run_that_leaves_the_pool(target: Target, memory: Memory) -> None:
    k, v = G.tokens(memory, [12])
    assert len(check(target, memory, "paged_caching_", *G.pools(memory), k, v, memory.index(list(range(18, 30))))) == 6


def test_differences_that_overflow_are_no_run(target: Target, memory: Memory) -> None:
    """The largest int32 and the smallest differ by 1 modulo 2**32."""
    slots = [2**31 - 1, INT32_MIN, INT32_MIN + 1, INT32_MIN + 2, INT32_MIN + 3, 0, 1, 2]
    k, v = G.tokens(memory, [len(slots)])
    assert check(target, memory, "paged_caching_", *G.pools(memory), k, v, memory.index(slots, torch.int32)) == [(0,)]


@pytest.mark.parametrize("slots", [[INT64_MIN], [INT64_MIN, 3, INT64_MIN + 1, 5, -(2**32) + 3, -(2**32)]], ids=["one", "several"])
def test_the_smallest_ints_are_padding(target: Target, memory: Memory, slots: list[int]) -> None:
    k, v = G.tokens(memory, [len(slots)])
    assert check(target, memory, "paged_caching_", *G.pools(memory), k, v, memory.index(slots)) == []


def test_a_pool_without_blocks_takes_padding_only(target: Target, memory: Memory) -> None:
    empty = Geometry(num_blocks=0)
    k, v = empty.tokens(memory, [5])
    check(target, memory, "paged_caching_", *empty.pools(memory), k, v, memory.index([-1, -2, -1, -1, -7]))
    assert len(check(target, memory, "paged_caching_", *empty.pools(memory), k, v, memory.index([-1, 0, -1, -1, 7]))) == 2
