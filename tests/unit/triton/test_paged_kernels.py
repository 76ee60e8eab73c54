"""`paged_caching_` and `gather_paged` under the interpreter: slots, sizes, memory orders and addresses."""

from __future__ import annotations

import itertools

import attrs
import pytest
import torch

import kvdock
from opskit import POOLS, SOURCES, Geometry, Memory, Target, bits_of, check, check_gather, noting

G = Geometry()
INT32_MIN, INT64_MIN = -(2**31), -(2**63)
SLOTS = {
    "none": [],
    "one": [13],
    "first and last": [0, 23],
    "padding": [-1],
    "all negative": [-1, -2, INT32_MIN, -1],
    "some negative": [3, -1, 7, INT32_MIN, -1, 0, 22],
    "reversed": list(range(23, -1, -1)),
    "permutation": torch.randperm(24, generator=torch.Generator().manual_seed(1)).tolist(),
    "capacity": [2, 24, 5],
    "far beyond": [2**31 - 1, 4, 25, -1, 2**31 - 1],
}
WIDE_SLOTS = {"2**40": [2, 2**40, -1], "largest": [2**63 - 1, 3], "smallest": [INT64_MIN, 3, INT64_MIN + 1], "2**32": [2**32, 2**32 + 3, 4]}


def write_and_read(target: Target, memory: Memory, g: Geometry, slots: list[int], pool: str = "nhd", source: str = "contiguous") -> None:
    """Write tokens, and read them into outputs of the same layout; every byte compared with the reference."""
    pools, mapping = g.pools(memory, pool), memory.index(slots)
    check(target, memory, "paged_caching_", *pools, *g.tokens(memory, [len(slots)], source), mapping)
    outs = g.tokens(memory, [len(slots)], source)
    if any(0 in out.stride() for out in outs):  # several places of what is expanded have one memory, and cannot be written
        outs = g.tokens(memory, [len(slots)], "contiguous")
    check(target, memory, "gather_paged", *pools, mapping, *outs)


def test_the_kernels_are_those_of_the_third_party(target: Target) -> None:
    chosen = target.runtime.dispatcher.choose("paged_caching_", torch.device("cpu"), "acme")
    assert type(chosen.kernels["paged_caching_"]).__module__ == "kvdock_triton.paged_caching"
    assert target.runtime.registry.records()[-1].state.value == "ready"
    assert chosen.backend.notes() == [f"Triton {__import__('triton').__version__}: interpreted (TRITON_INTERPRET=1)"]


@pytest.mark.parametrize("slots", [*SLOTS.values(), *WIDE_SLOTS.values()], ids=[*SLOTS, *WIDE_SLOTS])
def test_slots(target: Target, slots: list[int]) -> None:
    for dtype, step in itertools.product([torch.int64] if slots in WIDE_SLOTS.values() else [torch.int32, torch.int64], (1, 3)):
        with noting(dtype=dtype, step=step) as memory:
            pools, mapping = G.pools(memory), memory.index(slots, dtype, step=step)
            check(target, memory, "paged_caching_", *pools, *G.tokens(memory, [len(slots)]), mapping)
            check_gather(target, memory, *pools, mapping)


@pytest.mark.parametrize("source", ["contiguous", "fused qkv", "[B, H, q, D]", "every other token"])
def test_batches(target: Target, source: str) -> None:
    for rows in ([[5]], [[1, -1, 2], [-1, 24, 23]], [[4], [-1], [0]], [[3, 2], [2**40, 1], [7, 6]]):
        with noting(rows=rows) as memory:
            mapping = memory.index(rows, step=2)
            pools = G.pools(memory)
            check(target, memory, "paged_caching_", *pools, *G.tokens(memory, mapping.shape, source), mapping)
            check(target, memory, "gather_paged", *pools, mapping, *G.tokens(memory, mapping.shape, source))
    with noting() as memory:
        mapping = memory.index([[1, 2], [3, 4], [5, 6]]).T
        check(target, memory, "paged_caching_", *G.pools(memory), *G.tokens(memory, [2, 3], source), mapping)


SIZES = {
    "block 1": Geometry(block=1),
    "block 16": Geometry(block=16, num_blocks=2),
    "block 48": Geometry(block=48, num_blocks=2),
    "3 x 64": Geometry.even(3, 64),
    "8 x 128": Geometry.even(8, 128, num_blocks=2),
    "dim 1": Geometry(dk=1, dv=1),
    "dim 46": Geometry(dk=46, dv=46),
    "dim 80": Geometry(dk=80, dv=80),
    "Dk 192, Dv 128": Geometry(dk=192, dv=128),
    "Hk 4, Hv 1": Geometry(hk=4, hv=1),
    "Hk 3, Dk 5, Hv 2, Dv 46": Geometry(hk=3, dk=5, hv=2, dv=46),
    "float32": Geometry(dtype=torch.float32, dk=3, dv=4),
    "float64": Geometry(dtype=torch.float64, dk=1, dv=3),
    "float16": Geometry(dtype=torch.float16, dk=6, dv=12),
    "no blocks": Geometry(num_blocks=0),
    "more than a chunk": Geometry(num_blocks=1, hk=65, dk=130, hv=33, dv=256),
    "chunks, not whole": Geometry(num_blocks=1, hk=3, dk=1367, hv=1, dv=4099),
    "whole chunks": Geometry(num_blocks=1, hk=64, dk=256, hv=64, dv=128),
}


@pytest.mark.parametrize("g", SIZES.values(), ids=SIZES)
def test_sizes(target: Target, memory: Memory, g: Geometry) -> None:
    order = torch.randperm(g.capacity, generator=torch.Generator().manual_seed(2)).tolist()[:7]
    write_and_read(target, memory, g, [*order[:3], -1, g.capacity, *order[3:]])
    write_and_read(target, memory, g, order[:2], source="fused qkv")


@pytest.mark.parametrize("pool", POOLS)
def test_pools(target: Target, pool: str) -> None:
    for source in ("contiguous", "fused qkv"):
        with noting(source=source) as memory:
            write_and_read(target, memory, G, [3, -1, 7, 0, 22], pool, source)


@pytest.mark.parametrize("source", SOURCES)
def test_sources(target: Target, source: str) -> None:
    for pool in ("nhd", "hnd", "odd steps"):
        with noting(pool=pool) as memory:
            write_and_read(target, memory, G, [3, -1, 7, 0, 22], pool, source)


@pytest.mark.parametrize("offset", [2, 4, 8, 16])
@pytest.mark.parametrize("moved", ["k", "v", "k_cache", "v_cache", "all"])
def test_addresses(target: Target, offset: int, moved: str) -> None:
    """After a call on addresses that are multiples of 16, so that a plan for those is there to be taken by mistake."""
    for at in (0, offset):
        with noting(at=at) as memory:
            shapes = {"k_cache": G.k_shape, "v_cache": G.v_shape, "k": (5, 2, 8), "v": (5, 2, 8)}
            tensors = [memory.tensor(G.dtype, shape, offset=at if moved in (name, "all") else 0) for name, shape in shapes.items()]
            mapping = memory.index([3, -1, 7, 0, 22])
            check(target, memory, "paged_caching_", *tensors, mapping)
            check(target, memory, "gather_paged", *tensors[:2], mapping, *tensors[2:])


@pytest.mark.parametrize("gap", [1, 2, 3, 4, 8])
def test_row_strides(target: Target, gap: int) -> None:
    """Dense rows first, then rows that far apart."""
    for behind, dtype in itertools.product((0, gap), (torch.bfloat16, torch.float32)):
        with noting(behind=behind, dtype=dtype) as memory:
            g, mapping = attrs.evolve(G, dtype=dtype), memory.index([3, -1, 7, 0, 22])
            k, v = (memory.tensor(dtype, (5, 2, 8), gaps=(0, at, 0)) for at in (behind, gap - behind))
            pools = g.pools(memory)
            check(target, memory, "paged_caching_", *pools, k, v, mapping)
            check(target, memory, "gather_paged", *pools, mapping, k, v)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_bits_arrive_as_they_came(target: Target, memory: Memory, dtype: torch.dtype) -> None:
    """Quiet and signalling NaNs with payloads, infinities, -0 and subnormals."""
    g, size = attrs.evolve(G, dtype=dtype), dtype.itemsize * 8
    exponent = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000, torch.float64: 0x7FF0000000000000}[dtype]
    sign = -(2 ** (size - 1))
    odd = [exponent | 1, exponent | 0x55, sign, sign | exponent | 3, sign | 1, exponent, 1, sign | exponent]
    k, v = g.tokens(memory, [3])
    for tensor in (k, v):
        kind = {16: torch.int16, 32: torch.int32, 64: torch.int64}[size]
        tensor.view(kind).copy_(torch.tensor(odd, dtype=kind).expand(3, 2, 8))
    pools, mapping = g.pools(memory), memory.index([5, 0, 23])
    check(target, memory, "paged_caching_", *pools, k, v, mapping)
    got, _ = kvdock.ops.gather_paged(*pools, mapping)
    assert torch.equal(bits_of(got), bits_of(k))


def test_padding_is_not_counted_and_beyond_is(target: Target, memory: Memory) -> None:
    before = target.skipped()
    slots = memory.index([-1, 24, INT64_MIN, 2**40, 3, 24])
    assert len(check(target, memory, "paged_caching_", *G.pools(memory), *G.tokens(memory, [6]), slots)) == 3
    check_gather(target, memory, *G.pools(memory), slots)
    assert target.skipped() - before == 3


@pytest.mark.slow
@pytest.mark.parametrize("source", ["contiguous", "fused qkv"])
def test_more_tokens_than_a_grid_has_rows(target: Target, memory: Memory, source: str) -> None:
    g = Geometry.even(1, 4, num_blocks=4500, block=16)
    slots = torch.randperm(g.capacity, generator=torch.Generator().manual_seed(3))[:70_000]
    slots[::100] = -1
    pools, (k, v) = g.pools(memory), g.tokens(memory, [70_000], source)
    mapping, after = memory.index(slots.tolist()), memory.copy()
    kvdock.ops.paged_caching_(*pools, k, v, mapping)
    for cache, tokens in zip(pools, (k, v), strict=True):  # by torch: the reference's loops would take long
        bits_of(after.twin(cache)).view(-1, 1, 4)[slots[slots >= 0]] = bits_of(tokens)[slots >= 0]
    after.assert_same("paged_caching_")
    got = kvdock.ops.gather_paged(*pools, mapping)
    wanted = bits_of(k) * (slots >= 0)[:, None, None]
    assert torch.equal(bits_of(got[0]), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("step", [2**31 + 8, 2**32 + 24, 2**31 + 9])
def test_offsets_beyond_32_bits(target: Target, step: int) -> None:
    """A pool that is reserved, and touched in a few places only; also from a source and into an output that far apart."""
    flat = torch.empty(2 * step + 1024, dtype=torch.bfloat16)
    k_cache, far = flat.as_strided((3, 4, 2, 8), (step, 16, 8, 1)), torch.empty(2 * step + 1024, dtype=torch.bfloat16)
    v_cache, k = torch.zeros(3, 4, 2, 8, dtype=torch.bfloat16), far.as_strided((3, 2, 8), (step, 8, 1))
    flat[:64], flat[step % 2**32 : step % 2**32 + 64] = 0, 0
    k.copy_(torch.randn(3, 2, 8))
    slots = torch.tensor([8, 11, 7])
    kvdock.ops.paged_caching_(k_cache, v_cache, k, k.clone(), slots)
    assert torch.equal(bits_of(torch.stack([k_cache[2, 0], k_cache[2, 3], k_cache[1, 3]])), bits_of(k))
    assert int(flat[:64].count_nonzero()) == 0
    wanted = k.clone()
    k.zero_()
    kvdock.ops.gather_paged(k_cache, v_cache, slots, out=(k, torch.empty(3, 2, 8, dtype=torch.bfloat16)))
    assert torch.equal(bits_of(k), bits_of(wanted))
    kvdock.ops.copy_blocks_(k_cache, v_cache, torch.tensor([[2, 0]]))
    assert torch.equal(bits_of(k_cache[0]), bits_of(k_cache[2]))
