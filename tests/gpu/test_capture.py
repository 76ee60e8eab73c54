"""Graphs: captured once, replayed with other slots, padding and values."""

from __future__ import annotations

import pytest
import torch

import kvdock
from kvdock import BackendError, KVSpec, PagedKVCache, PagedKVCacheConfig, RankInfo


def make_cache() -> PagedKVCache:
    spec = KVSpec.uniform(num_layers=2, num_kv_heads=4, head_dim=64, max_positions=4096, dtype=torch.bfloat16)
    return kvdock.create_cache(spec, PagedKVCacheConfig(num_blocks=64), RankInfo("cuda:0"))


def rows(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, 4, 64, device="cuda").bfloat16()


def test_replay_with_other_slots_values_and_padding() -> None:
    cache, k, v = make_cache(), rows(6), rows(6)
    slots = torch.arange(6, device="cuda")
    cache.update(0, k, v, slots)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.update(0, k, v, slots)
    cache.reset()
    for step, new in enumerate(([700, 3, 41, 5, 6, 1023], [9, -1, 8, -5, 7, -1])):
        cache.reset()
        k.copy_(rows(6))
        v.copy_(rows(6))
        slots.copy_(torch.tensor(new))
        graph.replay()
        torch.cuda.synchronize()
        live = torch.tensor([slot >= 0 for slot in new], device="cuda")
        expected = torch.zeros_like(cache.k_cache(0)).flatten(0, 1)
        expected[slots[live]] = k[live]
        assert torch.equal(cache.k_cache(0).flatten(0, 1), expected), step
        assert torch.equal(cache.v_cache(0).flatten(0, 1)[slots[live]], v[live])


def test_a_new_signature_under_capture_says_to_warm_up() -> None:
    cache, graph = make_cache(), torch.cuda.CUDAGraph()
    k, v, slots = rows(3).view(1, 3, 4, 64), rows(3).view(1, 3, 4, 64), torch.arange(3, device="cuda").view(1, 3)
    other = torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        other.add_(1)
        with pytest.raises(BackendError, match="warm up first"):
            cache.update(1, k, v, slots)
    graph.replay()
    torch.cuda.synchronize()
    assert other.item() == 1
    assert not cache.k_cache(1).any()


def test_a_captured_call_survives_eviction() -> None:
    cache, k, v, slots = make_cache(), rows(4), rows(4), torch.arange(4, device="cuda")
    cache.update(0, k, v, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.update(0, k, v, slots)
    kvdock.runtime.default().dispatcher.descriptors.clear()
    for heads in range(1, 5):  # other signatures take its place
        pool = torch.zeros(4, 16, heads, 64, dtype=torch.bfloat16, device="cuda")
        kvdock.ops.paged_caching_(pool, pool.clone(), rows(4)[:, :heads], rows(4)[:, :heads], slots)
    cache.reset()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(cache.k_cache(0).flatten(0, 1)[:4], k)


def test_static_lengths_on_the_device_can_be_replayed() -> None:
    spec = KVSpec.uniform(num_layers=1, num_kv_heads=2, head_dim=64, max_positions=32, dtype=torch.float16)
    cache = kvdock.create_cache(spec, kvdock.StaticKVCacheConfig(max_batch_size=3), RankInfo("cuda:0"))
    k, v = (torch.randn(3, 2, 1, 64, device="cuda").half() for _ in range(2))
    lengths = torch.tensor([0, 5, 31], device="cuda")
    cache.update(0, k, v, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.update(0, k, v, lengths)
    cache.reset()
    before = kvdock.runtime.default().skipped_writes("cuda:0")
    lengths.copy_(torch.tensor([3, 32, -1]))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(cache.k_cache(0)[0, :, 3], k[0, :, 0])
    assert not cache.k_cache(0)[1:].any()
    assert kvdock.runtime.default().skipped_writes("cuda") == before + 2
