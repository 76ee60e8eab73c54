"""`swap_blocks_` under the interpreter: every pair of memory orders, pairs that the kernel checks, and host memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import attrs
import pytest
import torch

import kvdock
from kvdock.ops.catalog import SWAP_BLOCKS
from kvdock.ops.validate import validate
from kvdock_conformance import reference
from opskit import POOLS, Geometry, Memory, Target, active, check, noting
from opskit.interpreted import HOST_PAIRS, AcmeBackend, InterpretedTarget

G = Geometry()
SEPARATE = [name for name in POOLS if name not in ("values inside keys", "untouched memory")]


class _OnDevice(InterpretedTarget):
    """The same backend, whose pairs nobody reads on the host."""

    @property
    def runtime(self) -> kvdock.Runtime:
        return HOST_PAIRS.runtime


@pytest.fixture
def host_pairs(target: Target) -> Iterator[Target]:
    """Serve `kvdock.ops` by the backend as it is, which checks pairs in host memory before a launch."""
    with active(HOST_PAIRS.runtime, "acme"):
        yield HOST_PAIRS


@pytest.fixture
def device_pairs(host_pairs: Target, monkeypatch: pytest.MonkeyPatch) -> Target:
    """Take pairs in host memory for such on a device, which only the kernel can check."""
    monkeypatch.setattr("kvdock_triton.swap_blocks.pairs_on_device", lambda op, pairs, *_, **__: pairs)
    return _OnDevice("interpreted, pairs for the kernel", "cpu", True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("source", SEPARATE)
def test_every_order_to_every_other(host_pairs: Target, source: str, dtype: torch.dtype) -> None:
    for to in SEPARATE if dtype is torch.float16 else SEPARATE[:3]:
        with noting(to=to) as memory:
            g = Geometry(dtype=dtype)
            pools = g.pools(memory, source)[0], g.pools(memory, to)[1]
            check(host_pairs, memory, "swap_blocks_", *pools, memory.index([[0, 5], [3, 0], [0, 2]]))


@pytest.mark.parametrize(("block", "heads", "dim"), [(1, 1, 1), (3, 5, 7), (16, 8, 128), (4, 9, 130), (64, 1, 576)])
def test_blocks_of_many_pieces_and_of_odd_sizes(host_pairs: Target, block: int, heads: int, dim: int) -> None:
    for orders in itertools.product(("nhd", "hnd"), repeat=2):
        with noting(orders=orders) as memory:
            g = Geometry.even(heads, dim, block=block, num_blocks=3)
            pools = g.pools(memory, orders[0])[0], g.pools(memory, orders[1])[1]
            check(host_pairs, memory, "swap_blocks_", *pools, memory.index([[0, 2], [1, 1]]))


@pytest.mark.parametrize(
    "pairs", [[[6, 0]], [[0, 6], [1, 1]], [[2**40, 1], [-1, 2**40], [3, 3]], [[0, 1], [-1, -1], [2, 2**31]], [[-(2**31), 1]]]
)
def test_pairs_that_the_kernel_checks(device_pairs: Target, memory: Memory, pairs: list[list[int]]) -> None:
    pools = G.pools(memory, "hnd")[0], G.pools(memory)[1]
    check(device_pairs, memory, "swap_blocks_", *pools, memory.index(pairs))
    index = memory.index([[0, 0], *pairs])[1:]
    check(device_pairs, memory, "swap_blocks_", *pools, index)


@pytest.mark.parametrize(("is_pinned", "side"), [*itertools.product([False, True], ["src_cache", "dst_cache"])])
def test_host_memory_is_reached_by_few_programs_or_staged(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, is_pinned: bool, side: str
) -> None:
    """Whether it is locked is asked at each call: another memory may be there by then."""
    from kvdock_triton.swap_blocks import SwapBlocks
    from kvdock_triton.tuning import DEFAULT

    pools, index = (G.pools(memory)[0], G.pools(memory, "hnd")[1]), memory.index([[0, 5], [3, 2], [-1, 1]])
    request = validate(SWAP_BLOCKS, (*pools, index))
    request = attrs.evolve(request, args={**request.args, side: attrs.evolve(request.tensor(side), is_on_host=True)})
    grids, asked = [], []
    descriptor = SwapBlocks(AcmeBackend()).prepare(request)
    assert not descriptor.uses_autograd
    launch = vars(descriptor)["_launch"]
    run = launch.run
    monkeypatch.setattr(launch, "run", lambda grid, *args: grids.append(grid) or run(grid, *args))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: asked.append(tensor) or is_pinned)
    expected = memory.copy()
    reference.swap_blocks_(*map(expected.twin, (*pools, index)))
    for _ in range(2):
        descriptor(*pools, index)
        expected.assert_same("swap_blocks_")
    assert [tensor.data_ptr() for tensor in asked] == [pools[side == "dst_cache"].data_ptr()] * 2
    assert len(grids) == 2 * is_pinned
    many = memory.index([[0, number % 6] for number in range(6)])
    for _ in range(20):
        descriptor(*pools, many)
    assert set(grids[2:]) == ({min(DEFAULT.swap.programs, 6)} if is_pinned else set())


def test_programs_go_round_where_there_are_fewer_than_pieces(host_pairs: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvdock_triton.swap_blocks import SwapBlocksDescriptor

    made = SwapBlocksDescriptor.__init__

    def few(self: SwapBlocksDescriptor, request: object, launch: object, pieces: int, programs: int, skipped: torch.Tensor) -> None:
        assert programs > 3
        made(self, request, launch, pieces, 3, skipped)  # type: ignore[arg-type] # passed on as they came

    monkeypatch.setattr(SwapBlocksDescriptor, "__init__", few)
    memory, g = Memory("cpu"), Geometry.even(8, 300, num_blocks=7, block=5)
    pools = g.pools(memory)[0], g.pools(memory, "hnd")[1]
    check(host_pairs, memory, "swap_blocks_", *pools, memory.index([[number, 6 - number] for number in range(7)]))


def test_one_kernel_is_compiled_for_any_number_of_pairs(host_pairs: Target, memory: Memory) -> None:
    pools = G.pools(memory)[0], G.pools(memory)[1]
    before = host_pairs.runtime.dispatcher.op("swap_blocks_").prepared
    for count in (1, 2, 3, 5, 6):
        kvdock.ops.swap_blocks_(*pools, memory.index([[number, number] for number in range(count)]))
    assert host_pairs.runtime.dispatcher.op("swap_blocks_").prepared <= before + 1


def test_pairs_on_a_device_that_are_of_no_block_are_skipped_in_all_layers(device_pairs: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where heads are in another order, blocks of all layers are numbered in one pool: what is beyond one layer is in the next."""
    spec = kvdock.KVSpec.uniform(num_layers=3, num_kv_heads=2, head_dim=8, max_positions=64, dtype=torch.float32)
    for layout, dtype in itertools.product(kvdock.KVCacheLayout, (torch.int32, torch.int64)):
        src, dst = (
            kvdock.create_cache(
                spec,
                kvdock.PagedKVCacheConfig(num_blocks=blocks, block_size=4, layout=layout, head_layout=heads),
                kvdock.RankInfo("cpu"),
                ops=device_pairs.runtime.dispatcher,
            )
            for blocks, heads in zip((6, 5), kvdock.HeadLayout, strict=True)
        )
        for layer in range(3):
            src.k_cache(layer).normal_()
            src.v_cache(layer).normal_()
        monkeypatch.setattr("kvdock.cache.routes.HOST", torch.device("meta"))  # nobody reads these pairs but the kernel
        before = device_pairs.runtime.skipped_writes("cpu")
        src.swap_blocks(dst, torch.tensor([[5, 0], [6, 1], [-1, 2], [4, -1], [0, 5], [2, 4], [2**31 - 1, -3]], dtype=dtype))
        for layer, view in itertools.product(range(3), ("k_cache", "v_cache")):
            source, to = getattr(src, view)(layer), getattr(dst, view)(layer)
            assert torch.equal(to[[0, 4]], source[[5, 2]])
            assert not to[1:4].any()
        assert device_pairs.runtime.skipped_writes("cpu") - before == 2 * 3 * 2, "two pairs, in each layer's keys and values"
