"""`paged_caching_` and `gather_paged`: sizes of blocks, heads, rows and calls."""

from __future__ import annotations

import math

import pytest
import torch

import kvdock
from opskit import SOURCES, Geometry, Memory, Target, active, bits_of, check, check_gather, counting_runtime

DIMS = [1, 46, 64, 80, 96, 100, 128, 192, 256, 576]


def some_slots(g: Geometry, count: int, seed: int = 0) -> list[int]:
    """Return distinct slots in random order, the first and last of the pool among them, with some padding."""
    order = torch.randperm(g.capacity, generator=torch.Generator().manual_seed(seed)).tolist()
    slots = list(dict.fromkeys([0, g.capacity - 1, *order]))[:count]
    return [-1 if i % 7 == 5 else slot for i, slot in enumerate(slots)]


def write_and_read(target: Target, memory: Memory, g: Geometry, slots: list[int], source: str = "contiguous") -> None:
    """Write tokens, and read them back; each call compared with the reference."""
    pools = g.pools(memory)
    mapping = memory.index(slots)
    check(target, memory, "paged_caching_", *pools, *g.tokens(memory, [len(slots)], source), mapping)
    check_gather(target, memory, *pools, mapping)


@pytest.mark.parametrize("block", [1, 16, 48, 256, 512])
@pytest.mark.parametrize("num_blocks", [1, 3])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_block_sizes(target: Target, memory: Memory, block: int, num_blocks: int, count: int) -> None:
    g = Geometry(num_blocks=num_blocks, block=block)
    write_and_read(target, memory, g, some_slots(g, count))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("heads", [1, 3])
def test_dims(target: Target, memory: Memory, dim: int, heads: int) -> None:
    g = Geometry.even(heads, dim)
    for count, source in ((1, "contiguous"), (2, "fused qkv"), (21, "contiguous"), (21, "fused qkv")):
        write_and_read(target, memory, g, some_slots(g, count), source)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [1, 5, 8])
def test_dtypes(target: Target, memory: Memory, dtype: torch.dtype, dim: int) -> None:
    g = Geometry(dk=dim, dv=dim, dtype=dtype)
    for count in (1, 3, 20):
        write_and_read(target, memory, g, some_slots(g, count))


UNLIKE = {
    "Dk 192, Dv 128": Geometry(dk=192, dv=128),
    "Dk 576, Dv 512": Geometry(dk=576, dv=512),
    "Dk 5, Dv 64": Geometry(dk=5, dv=64),
    "Hk 4, Hv 1": Geometry(hk=4, hv=1),
    "Hk 1, Hv 3": Geometry(hk=1, hv=3),
    "Hk 3, Dk 46, Hv 2, Dv 1": Geometry(hk=3, dk=46, hv=2, dv=1),
    "3 heads of 64, as SmolLM2 has": Geometry(hk=3, dk=64, hv=3, dv=64),
    "one of each": Geometry(num_blocks=1, block=1, hk=1, dk=1, hv=1, dv=1),
}


@pytest.mark.parametrize("g", UNLIKE.values(), ids=UNLIKE)
@pytest.mark.parametrize("source", ["contiguous", "fused qkv"])
def test_keys_and_values_of_unlike_sizes(target: Target, memory: Memory, g: Geometry, source: str) -> None:
    for count in (1, 4, 20):
        write_and_read(target, memory, g, some_slots(g, count), source)


@pytest.mark.parametrize("slots_are", ["random", "consecutive"])
@pytest.mark.parametrize("source", ["contiguous", "fused qkv"])
def test_more_tokens_than_a_grid_has_rows(target: Target, memory: Memory, source: str, slots_are: str) -> None:
    """70,000 tokens; CUDA's grids end at 65,535 in two of three dims."""
    g = Geometry.even(1, 4, num_blocks=4500, block=16)
    order = torch.randperm(g.capacity, generator=torch.Generator().manual_seed(3))
    slots = torch.arange(70_000) + 11 if slots_are == "consecutive" else order[:70_000]
    slots[::100] = -1
    pools, (k, v) = g.pools(memory), g.tokens(memory, [70_000], source)
    mapping = memory.index(slots.tolist())
    after = memory.copy()
    kvdock.ops.paged_caching_(*pools, k, v, mapping)
    for cache, tokens in zip(pools, (k, v), strict=True):  # by torch: the loops of the reference would take seconds
        flat = bits_of(after.twin(cache)).view(-1, 1, 4)
        flat[slots[slots >= 0]] = bits_of(tokens)[slots >= 0]
    after.assert_same("paged_caching_")
    got = kvdock.ops.gather_paged(*pools, mapping)
    for read, tokens in zip(got, (k, v), strict=True):
        assert torch.equal(bits_of(read), torch.where((slots >= 0)[:, None, None], bits_of(tokens), 0))


@pytest.mark.slow
@pytest.mark.parametrize("source", ["contiguous", "fused qkv"])
def test_more_tokens_than_a_grid_has_rows_against_the_reference(target: Target, memory: Memory, source: str) -> None:
    g = Geometry.even(1, 4, num_blocks=4500, block=16)
    write_and_read(target, memory, g, some_slots(g, 70_000), source)


def test_rows_large_enough_for_several_threads(target: Target, memory: Memory) -> None:
    """torch shares work among its threads from 32,768 elements."""
    g = Geometry.even(8, 128, num_blocks=40, block=16)
    for source in ("contiguous", "fused qkv"):
        write_and_read(target, memory, g, some_slots(g, 600), source)


COUNTS = [1, 15, 16, 17, 31, 32, 33, 63, 64, 127, 128, 255, 256, 500, 511, 512, 777, 1024, 70_000]


def projected(g: Geometry, count: int, q_width: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut k and v out of a projection of any width."""
    rows = torch.zeros(count, q_width + 2 * g.hk * g.dk, dtype=g.dtype, device=device)[:, q_width:]
    k, v = (half.view(count, g.hk, g.dk) for half in rows.chunk(2, dim=1))
    return k, v


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dim", [8, 46, 128])
def test_no_token_count_and_no_width_prepares_a_second_time(dim: int, device: str) -> None:
    """One plan for every count, every width of projection, and every q of ``[B, q, H, D]`` and ``[B, H, q, D]``."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    g = Geometry.even(1, dim, num_blocks=100, block=16)
    runtime, kernels = counting_runtime(device)
    k_cache, v_cache = (torch.zeros(shape, dtype=g.dtype, device=device) for shape in (g.k_shape, g.v_shape))
    with active(runtime):
        for count in COUNTS:
            for q_width in (0, 2 * dim, 12 * dim, 96 * dim if count < 2000 else 0):
                kvdock.ops.paged_caching_(k_cache, v_cache, *projected(g, count, q_width, device), torch.full((count,), -1, device=device))
        assert len(kernels["paged_caching_"].prepared) == 1
        for batch, q in ((1, 1), (1, 7), (2, 1), (3, 5), (4, 16), (1, 1024)):
            slots = torch.randint(0, g.capacity, (batch, q))
            for name in ("contiguous", "[B, H, q, D]", "fused qkv"):
                k, v = g.tokens(Memory(device), (batch, q), name)
                kvdock.ops.paged_caching_(k_cache, v_cache, k, v, slots.to(device))
        assert len(kernels["paged_caching_"].prepared) == 2, "one plan for [T], one for [B, S]"
        for count in (1, 15, 1024, 70_000):
            kvdock.ops.gather_paged(k_cache, v_cache, torch.full((count,), -1, device=device))
        assert len(kernels["gather_paged"].prepared) == 1
        for count in (1, 2, 15, 300):
            kvdock.ops.copy_blocks_(k_cache, v_cache, torch.full((count, 2), -1, device=device))
        assert len(kernels["copy_blocks_"].prepared) == 1


def test_no_length_and_no_count_prepares_a_static_update_again() -> None:
    runtime, kernels = counting_runtime()
    caches = [torch.zeros(8, 2, 2000, 16), torch.zeros(8, 2, 2000, 16)]
    with active(runtime):
        for new in COUNTS[:-1]:
            for rows in (1, 3, 8):
                k = torch.randn(rows, 2, new, 16)
                for start in (0, 1, 17, 900):
                    kvdock.ops.static_update_(*caches, k, k.clone(), start)
        assert len(kernels["static_update_"].prepared) == 1
        for rows in (1, 3, 8):
            k = torch.randn(rows, 2, 3, 16)
            kvdock.ops.static_update_(*caches, k, k.clone(), torch.arange(rows))
            kvdock.ops.static_update_(*caches, k, k.clone(), torch.tensor([5]))
        assert len(kernels["static_update_"].prepared) == 2, "one plan for an int, one for [n] lengths"


def test_a_projection_of_any_width_is_written_right(target: Target, memory: Memory) -> None:
    g = Geometry.even(2, 46)
    pools = g.pools(memory)
    for q_width in (0, 46, 92, 7 * 46):
        for lead in ((1,), (3,), (17,), (2, 5), (1, 1), (3, 1)):
            k, v = SOURCES["fused qkv"](memory, g, lead, q_width)
            slots = memory.index(torch.tensor(some_slots(g, math.prod(lead))).view(lead).tolist())
            check(target, memory, "paged_caching_", *pools, k, v, slots)
