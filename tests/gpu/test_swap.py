"""Swaps between a GPU and host memory: both ways, on a side stream with its order, and on a device that is not the current one."""

from __future__ import annotations

import itertools

import pytest
import torch

import kvdock
from kvdock.cache.swapping import Swapper, host_cache
from kvdock_conformance import reference

BLOCKS, LAYERS = 64, 4
SPEC = kvdock.KVSpec.uniform(num_layers=LAYERS, num_kv_heads=8, head_dim=128, max_positions=4096, dtype=torch.bfloat16)
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two GPUs")


def caches(device: str, layout: kvdock.KVCacheLayout = kvdock.KVCacheLayout.LAYER_FIRST) -> tuple[kvdock.PagedKVCache, kvdock.PagedKVCache]:
    """Return a cache of random numbers on a device, and one in page-locked host memory."""
    cache = kvdock.create_cache(SPEC, kvdock.PagedKVCacheConfig(num_blocks=BLOCKS, layout=layout), kvdock.RankInfo(device))
    for layer in range(LAYERS):
        cache.k_cache(layer).normal_()
        cache.v_cache(layer).normal_()
    host = host_cache(cache, num_blocks=2 * BLOCKS)
    assert host.host_pages is not None
    assert host.host_pages.wait(60)
    assert host.k_cache(0).is_pinned()
    assert host.v_cache(LAYERS - 1).is_pinned()
    return cache, host


def same(one: kvdock.PagedKVCache, a: int, other: kvdock.PagedKVCache, b: int) -> bool:
    views = [(getattr(one, name)(i)[a], getattr(other, name)(i)[b]) for i in range(LAYERS) for name in ("k_cache", "v_cache")]
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in views)


@pytest.mark.parametrize("source", ["cuda", "pinned", "pageable"])
@pytest.mark.parametrize("to", ["cuda", "pinned", "pageable"])
def test_the_op_against_the_reference(source: str, to: str) -> None:
    for (number, order), dtype in itertools.product(enumerate([(0, 1, 2, 3), (0, 2, 1, 3)]), [torch.bfloat16, torch.uint8, torch.float64]):
        pools = []
        for where, dims, blocks in ((source, order, 37), (to, (0, 1, 2, 3), 41)):
            shape = [(blocks, 16, 5, 46 + number)[dim] for dim in dims]
            bits = torch.randint(0, 255, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)
            pool = bits.cuda() if where == "cuda" else bits.pin_memory() if where == "pinned" else bits
            pools.append(pool.permute(*map(dims.index, range(4))))
        pairs = torch.stack([torch.randint(0, 37, (41,)), torch.randperm(41)], 1)[:30]
        pairs[4] = -1
        for index in (pairs, pairs.int(), *([pairs.cuda()] if "cuda" in (source, to) else [])):
            expected = [pool.cpu().clone() for pool in pools]
            reference.swap_blocks_(*expected, pairs)
            kvdock.ops.swap_blocks_(*pools, index)
            torch.cuda.synchronize()
            assert all(
                torch.equal(pool.cpu().view(torch.uint8), twin.view(torch.uint8)) for pool, twin in zip(pools, expected, strict=True)
            )


@pytest.mark.parametrize("layout", kvdock.KVCacheLayout)
def test_there_and_back_again_through_a_cache(layout: kvdock.KVCacheLayout) -> None:
    cache, host = caches("cuda", layout)
    cache.swap_blocks(host, [(n, 2 * BLOCKS - 1 - n) for n in range(BLOCKS)])
    torch.cuda.synchronize()
    assert all(same(cache, n, host, 2 * BLOCKS - 1 - n) for n in range(BLOCKS))
    host.swap_blocks(cache, [(2 * BLOCKS - 1, 5), (BLOCKS, 6)])
    torch.cuda.synchronize()
    assert same(host, 2 * BLOCKS - 1, cache, 5)
    assert same(host, BLOCKS, cache, 6)


@pytest.mark.parametrize("device", ["cuda:0", pytest.param("cuda:1", marks=two_gpus)])
def test_a_side_stream_waits_for_who_wrote_and_is_waited_for(device: str) -> None:
    """The current device is 0 throughout, and the host goes on at once."""
    cache, host = caches(device)
    swapper = Swapper()
    swapper.swap(cache, host, [(0, 0)]).synchronize()  # what is prepared at a first call
    swapper.swap(host, cache, [(0, 1)]).synchronize()
    torch.cuda.synchronize(device)
    stream = torch.cuda.current_stream(device)
    with torch.cuda.device(device):
        torch.cuda._sleep(400_000_000)  # about 0.2 s
    for layer in range(LAYERS):
        cache.k_cache(layer)[3].fill_(layer + 1)
        cache.v_cache(layer)[3].fill_(-1)
    out = swapper.swap(cache, host, [(3, 7)])
    assert not out.ready(), "it waits for what wrote the block, and the host does not"
    assert not stream.query()
    back = swapper.swap(host, cache, [(7, 9)])
    back.wait()
    doubled = cache.k_cache(2)[9] * 2
    back.synchronize()
    assert out.ready(), "swaps follow each other"
    torch.cuda.synchronize(device)
    assert bool((doubled == 6).all())
    assert bool((host.k_cache(1)[7] == 2).all() and (host.v_cache(1)[7] == -1).all())
    assert torch.cuda.current_device() == 0


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_swap_with_locked_memory_synchronises() -> None:
    cache, host = caches("cuda")
    pairs = torch.tensor([[n, n] for n in range(40)])
    for one, other in ((cache, host), (host, cache)):
        one.swap_blocks(other, pairs)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for index in (pairs, pairs.cuda(non_blocking=True), pairs.int()):
            cache.swap_blocks(host, index)
            host.swap_blocks(cache, index)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def test_a_block_beyond_is_skipped_and_counted() -> None:
    cache, host = caches("cuda")
    before = kvdock.runtime.default().skipped_writes("cuda")
    cache.swap_blocks(host, torch.tensor([[0, 2 * BLOCKS], [BLOCKS, 0], [1, 1], [-1, 5]], device="cuda"))
    torch.cuda.synchronize()
    assert same(cache, 1, host, 1)
    assert kvdock.runtime.default().skipped_writes("cuda") - before == 4, "of keys and of values"


def test_swaps_can_be_captured() -> None:
    cache, host = caches("cuda")
    pairs = torch.tensor([[0, 1]], device="cuda")
    cache.swap_blocks(host, pairs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.swap_blocks(host, pairs)
    pairs.copy_(torch.tensor([[4, 9]]))
    graph.replay()
    torch.cuda.synchronize()
    assert same(cache, 4, host, 9)
