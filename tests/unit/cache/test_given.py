"""Caches in memory that an engine owns: what they are in, what they leave alone, and what is refused."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import kvdock
from kvdock.cache.mixed import MixedKVCache
from kvdock.layers import SharedLayerSpec
from support_caches import CPU, RUNTIMES, bits, counting_runtime, random_bits, read_slots, runtime_for, write_slots
from support_mixed import guarded

F32 = torch.float32
BLOCKS, BLOCK, K_HEADS, V_HEADS, K_DIM, V_DIM = 5, 4, 2, 3, 8, 6
LAYER = kvdock.LayerSpec(K_HEADS, V_HEADS, K_DIM, V_DIM)
SPEC = kvdock.KVSpec((LAYER, LAYER, SharedLayerSpec(0)), 64, F32)
LATENTS = kvdock.KVSpec((kvdock.MLALayerSpec(16, 4),) * 2, 64, F32)
GROUPS = kvdock.KVSpec((LAYER, kvdock.LayerSpec(K_HEADS, V_HEADS, K_DIM, V_DIM, window=4)), 64, F32)

CONFIG = kvdock.PagedKVCacheConfig(num_blocks=BLOCKS, block_size=BLOCK)
HND = kvdock.PagedKVCacheConfig(num_blocks=BLOCKS, block_size=BLOCK, head_layout=kvdock.HeadLayout.HND)


def engine(
    config: kvdock.PagedKVCacheConfig = CONFIG, heads: tuple[int, ...] = (K_HEADS, V_HEADS), dims: tuple[int, ...] = (K_DIM, V_DIM)
) -> Any:
    """Return an engine's tensors of one layer, of random bits."""
    found = []
    for number, (count, dim) in enumerate(zip(heads, dims, strict=True)):
        nhd = config.head_layout is kvdock.HeadLayout.NHD
        pool = random_bits((BLOCKS, BLOCK, count, dim) if nhd else (BLOCKS, count, BLOCK, dim), F32, number)
        found.append(pool if nhd else pool.transpose(1, 2))
    return tuple(found)


def given(tensors: Any, spec: kvdock.KVSpec = SPEC, config: kvdock.PagedKVCacheConfig = CONFIG, ops: Any = None) -> kvdock.PagedKVCache:
    return kvdock.PagedKVCache.from_tensors(spec, config, CPU, tensors, ops=ops or runtime_for(RUNTIMES[0]).dispatcher)


def interleaved(config: kvdock.PagedKVCacheConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of one layer in one tensor, block by block, with room between blocks, as some engines have them."""
    k_elements, v_elements = BLOCK * K_HEADS * K_DIM, BLOCK * V_HEADS * V_DIM
    whole = random_bits((BLOCKS, k_elements + v_elements + 16), F32, 5)
    order = (BLOCK, K_HEADS), (BLOCK, V_HEADS)
    parts = whole[:, :k_elements], whole[:, k_elements : k_elements + v_elements]
    if config.head_layout is kvdock.HeadLayout.NHD:
        return parts[0].view(BLOCKS, *order[0], K_DIM), parts[1].view(BLOCKS, *order[1], V_DIM)
    k, v = parts[0].view(BLOCKS, K_HEADS, BLOCK, K_DIM), parts[1].view(BLOCKS, V_HEADS, BLOCK, V_DIM)
    return k.transpose(1, 2), v.transpose(1, 2)


WAYS: dict[str, Callable[[kvdock.PagedKVCacheConfig], Any]] = {
    "each its own": lambda config: [engine(config), engine(config), None],
    "interleaved": lambda config: [interleaved(config), interleaved(config), None],
    "the same again where it is shared": lambda config: (lambda first: [first, engine(config), first])(engine(config)),
}


def around(tensors: list[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the storages of tensors, and a copy of what is in them."""
    found = [tensor.untyped_storage() for pair in tensors if pair for tensor in pair]
    whole = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in found]  # type: ignore[call-overload] # the stub has no storages
    return [(each, each.clone()) for each in whole]


@pytest.mark.parametrize("config", [CONFIG, HND], ids=["nhd", "hnd"])
@pytest.mark.parametrize("way", WAYS)
def test_tensors_of_each_layer(way: str, config: kvdock.PagedKVCacheConfig, ops: kvdock.OpDispatcher) -> None:
    tensors = WAYS[way](config)
    storages = around(tensors)
    cache = given(tensors, SPEC, config, ops)
    assert type(cache) is kvdock.PagedKVCache
    assert all(torch.equal(now, before) for now, before in storages), "nothing is zeroed"
    for layer in (0, 1, 2):
        assert (cache.k_cache(layer), cache.v_cache(layer)) == tensors[layer if tensors[layer] else 0], "the engine's own tensors"
    models = [[bits(tensor).clone() for tensor in tensors[layer]] for layer in (0, 1)]
    slots = torch.tensor([3, -1, 17, 0])
    for layer in (0, 1, 2):
        new = [random_bits((4, heads, dim), F32, layer) for heads, dim in ((K_HEADS, K_DIM), (V_HEADS, V_DIM))]
        cache.update(layer, new[0], new[1], slots)
        models[layer % 2] = [write_slots(model, bits(part), slots) for model, part in zip(models[layer % 2], new, strict=True)]
        for model, got in zip(models[layer % 2], cache.gather(layer, slots), strict=True):
            assert torch.equal(bits(got), read_slots(model, slots))
    cache.copy_blocks([(0, 2), (4, 1)])
    for model in (each for pair in models for each in pair):
        model[2], model[1] = model[0].clone(), model[4].clone()
    for layer in (0, 1):
        assert all(torch.equal(bits(tensor), model) for tensor, model in zip(tensors[layer], models[layer], strict=True))
    mine = [tensor for layer in (0, 1) for tensor in tensors[layer]]
    twin = copy.deepcopy(cache)
    cache.reset()
    assert not any(tensor.any() for tensor in mine)
    for now, before in storages:
        places = torch.zeros(now.nbytes, dtype=torch.bool)
        for tensor in mine:
            if tensor.untyped_storage().data_ptr() == now.data_ptr():
                mask = torch.zeros(now.nbytes // 4, dtype=torch.int32)
                mask.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(-1)
                places |= mask.view(torch.uint8) != 0
        assert torch.equal(now[~places], before[~places]), "bytes between blocks are somebody else's"
    for layer in (0, 1, 2):
        for view, model in zip((twin.k_cache(layer), twin.v_cache(layer)), models[layer % 2], strict=True):
            assert torch.equal(bits(view), model), "a copy has what the cache had"
            assert view.stride()[1:] == mine[0 if view.shape[2] == K_HEADS else 1].stride()[1:]
    assert sum(region.nbytes for region in twin.memory_regions()) == twin.nbytes == cache.nbytes


@pytest.mark.parametrize(
    "rows", [lambda pool: pool, lambda pool: pool.squeeze(2), lambda pool: (pool,)], ids=["4 dims", "3 dims", "in a tuple"]
)
def test_latents_of_each_layer(rows: Callable[[torch.Tensor], Any], ops: kvdock.OpDispatcher) -> None:
    pools = [random_bits((BLOCKS, BLOCK, 1, 20), F32, seed) for seed in range(2)]
    cache = given([rows(pool) for pool in pools], LATENTS, ops=ops)
    assert isinstance(cache, kvdock.MLAKVCache)
    models = [bits(pool).clone() for pool in pools]
    slots, new = torch.tensor([7, -1, 2]), random_bits((3, 20), F32, 9)
    for layer in range(2):
        assert cache.kv_cache(layer).data_ptr() == cache.v_cache(layer).data_ptr() == pools[layer].data_ptr()
        assert cache.buffers(layer)["kv"].shape == (BLOCKS, BLOCK, 20)
        cache.update(layer, new[:, :16], new[:, 16:], slots)
        models[layer] = write_slots(models[layer], bits(new).unsqueeze(1), slots)
    cache.copy_blocks([(1, 4)])
    twin = copy.deepcopy(cache)
    for layer, model in enumerate(models):
        model[4] = model[1]
        assert torch.equal(bits(pools[layer]), model)
        assert torch.equal(bits(twin.k_cache(layer)), model)
        assert twin.v_cache(layer).data_ptr() == twin.k_cache(layer).data_ptr() != pools[layer].data_ptr()


def test_two_pools_of_all_layers(ops: kvdock.OpDispatcher) -> None:
    spec = kvdock.KVSpec.uniform(num_layers=3, num_kv_heads=2, head_dim=8, max_positions=64, dtype=F32)
    k_pool, v_pool = (random_bits((3, BLOCKS, BLOCK, 2, 8), F32, seed) for seed in (1, 2))
    cache = given(zip(k_pool, v_pool, strict=True), spec, ops=ops)
    cache.update(2, torch.ones(1, 2, 8), torch.ones(1, 2, 8), torch.tensor([19]))
    assert (k_pool[2, 4, 3] == 1).all()
    assert (v_pool[2, 4, 3] == 1).all()
    assert [len(region.places) for region in cache.memory_regions()] == [3, 3], "one region for each of the engine's storages"
    assert {region.address for region in cache.memory_regions()} == {k_pool.data_ptr(), v_pool.data_ptr()}


@pytest.mark.parametrize("spec", [SPEC, LATENTS, GROUPS], ids=["keys and values", "latents", "groups"])
@pytest.mark.parametrize("dims", [1, 2])
def test_one_buffer_for_all(spec: kvdock.KVSpec, dims: int, ops: kvdock.OpDispatcher) -> None:
    plan = kvdock.plan_blocks(spec, CONFIG, CPU, in_one_memory=True)
    whole, memory = guarded(plan.nbytes + (100 if dims == 1 else 0))
    before = whole.copy()
    cache = given(memory if dims == 1 else memory.view(BLOCKS, plan.bytes_per_block), spec, ops=ops)
    made = kvdock.create_cache(spec, CONFIG, CPU, ops=ops)
    assert type(cache) is type(made)
    assert np.array_equal(whole, before)
    for layer in range(cache.num_layers):
        for one, other in zip(cache.buffers(layer).values(), made.buffers(layer).values(), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
    (region,) = cache.memory_regions()
    assert (region.address, region.nbytes) == (memory.data_ptr(), plan.nbytes)
    assert (cache.nbytes, cache.num_blocks) == (plan.nbytes, BLOCKS)
    cache.reset()
    begin = memory.data_ptr() - whole.ctypes.data
    before[begin : begin + plan.nbytes] = 0
    assert np.array_equal(whole, before)


def test_a_copy_is_as_large_as_the_cache_and_not_as_the_engines_memory() -> None:
    plan = kvdock.plan_blocks(GROUPS, CONFIG, CPU, in_one_memory=True)
    engine_memory = torch.zeros(100 * plan.nbytes, dtype=torch.uint8)
    twin = copy.deepcopy(given(engine_memory[: plan.nbytes], GROUPS))
    assert twin.k_cache(0).untyped_storage().nbytes() < 2 * plan.nbytes


def test_the_engines_memory_outlives_the_cache_and_is_let_go_with_both(ops: kvdock.OpDispatcher) -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    memory = torch.zeros(kvdock.plan_blocks(GROUPS, CONFIG, CPU, in_one_memory=True).nbytes, dtype=torch.uint8)
    gone = StorageWeakRef(memory.untyped_storage())
    cache = given(memory, GROUPS, ops=ops)
    view = weakref.ref(cache.k_cache(0))
    cache.update(0, torch.ones(1, K_HEADS, K_DIM), torch.ones(1, V_HEADS, V_DIM), torch.tensor([0]))
    gc.disable()
    try:
        del cache
        assert view() is None
        assert memory.any(), "kvdock frees nothing of the engine's"
        del memory
        assert gone.expired()
    finally:
        gc.enable()


def test_backends_are_asked_for_first() -> None:
    runtime, calls = counting_runtime("only")
    cache = given([engine(), engine(), None], ops=runtime.dispatcher)
    cache.copy_blocks([(0, 1)])
    assert dict(calls) == {("only", "copy_blocks_"): 2}, "tensors of each layer are copied layer by layer"
    assert isinstance(given(torch.zeros(2**16, dtype=torch.uint8), GROUPS), MixedKVCache)


def shifted(nbytes: int) -> torch.Tensor:
    """Return a buffer whose address is a multiple of 16 and 1."""
    return guarded(nbytes + 16)[1][1 : nbytes + 1]


def strided(shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(10_000).as_strided(shape, strides)


K, V = engine()
ONE = torch.zeros(BLOCKS * BLOCK * 2 * (K_HEADS * K_DIM + V_HEADS * V_DIM) * 4, dtype=torch.uint8)
with torch.inference_mode():
    INFERRED = torch.zeros_like(K)

Error = type[kvdock.KVDockError]
BAD: dict[str, tuple[Any, Error, str]] = {
    "nothing": (7, kvdock.ArgumentTypeError, r"from_tensors: tensors: expected one uint8 tensor, or an entry for each layer, got 7"),
    "too few layers": ([(K, V)], kvdock.ArgumentValueError, r"tensors: expected 3 entries, one a layer, got 1. Fix: .*None for one that"),
    "one tensor of two": ([K, K, None], kvdock.ArgumentValueError, r"tensors\[0\]: expected 2 tensor\(s\): k, v, got 1. Fix: pass them in"),
    "no tensor": ([(K, None), (K, V), None], kvdock.ArgumentTypeError, r"tensors\[0\]: v: expected a torch.Tensor with strides, got None"),
    "other tensors for a shared layer": (
        [engine(), engine(), engine()],
        kvdock.ArgumentValueError,
        r"tensors\[2\]: expected None, or what layer 0 has: layer 2 reads that, got other tensors. Fix: leave it out",
    ),
    "another dtype": (
        [(K.half(), V), engine(), None],
        kvdock.ArgumentTypeError,
        r"\[0\]: k: expected torch.float32, got torch.float16. Fix:",
    ),
    "another device": (
        [(K.to("meta"), V), engine(), None],
        kvdock.ArgumentValueError,
        r"\[0\]: k: expected memory on cpu, got meta. Fix: allocate it there, or name its device in RankInfo",
    ),
    "swapped": (
        [(V, K), engine(), None],
        kvdock.ArgumentValueError,
        r"\[0\]: k: expected \[5, 4, 2, 8\], got \[5, 4, 3, 6\]. Fix: pass \[num_b",
    ),
    "a block more": ([(torch.zeros(6, 4, 2, 8), V), engine(), None], kvdock.ArgumentValueError, r"k: expected \[5, 4, 2, 8\], got \[6, 4"),
    "heads first": (
        [engine(HND), engine(), None],
        kvdock.ArgumentValueError,
        r"\[0\]: k: expected strides \[16, 8, 1\] within a block: NHD, dense, got strides \[8, 32, 1\]. Fix: .*head_layout",
    ),
    "gaps in a block": (
        [(strided((5, 4, 2, 8), (128, 32, 16, 1)), V), engine(), None],
        kvdock.ArgumentValueError,
        r"k: expected strides \[16, 8, 1\] within a block: NHD, dense, got strides \[32, 16, 1\]",
    ),
    "blocks over one another": (
        [(strided((5, 4, 2, 8), (32, 16, 8, 1)), V), engine(), None],
        kvdock.ArgumentValueError,
        r"k: expected blocks at least 64 elements apart, and a multiple of 1 bytes, got 128 bytes. Fix: give blocks room",
    ),
    "one twice": (
        [(K, V), (K, engine()[1]), None],
        kvdock.ArgumentValueError,
        r"tensors\[1\]: k: expected memory apart from .*tensors\[0\]: k, got 0x\w+ and 0x\w+, which share bytes. Fix: give each buffer",
    ),
    "of inference mode": (
        [(INFERRED, V), engine(), None],
        kvdock.ArgumentValueError,
        r"k: expected a plain tensor.*got a tensor of torch.infer",
    ),
    "with gradients": (
        [(K.clone().requires_grad_(), V), engine(), None],
        kvdock.ArgumentValueError,
        "got one that requires gradients. Fix:",
    ),
    "a sparse one": ([(K.to_sparse(), V), engine(), None], kvdock.ArgumentTypeError, r"k: expected a torch.Tensor with strides"),
    "a buffer of floats": (
        torch.zeros(10_000),
        kvdock.ArgumentTypeError,
        r"tensors: expected torch.uint8, got torch.float32. Fix: .*\.view",
    ),
    "a buffer one byte short": (
        ONE[:-1],
        kvdock.ArgumentValueError,
        r"tensors: expected \[5, 1088\] contiguous bytes, .*at least 5440 in one dim, got shape \[5439\], .* Fix: ask kvdock.plan_blocks",
    ),
    "a buffer of other blocks": (
        ONE.view(4, -1),
        kvdock.ArgumentValueError,
        r"expected \[5, 1088\] contiguous bytes, .*got shape \[4, 1360\]",
    ),
    "a buffer with gaps": (
        torch.zeros(5, 2000, dtype=torch.uint8)[:, :1088],
        kvdock.ArgumentValueError,
        r"got shape \[5, 1088\], strides \[20",
    ),
    "a buffer at an odd address": (
        shifted(5440),
        kvdock.ArgumentValueError,
        r"expected an address that is a multiple of 16, got 0x\w+1. Fix: al",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_named_with_what_would(name: str) -> None:
    tensors, error, text = BAD[name]
    with pytest.raises(error, match=text):
        given(tensors)


def test_tensors_of_layers_have_one_kind_and_one_rule() -> None:
    with pytest.raises(
        kvdock.UnsupportedError, match=r"expected layers of one kind and one rule .*KeepAll\(\), KeepWindow.*one uint8 tensor"
    ):
        given([engine(), engine()], GROUPS)
    keep_all = kvdock.PagedKVCacheConfig(num_blocks=BLOCKS, block_size=BLOCK, keep_all=True)
    assert len(given([engine(), engine()], GROUPS, keep_all).groups) == 1


def test_alignment_is_asked_of_given_memory() -> None:
    config = kvdock.PagedKVCacheConfig(num_blocks=BLOCKS, block_size=BLOCK, alignment=4096)
    with pytest.raises(
        kvdock.ArgumentValueError, match=r"expected (an address that is a multiple of 4096|blocks .* a multiple of 4096 bytes)"
    ):
        given([engine(), engine(), None], config=config)
    plan = kvdock.plan_blocks(GROUPS, config, CPU, in_one_memory=True)
    assert plan.bytes_per_block % 4096 == 0
    _, memory = guarded(plan.nbytes + 64, 4096)
    assert given(memory, GROUPS, config).memory_regions()[0].address % 4096 == 0
    with pytest.raises(kvdock.ArgumentValueError, match="an address that is a multiple of 4096"):
        given(memory[64:], GROUPS, config)


def test_a_slice_of_an_odd_storage_is_refused() -> None:
    raw, _ = guarded(8192)
    odd = torch.from_numpy(raw[-raw.ctypes.data % 16 + 1 :])
    with pytest.raises(
        kvdock.ArgumentValueError, match=r"begins at a multiple of 16 of its storage, got byte 15. Fix: wrap the address itself"
    ):
        given(odd[15 : 15 + 5440])


@pytest.mark.parametrize("name", ["spec", "config", "rank"])
def test_arguments_of_another_type(name: str) -> None:
    arguments: dict[str, Any] = {"spec": SPEC, "config": CONFIG, "rank": CPU, name: kvdock.StaticKVCacheConfig()}
    with pytest.raises(kvdock.ArgumentTypeError, match=rf"from_tensors: {name}: expected a \w+, got StaticKVCacheConfig"):
        kvdock.PagedKVCache.from_tensors(**arguments, tensors=ONE)
