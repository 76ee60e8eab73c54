"""Layers of several kinds in one memory, by compiled kernels: the same bytes as portable ones leave, attention, graphs, addresses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import kvdock
from kvdock.layers import Buffer, StateLayerSpec
from kvdock_conformance import reference

BF16, DEVICE = torch.bfloat16, "cuda"
WINDOWED, FULL = kvdock.LayerSpec(8, 8, 64, 64, window=128), kvdock.LayerSpec(8, 8, 64, 64)
STATE = StateLayerSpec([Buffer("conv", (1024, 4), BF16), Buffer("recurrent", (8, 64, 64), torch.float32)])
LAYERS = (WINDOWED, WINDOWED, STATE, FULL, kvdock.MLALayerSpec(512, 64))
SPEC = kvdock.KVSpec(LAYERS, 8192, BF16)
RANK = kvdock.RankInfo(DEVICE)
BLOCKS = 24
BOUND = 8e-3
"""Of the norm of what differs from float64, to that of the result."""


def config(**how: Any) -> kvdock.PagedKVCacheConfig:
    return kvdock.PagedKVCacheConfig(num_blocks=BLOCKS, block_size=16, **how)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def tokens(layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a layer writes of new tokens."""
    shapes = ((512,), (64,)) if isinstance(LAYERS[layer], kvdock.MLALayerSpec) else ((8, 64), (8, 64))
    return random(count, *shapes[0], seed=layer), random(count, *shapes[1], seed=layer + 9)


def size_of(cache: kvdock.PagedKVCache, layer: int) -> int:
    return cache.groups[cache.group_of(layer)].block_size


def used(cache: kvdock.PagedKVCache) -> list[int]:
    return [layer for layer in range(len(LAYERS)) if not isinstance(LAYERS[layer], StateLayerSpec)]


def write(cache: kvdock.PagedKVCache) -> None:
    """Write in every layer, to blocks that only its group has, and copy some."""
    for layer in used(cache):
        first = 4 * cache.group_of(layer)
        slots = first * size_of(cache, layer) + torch.arange(2 * size_of(cache, layer) - 3)
        cache.update(layer, *tokens(layer, len(slots)), slots.to(DEVICE))
    for number, view in enumerate(cache.state(2).values()):
        view[4 * cache.group_of(2)] = number + 1.5
    cache.copy_blocks([(0, BLOCKS - 1), (5, BLOCKS - 2)])
    cache.copy_blocks(torch.tensor([[BLOCKS - 1, BLOCKS - 3], [-1, 0], [8, BLOCKS - 4]], device=DEVICE))


@pytest.mark.parametrize("heads", kvdock.HeadLayout)
@pytest.mark.parametrize("keep_all", [False, True])
def test_the_same_bytes_as_the_portable_kernels_leave(heads: kvdock.HeadLayout, keep_all: bool) -> None:
    how = {"head_layout": heads, "keep_all": keep_all}
    nbytes = kvdock.plan_blocks(SPEC, config(**how), RANK, in_one_memory=True).nbytes
    found = []
    for backend in (None, "portable"):
        whole = torch.full((nbytes + 1024,), 0xA5, dtype=torch.uint8, device=DEVICE)
        make = lambda whole=whole: kvdock.PagedKVCache.from_tensors(SPEC, config(**how), RANK, whole[512 : 512 + nbytes])  # noqa: E731 - twice
        if backend is None:
            cache = make()
        else:
            with kvdock.use_backend(backend):
                cache = make()
        write(cache)
        found.append(whole.cpu())
    assert torch.equal(*found)
    assert (found[0][:512] == 0xA5).all()
    assert (found[0][-512:] == 0xA5).all()


def test_attention_by_the_table_of_each_group() -> None:
    cache = kvdock.create_cache(SPEC, config(), RANK)
    for layer in used(cache):
        size = size_of(cache, layer)
        for view in cache.buffers(layer).values():
            view.fill_(torch.nan)
        lens = (2 * size - 3, size // 2)
        table = torch.tensor([[7, 2], [11, 1 << 30]], dtype=torch.int32)
        slots = torch.cat([7 * size + torch.arange(size), 2 * size + torch.arange(size - 3), 11 * size + torch.arange(size // 2)])
        cache.update(layer, *tokens(layer, len(slots)), slots.to(DEVICE))
        width = cache.k_cache(layer).shape[3]
        q = random(2, 16, width, seed=5)
        window = getattr(LAYERS[layer], "window", None)
        got = cache.attend(layer, q, table.to(DEVICE), torch.tensor(lens, device=DEVICE), scale=width**-0.5, window=window)
        expected = torch.empty(got.shape, dtype=torch.float64)
        k, v = cache.k_cache(layer).cpu(), cache.v_cache(layer).cpu()
        args = (q.cpu(), k, v, table, torch.tensor(lens), None, None, None, 2, width**-0.5, True, window, None, expected, None)
        reference.paged_attention(*args)
        assert (got.cpu().double() - expected).norm() <= BOUND * expected.norm()


def test_a_step_over_all_groups_in_a_graph() -> None:
    cache = kvdock.create_cache(SPEC, config(), RANK)
    slots = {layer: torch.tensor([3, -1, 17], device=DEVICE) for layer in used(cache)}
    new = {layer: tokens(layer, 3) for layer in used(cache)}

    def step() -> None:
        for layer in used(cache):
            cache.update(layer, *new[layer], slots[layer])

    step()
    expected = [cache.k_cache(layer).clone() for layer in used(cache)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    cache.reset()
    graph.replay()
    assert all(torch.equal(cache.k_cache(layer), before) for layer, before in zip(used(cache), expected, strict=True))


@pytest.mark.parametrize("alignment", [1, 4096, 2**21])
def test_regions_are_where_the_device_has_them(alignment: int) -> None:
    cache = kvdock.create_cache(SPEC, config(alignment=alignment), RANK)
    (region,) = cache.memory_regions()
    assert region.device == cache.device
    assert region.address % alignment == 0
    twin = copy.deepcopy(cache)
    assert twin.memory_regions()[0].address % alignment == 0
    assert twin.memory_regions()[0].address != region.address
    for place in region.places:
        view = cache.buffers(place.layer)[place.name]
        assert view.data_ptr() == region.address + place.offset
        assert place.block(1).start == place.offset + view.stride(0) * view.element_size()
