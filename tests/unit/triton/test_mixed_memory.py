"""Layers of several kinds in one memory, by the interpreted kernels beside the portable ones: the same bytes everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvdock
from kvdock.layers import Buffer, OpaqueLayerSpec, StateLayerSpec
from opskit import Target
from support_caches import CPU, random_bits, runtime_for
from support_mixed import config_of, guarded

BF16, F32 = torch.bfloat16, torch.float32
WIDE = (
    kvdock.LayerSpec(2, 1, 16, 32, 4),
    kvdock.LayerSpec(2, 1, 16, 32),
    StateLayerSpec([Buffer("a", (16, 8), BF16), Buffer("b", (64,), F32)]),
)
ODD = (kvdock.LayerSpec(1, 3, 5, 7, 4), kvdock.LayerSpec(2, 1, 3, 1), OpaqueLayerSpec(13), kvdock.MLALayerSpec(6, 3))


def caches(layers: Any, target: Target, **options: Any) -> list[tuple[kvdock.PagedKVCache, Any]]:
    """Return a cache of each kind of kernels, in equal memory with bytes around it."""
    spec, config = kvdock.KVSpec(layers, 4096, BF16), config_of({"num_blocks": 4, "block_size": 2, **options})
    nbytes = kvdock.plan_blocks(spec, config, CPU, in_one_memory=True).nbytes
    found = []
    for runtime in (target.runtime, runtime_for("portable")):
        whole, memory = guarded(nbytes)
        with kvdock.use_backend("acme" if runtime is target.runtime else "portable"):
            found.append((kvdock.PagedKVCache.from_tensors(spec, config, CPU, memory, ops=runtime.dispatcher), whole))
    return found


@pytest.mark.parametrize("heads", kvdock.HeadLayout)
@pytest.mark.parametrize("layers", [WIDE, ODD], ids=["wide", "odd"])
def test_writes_reads_and_copies_of_whole_blocks(layers: Any, heads: kvdock.HeadLayout, target: Target) -> None:
    both, fallbacks = caches(layers, target, head_layout=heads), dict(target.runtime.dispatcher.fallbacks)
    (one, memory), (other, expected) = both
    begin = one.memory_regions()[0].address - memory.ctypes.data
    other_begin = other.memory_regions()[0].address - expected.ctypes.data

    def compare() -> None:
        nbytes = one.nbytes
        assert (memory[begin : begin + nbytes] == expected[other_begin : other_begin + nbytes]).all()
        assert (memory[:begin] == untouched[:begin]).all()
        assert (memory[begin + nbytes :] == untouched[begin + nbytes :]).all()

    untouched = memory.copy()
    for number, layer in enumerate(layers):
        if isinstance(layer, kvdock.LayerSpec):
            dims = ((layer.num_k_heads, layer.k_dim), (layer.num_v_heads, layer.v_dim))
        elif isinstance(layer, kvdock.MLALayerSpec):
            dims = ((layer.kv_lora_rank,), (layer.rope_dim,))
        else:
            continue
        slots = torch.tensor([5, -1, 0, 3])
        new = [random_bits((4, *each), BF16, number) for each in dims]
        for cache, _ in both:
            cache.update(number, new[0], new[1], slots)
        compare()
        for a, b in zip(one.gather(number, slots), other.gather(number, slots), strict=True):
            assert torch.equal(a.view(torch.int16), b.view(torch.int16))
        for cache, _ in both:
            cache.copy_blocks([(number, (number + 2) % 4), (-1, 0)])
            cache.copy_blocks(torch.tensor([[(number + 1) % 4, number]]))
        compare()
    assert dict(target.runtime.dispatcher.fallbacks) == fallbacks, "compiled kernels served it all"
