"""The memory of a paged cache: how much, where each place lies, and what is in it at first."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

import kvdock
from kvdock.cache.pool import block_bytes, group_layers, rank_layers
from support_caches import CPU, LAYOUT_NAMES, LAYOUTS, SPECS, addresses, random_bits, tokens

GIB = 2**30


def make(spec: kvdock.KVSpec, ops: kvdock.OpDispatcher, rank: kvdock.RankInfo = CPU, **config: object) -> kvdock.PagedKVCache:
    return kvdock.create_cache(spec, kvdock.PagedKVCacheConfig(**config), rank, ops=ops)  # type: ignore[arg-type]


def test_the_budget_of_design_md_counts_all_layers() -> None:
    # 32 layers, 8 heads of 128 in bf16, blocks of 16: a budget per layer would take 32 times as much.
    spec = kvdock.KVSpec.uniform(num_layers=32, num_kv_heads=8, head_dim=128, max_positions=4096, dtype=torch.bfloat16)
    layers = rank_layers(spec, CPU)
    one_layer = 2 * 8 * 128 * 2 * 16
    assert one_layer == 64 * 1024
    assert block_bytes(layers.values(), 16, torch.bfloat16) == 32 * one_layer == 2 * 2**20
    config = kvdock.PagedKVCacheConfig(max_kv_memory_bytes=10 * GIB)
    blocks = config.blocks_for(32 * one_layer, len(layers))
    assert blocks == 5120
    assert blocks * 32 * one_layer == 10 * GIB
    assert 10 * GIB // one_layer * 32 * one_layer == 320 * GIB, "what dividing by one layer would take"


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_budget_gives_as_many_blocks_as_fit(name: str, tp_size: int, ops: kvdock.OpDispatcher) -> None:
    if name == "layers differ" and tp_size == 2:
        with pytest.raises(kvdock.ArgumentValueError, match="num_v_heads = 3 on tp_size = 2"):
            make(SPECS[name], ops, kvdock.RankInfo("cpu", 2, 1), num_blocks=1)
        return
    rank = kvdock.RankInfo("cpu", tp_size, tp_size - 1)
    one = make(SPECS[name], ops, rank, num_blocks=1, block_size=4).nbytes
    for budget, blocks in ((one, 1), (2 * one - 1, 1), (2 * one, 2), (7 * one + one // 2, 7)):
        cache = make(SPECS[name], ops, rank, max_kv_memory_bytes=budget, block_size=4)
        assert cache.num_blocks == blocks
        assert cache.nbytes == blocks * one <= budget


@pytest.mark.parametrize("name", SPECS)
def test_a_budget_one_byte_short_of_a_block_says_what_is_needed(name: str, ops: kvdock.OpDispatcher) -> None:
    needed = make(SPECS[name], ops, num_blocks=1).nbytes
    with pytest.raises(kvdock.CapacityError, match=rf"max_kv_memory_bytes: expected at least {needed} bytes.*got {needed - 1}\b") as caught:
        make(SPECS[name], ops, max_kv_memory_bytes=needed - 1)
    assert isinstance(caught.value, MemoryError)
    assert caught.value.got == needed - 1
    assert "smaller block_size" in str(caught.value.fix)


def test_a_budget_bounds_the_blocks_that_are_asked_for(ops: kvdock.OpDispatcher) -> None:
    spec = SPECS["layers differ"]
    one = make(spec, ops, num_blocks=1).nbytes
    cache = make(spec, ops, num_blocks=3, max_kv_memory_bytes=100 * one)
    assert cache.num_blocks == 3, "a budget is a bound, not a wish"
    assert make(spec, ops, num_blocks=3, max_kv_memory_bytes=3 * one).num_blocks == 3
    with pytest.raises(kvdock.CapacityError, match=rf"at least {3 * one} bytes.*3 block.*got {3 * one - 1}\b"):
        make(spec, ops, num_blocks=3, max_kv_memory_bytes=3 * one - 1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_NAMES)
@pytest.mark.parametrize("name", SPECS)
def test_nbytes_is_what_was_taken(name: str, layout: tuple[kvdock.KVCacheLayout, kvdock.HeadLayout], ops: kvdock.OpDispatcher) -> None:
    cache = make(SPECS[name], ops, num_blocks=5, block_size=3, layout=layout[0], head_layout=layout[1])
    views = [view(layer) for layer in range(cache.num_layers) for view in (cache.k_cache, cache.v_cache)]
    storages = {view.untyped_storage().data_ptr(): view.untyped_storage().nbytes() for view in views}
    assert cache.nbytes == sum(storages.values()) == sum(view.numel() * view.element_size() for view in views)


@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_NAMES)
@pytest.mark.parametrize("name", SPECS)
def test_keys_and_values_lie_in_separate_storages(
    name: str, layout: tuple[kvdock.KVCacheLayout, kvdock.HeadLayout], ops: kvdock.OpDispatcher
) -> None:
    cache = make(SPECS[name], ops, num_blocks=2, block_size=3, layout=layout[0], head_layout=layout[1])
    k = {cache.k_cache(i).untyped_storage().data_ptr() for i in range(cache.num_layers)}
    v = {cache.v_cache(i).untyped_storage().data_ptr() for i in range(cache.num_layers)}
    assert not k & v
    groups = len(group_layers(rank_layers(SPECS[name], CPU)))
    assert len(k) == len(v) == groups, "equal layers share a pool, so that blocks are copied in one launch"


@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_NAMES)
@pytest.mark.parametrize("name", SPECS)
def test_every_place_has_an_address_of_its_own(
    name: str, layout: tuple[kvdock.KVCacheLayout, kvdock.HeadLayout], ops: kvdock.OpDispatcher
) -> None:
    cache = make(SPECS[name], ops, num_blocks=3, block_size=4, layout=layout[0], head_layout=layout[1])
    found = torch.cat([addresses(view(i)).flatten() for i in range(cache.num_layers) for view in (cache.k_cache, cache.v_cache)])
    assert len(found.unique()) == len(found) == cache.nbytes // cache.dtype.itemsize


def test_what_lies_next_to_what_in_each_layout(ops: kvdock.OpDispatcher) -> None:
    layers, blocks, block, heads, dim = 3, 5, 4, 2, 8
    expected = {
        "layer_first-nhd": (blocks * block * heads * dim, (block * heads * dim, heads * dim, dim, 1)),
        "layer_first-hnd": (blocks * block * heads * dim, (block * heads * dim, dim, block * dim, 1)),
        "page_first-nhd": (block * heads * dim, (layers * block * heads * dim, heads * dim, dim, 1)),
        "page_first-hnd": (block * heads * dim, (layers * block * heads * dim, dim, block * dim, 1)),
    }
    for name, (layout, head_layout) in zip(LAYOUT_NAMES, LAYOUTS, strict=True):
        cache = make(SPECS["uniform"], ops, num_blocks=blocks, block_size=block, layout=layout, head_layout=head_layout)
        between_layers, strides = expected[name]
        for view in (cache.k_cache, cache.v_cache):
            assert view(0).shape == (blocks, block, heads, dim)
            assert view(0).stride() == strides
            assert view(1).data_ptr() - view(0).data_ptr() == between_layers * 4


@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_NAMES)
def test_memory_is_zero_at_first_and_after_reset(layout: tuple[kvdock.KVCacheLayout, kvdock.HeadLayout], ops: kvdock.OpDispatcher) -> None:
    spec = SPECS["layers differ"]
    # Leave NaN in memory that the allocator may hand out again.
    size = make(spec, ops, num_blocks=64).nbytes
    dirty = [torch.full((size // 8,), math.nan, dtype=torch.float64) for _ in range(4)]
    del dirty
    cache = make(spec, ops, num_blocks=64, layout=layout[0], head_layout=layout[1])
    views = [view(layer) for layer in range(cache.num_layers) for view in (cache.k_cache, cache.v_cache)]
    assert not any(view.view(torch.int16).any() for view in views), "not even -0"
    for layer in range(cache.num_layers):
        cache.update(layer, *tokens(spec, layer, (64 * 16,)), torch.arange(64 * 16))
    cache.copy_blocks([(0, 63)])
    assert all(view.view(torch.int16).any() for view in views)
    cache.reset()
    assert not any(view.view(torch.int16).any() for view in views)


def test_views_stay_the_same_and_valid_through_writes_and_reset(ops: kvdock.OpDispatcher) -> None:
    spec = SPECS["uniform"]
    cache = make(spec, ops, num_blocks=4)
    k_views, v_views = ([view(i) for i in range(3)] for view in (cache.k_cache, cache.v_cache))
    cache.update(1, *tokens(spec, 1, (2,)), torch.tensor([0, 1]))
    cache.reset()
    k, v = tokens(spec, 1, (2,), seed=5)
    k.fill_(3)
    v.fill_(4)
    cache.update(1, k, v, torch.tensor([0, 33]))
    assert all(cache.k_cache(i) is view for i, view in enumerate(k_views))
    assert all(cache.v_cache(i) is view for i, view in enumerate(v_views))
    assert (k_views[1][0, 0] == 3).all()
    assert (v_views[1][2, 1] == 4).all()
    assert int((k_views[1] != 0).sum()) == int((v_views[1] != 0).sum()) == 2 * 2 * 8
    assert not k_views[0].any()


def test_the_cache_says_what_it_is(ops: kvdock.OpDispatcher) -> None:
    cache = make(SPECS["layers differ"], ops, num_blocks=7, block_size=32)
    assert (cache.num_layers, cache.num_blocks, cache.block_size) == (5, 7, 32)
    assert cache.device == torch.device("cpu")
    assert cache.dtype == cache.k_cache(0).dtype == torch.float16
    assert isinstance(cache, kvdock.Cache)
    assert repr(cache) == f"PagedKVCache(5 layers, 7 blocks of 32, torch.float16, {cache.nbytes} bytes on cpu)"


def test_the_memory_goes_with_the_cache(ops: kvdock.OpDispatcher) -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    cache = make(SPECS["uniform"], ops, num_blocks=4)
    cache.update(0, *tokens(SPECS["uniform"], 0, (1,)), torch.tensor([5]))
    cache.copy_blocks([(0, 1)])
    cache.gather(0, torch.tensor([5]))
    storages = [StorageWeakRef(view(0).untyped_storage()) for view in (cache.k_cache, cache.v_cache)]
    assert not any(storage.expired() for storage in storages)
    del cache
    assert all(storage.expired() for storage in storages), "no plan, table or closure keeps a pool alive"


def test_float64_is_stored_bit_for_bit(ops: kvdock.OpDispatcher) -> None:
    spec = kvdock.KVSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=3, max_positions=8, dtype=torch.float64)
    cache = make(spec, ops, num_blocks=1)
    k = random_bits((2, 1, 3), torch.float64)
    cache.update(0, k, k.clone(), torch.tensor([4, 0]))
    assert torch.equal(cache.gather(0, torch.tensor([4, 0]))[0].view(torch.int64), k.view(torch.int64))


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no large pages")
def test_host_memory_is_to_be_in_large_pages(ops: kvdock.OpDispatcher) -> None:
    spec = kvdock.KVSpec.uniform(num_layers=2, num_kv_heads=8, head_dim=128, max_positions=4096, dtype=torch.float32)
    cache = make(spec, ops, num_blocks=512)
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]
    inside = cache.v_cache(1).data_ptr()
    (found,) = [entry for entry in maps if int(entry.split("-")[0], 16) <= inside < int(entry.split()[0].split("-")[1], 16)]
    assert " hg" in found.split("VmFlags:")[1].splitlines()[0]
