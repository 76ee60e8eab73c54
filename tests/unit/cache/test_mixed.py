"""A cache of several groups: what it says of them, what its layers compute, and what it refuses."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

import kvdock
from kvdock.cache.mixed import MixedKVCache
from kvdock.layers import Buffer, HybridLayerSpec, KeepAll, KeepState, KeepWindow, OpaqueLayerSpec, SharedLayerSpec, StateLayerSpec
from kvdock_conformance import reference
from support_caches import CPU, bits, counting_runtime, random_bits

BF16, F32 = torch.bfloat16, torch.float32
STATE = StateLayerSpec([Buffer("conv", (24, 4), BF16), Buffer("recurrent", (4, 16, 16), F32)])
FULL, WINDOW = kvdock.LayerSpec(2, 2, 16, 16), kvdock.LayerSpec(2, 2, 16, 16, window=8)
LAYERS = (WINDOW, FULL, STATE, kvdock.MLALayerSpec(32, 8), SharedLayerSpec(1), OpaqueLayerSpec(40), HybridLayerSpec([WINDOW, STATE]))
SPEC = kvdock.KVSpec(LAYERS, 4096, F32)
HEADS, LATENT, BYTES, BOTH = (0, 1, 4, 6), 3, 5, 6


def make(spec: kvdock.KVSpec = SPEC, ops: kvdock.OpDispatcher | None = None, **options: Any) -> kvdock.PagedKVCache:
    config = kvdock.PagedKVCacheConfig(**{"num_blocks": 6, "block_size": 4, **options})
    return kvdock.create_cache(spec, config, CPU, ops=ops)


def windows(*layers: kvdock.LayerSpec) -> kvdock.KVSpec:
    return kvdock.KVSpec(layers, 4096, F32)


def fill(cache: kvdock.PagedKVCache, seed: int = 0) -> None:
    """Put bits into every byte."""
    for pool in cache._store.pools:
        pool.memory.view(torch.uint8).copy_(random_bits(pool.memory.view(torch.uint8).shape, torch.uint8, seed))


def memory(cache: kvdock.PagedKVCache) -> list[torch.Tensor]:
    return [pool.memory.view(torch.uint8).clone() for pool in cache._store.pools]


def test_rules_decide_which_layers_share_a_table(ops: kvdock.OpDispatcher) -> None:
    cache = make(ops=ops)
    rules = [cache.groups[cache.group_of(layer, name)].retention for layer in range(7) for name in cache.buffers(layer)]
    kept = [KeepWindow(8)] * 2 + [KeepAll()] * 2 + [KeepState()] * 2 + [KeepAll()] * 4 + [KeepWindow(8)] * 2 + [KeepState()] * 2
    assert rules == kept
    assert cache.group_of(4) == cache.group_of(1), "a layer that shares another's is in its group"
    assert cache.buffers(4) == cache.buffers(1)
    assert [group.block_size for group in cache.groups if group.retention.is_state] == [1] * len(
        {cache.group_of(2), cache.group_of(6, "conv")}
    )
    assert all(group.block_size % 4 == 0 for group in cache.groups if not group.retention.is_state)
    assert (cache.num_layers, cache.num_blocks, cache.dtype, cache.device) == (7, 6, F32, torch.device("cpu"))
    assert isinstance(cache, MixedKVCache)
    assert repr(cache).startswith("MixedKVCache(7 layers, 6 blocks of ")


@pytest.mark.parametrize("window", [None, 8])
def test_one_rule_is_one_group_in_pools_by_layer_as_ever(window: int | None, ops: kvdock.OpDispatcher) -> None:
    layer = kvdock.LayerSpec(2, 2, 16, 16, window)
    cache = make(windows(layer, layer), ops)
    assert type(cache) is kvdock.PagedKVCache
    assert len(cache.groups) == 1
    assert cache.block_size == 4
    assert cache.k_cache(0).untyped_storage().data_ptr() != cache.v_cache(0).untyped_storage().data_ptr()
    assert cache.k_cache(1).data_ptr() - cache.k_cache(0).data_ptr() == cache.k_cache(0).nbytes, "layers first"


def test_all_tokens_can_be_kept_in_one_group(ops: kvdock.OpDispatcher) -> None:
    spec = windows(FULL, WINDOW, kvdock.LayerSpec(2, 2, 16, 16, 5, sinks=2))
    cache, plain = make(spec, ops, keep_all=True), make(windows(FULL, FULL, FULL), ops)
    assert type(cache) is kvdock.PagedKVCache
    assert [group.retention for group in cache.groups] == [KeepAll()]
    for layer in range(3):
        for view, other in ((cache.k_cache(layer), plain.k_cache(layer)), (cache.v_cache(layer), plain.v_cache(layer))):
            assert (view.shape, view.stride(), view.storage_offset()) == (other.shape, other.stride(), other.storage_offset())
    plan = kvdock.plan_blocks(spec, cache.config, CPU)
    assert (plan.groups, plan.nbytes) == (cache.groups, cache.nbytes)
    assert len(kvdock.plan_blocks(spec, kvdock.PagedKVCacheConfig(num_blocks=1), CPU).groups) == 3
    assert KeepState() in [group.retention for group in make(keep_all=True, ops=ops).groups], "a state is no token"


def test_one_size_of_blocks_is_not_told_where_each_group_has_a_table(ops: kvdock.OpDispatcher) -> None:
    cache = make(windows(FULL, WINDOW), ops)
    assert {group.block_size for group in cache.groups} == {4}, "of one size, and yet a slot of one group is none of another's"
    with pytest.raises(
        kvdock.ArgumentValueError, match=r"block_size: expected one group, got 2 groups, of blocks of 4, 4. Fix: .*keep_all"
    ):
        _ = cache.block_size


@pytest.mark.parametrize("heads", kvdock.HeadLayout)
def test_attention_reads_what_was_written_by_the_table_of_its_group(heads: kvdock.HeadLayout, ops: kvdock.OpDispatcher) -> None:
    cache = make(ops=ops, head_layout=heads)
    fill(cache)
    generator = torch.Generator().manual_seed(1)
    for layer in (*HEADS, LATENT):
        size = cache.groups[cache.group_of(layer, next(iter(cache.buffers(layer))))].block_size
        dims = ((32,), (8,)) if layer == LATENT else ((2, 16), (2, 16))
        new = [torch.randn(6, *each, generator=generator) for each in dims]
        table, lens = torch.tensor([[2, 5], [3, 0]], dtype=torch.int32), torch.tensor([4, 2])
        slots = torch.tensor([2 * size, 2 * size + 1, 2 * size + 2, 2 * size + 3, 3 * size, 3 * size + 1])
        assert cache.update(layer, *new, slots) == (cache.k_cache(layer), cache.v_cache(layer))
        q = torch.randn(2, 4, 40 if layer == LATENT else 16, generator=generator)
        got = cache.attend(layer, q, table, lens, scale=0.3, window=None if layer == LATENT else 3)
        expected = torch.empty(got.shape, dtype=torch.float64)
        k, v = cache.k_cache(layer), cache.v_cache(layer)
        window = None if layer == LATENT else 3
        reference.paged_attention(q, k, v, table, lens, None, None, None, 2, 0.3, True, window, None, expected, None)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
        out = tuple(torch.full_like(part, 7) for part in new)
        assert all(a is b for a, b in zip(cache.gather(layer, slots, (out[0], out[1])), out, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(out, new, strict=True))
    with pytest.raises(kvdock.ArgumentValueError, match="scale: expected a number"):
        cache.attend(LATENT, q, table, lens)


def test_what_a_layer_does_not_have_is_named(ops: kvdock.OpDispatcher) -> None:
    cache = make(ops=ops)
    one = torch.zeros(1, 2, 16)
    calls = (
        lambda layer: cache.update(layer, one, one, torch.tensor([0])),
        lambda layer: cache.gather(layer, torch.tensor([0])),
        lambda layer: cache.attend(layer, one, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([1])),
        cache.k_cache,
        cache.v_cache,
    )
    for call in calls:
        for layer, keeps in ((2, "conv, recurrent"), (BYTES, "bytes")):
            expected = rf"layer: expected one with keys and values, or latents, got layer {layer}, which keeps {keeps}. Fix: ask buffers"
            with pytest.raises(kvdock.ArgumentValueError, match=expected):
                call(layer)
        for wrong, error in ((7, kvdock.IndexRangeError), (-1, kvdock.IndexRangeError), (True, kvdock.ArgumentTypeError)):
            with pytest.raises(error, match="MixedKVCache: layer: expected"):
                call(wrong)
    with pytest.raises(kvdock.ArgumentValueError, match=r"state: layer: expected one that keeps a state, got layer 1, which keeps k, v"):
        cache.state(1)
    for wrong in (None, "x"):
        with pytest.raises(
            kvdock.ArgumentValueError, match=r"group_of: buffer: expected one of 'k', 'v', 'conv', 'recurrent', got .*several"
        ):
            cache.group_of(BOTH, wrong)
    for call in (cache.buffers, cache.state, cache.group_of):
        with pytest.raises(kvdock.IndexRangeError, match="layer: expected 0 to 6, got 7"):
            call(7)


def test_states_are_written_in_place_and_are_of_their_own_dtype(ops: kvdock.OpDispatcher) -> None:
    cache = make(ops=ops)
    for layer in (2, BOTH):
        cache.reset()  # perhaps in groups of their own, of which each block has one
        state = cache.state(layer)
        assert {name: (view.dtype, tuple(view.shape)) for name, view in state.items()} == {
            "conv": (BF16, (6, 24, 4)),
            "recurrent": (F32, (6, 4, 16, 16)),
        }
        state["recurrent"][3] += 2.5
        assert (cache.state(layer)["recurrent"][3] == 2.5).all()
        assert not cache.state(layer)["recurrent"][[0, 1, 2, 4, 5]].any()
        with pytest.raises(TypeError):
            state["conv"] = None  # type: ignore[index] # what is under test
    assert set(cache.buffers(BOTH)) == {"k", "v", "conv", "recurrent"}


def test_all_groups_are_copied_in_one_call() -> None:
    runtime, calls = counting_runtime("counting")
    cache = make(ops=runtime.dispatcher)
    fill(cache)
    (before,) = memory(cache)
    cache.copy_blocks([(0, 3), (1, 5)])
    before[3], before[5] = before[0].clone(), before[1].clone()
    assert torch.equal(memory(cache)[0], before)
    assert dict(calls) == {("counting", "copy_blocks_"): 1}


def test_a_copy_of_a_cache_and_its_end(ops: kvdock.OpDispatcher) -> None:
    cache = make(ops=ops, alignment=4096)
    fill(cache)
    before = memory(cache)
    with torch.inference_mode():
        twin, view = copy.deepcopy([cache, cache.k_cache(0)])
    assert view is twin.k_cache(0)
    assert torch.equal(memory(twin)[0], before[0])
    assert twin.memory_regions()[0].address % 4096 == 0
    twin.update(1, torch.ones(1, 2, 16), torch.ones(1, 2, 16), torch.tensor([3]))
    twin.state(2)["conv"].fill_(1)
    twin.copy_blocks([(0, 1)])
    assert torch.equal(memory(cache)[0], before[0])
    assert copy.copy(cache).k_cache(0) is cache.k_cache(0)
    twin.reset()
    assert not memory(twin)[0].any()
    gone = [weakref.ref(each.k_cache(0)) for each in (cache, twin)]
    gc.disable()
    try:
        del cache, twin, view
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


def test_a_step_over_several_groups_can_be_compiled(ops: kvdock.OpDispatcher) -> None:
    """Keys and values of all groups are one memory: a graph is given it once, and sees its writes in order."""
    cache = make(ops=ops)

    def step(k: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache.update(0, k, -k, slots)
        cache.update(1, 2 * k, k, slots)
        _, latents = cache.update(LATENT, kv_c, k_pe, slots + 8)
        return cache.gather(0, slots)[1] + cache.gather(1, slots)[0], latents[2] + 1

    given: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        given.append(sum(isinstance(each, torch.Tensor) and each.numel() > 200 for each in inputs))
        return aot_eager(graph, inputs)

    args = torch.randn(3, 2, 16), torch.randn(3, 32), torch.randn(3, 8), torch.tensor([0, 1, 13])
    expected = step(*args)
    written = memory(cache)
    cache.reset()
    torch._dynamo.reset()
    for got, meant in zip(torch.compile(step, backend=backend, fullgraph=True)(*args), expected, strict=True):
        assert torch.equal(got, meant)
    assert torch.equal(memory(cache)[0], written[0])
    assert given == [1]


def test_the_backend_stays(ops: kvdock.OpDispatcher) -> None:
    runtime, calls = counting_runtime("first", "second")
    with kvdock.use_backend("second"):
        cache = make(ops=runtime.dispatcher)
    twin = copy.deepcopy(cache)
    for each in (cache, twin):
        each.update(1, torch.ones(1, 2, 16), torch.ones(1, 2, 16), torch.tensor([3]))
        each.copy_blocks([(0, 1)])
    assert {backend for backend, _ in calls} == {"second"}


class NoMemory(torch.overrides.TorchFunctionMode):
    """Fails whoever takes memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.empty, torch.zeros, torch.empty_strided), "memory is taken before arguments are checked"
        return func(*args, **(kwargs or {}))


TWICE = HybridLayerSpec([STATE, STATE])
BAD: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "bytes that cannot agree": (
        (kvdock.LayerSpec(1, 1, 4096, 4096), kvdock.LayerSpec(1, 1, 8, 8, window=2)),
        {"block_size": 16},
        kvdock.ArgumentValueError,
        "whose bytes can agree",
    ),
    "a layout that is not there": (
        (FULL, WINDOW),
        {"layout": kvdock.KVCacheLayout.LAYER_FIRST},
        kvdock.ArgumentValueError,
        r"layout: expected PAGE_FIRST, or none: .*LAYER_FIRST for layers 1 of KeepAll\(\), 1 of KeepWindow.*Fix: leave the layout out",
    ),
    "two buffers of one name": (
        (FULL, TWICE),
        {},
        kvdock.ArgumentValueError,
        r"layers\[1\]: expected a name of its own .* two called 'conv'",
    ),
    "a budget without a block": (
        (FULL, WINDOW),
        {"num_blocks": None, "max_kv_memory_bytes": 99},
        kvdock.CapacityError,
        "at least 1024 bytes",
    ),
    "nothing to keep": ((TWICE,), {"num_blocks": 2**60}, kvdock.ArgumentValueError, "a name of its own"),
    "a budget that is too small for two sizes": (
        (FULL, STATE),
        {"num_blocks": 3, "max_kv_memory_bytes": 9999},
        kvdock.CapacityError,
        r"3 block\(s\) of 1 or \d+ tokens in 2 layers, got 9999",
    ),
    "too many bytes": ((FULL, WINDOW), {"num_blocks": 2**50}, kvdock.ArgumentValueError, "an address space"),
    "another dtype": ((FULL, WINDOW), {"cache_dtype": torch.float16}, kvdock.UnsupportedError, "cache_dtype: expected torch.float32"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_refused_before_memory_is_taken(name: str, ops: kvdock.OpDispatcher) -> None:
    layers, options, error, text = BAD[name]
    with NoMemory(), pytest.raises(error, match=text):
        make(kvdock.KVSpec(layers, 8, F32), ops, **options)


def test_memory_that_is_not_there_is_a_capacity_error(ops: kvdock.OpDispatcher) -> None:
    with pytest.raises(kvdock.CapacityError, match=f"PagedKVCacheConfig: expected {2**50} bytes of memory on cpu, got fewer"):
        make(windows(FULL, WINDOW), ops, num_blocks=2**40)


def test_page_first_may_be_said(ops: kvdock.OpDispatcher) -> None:
    said = make(ops=ops, layout=kvdock.KVCacheLayout.PAGE_FIRST)
    assert [bits(said.k_cache(layer)).stride() for layer in HEADS] == [bits(make(ops=ops).k_cache(layer)).stride() for layer in HEADS]


def test_states_alone_are_one_group_of_blocks_of_one(ops: kvdock.OpDispatcher) -> None:
    cache = make(kvdock.KVSpec([STATE] * 3, 4096, F32), ops)
    assert [group.block_size for group in cache.groups] == [1]
    assert cache.block_size == 1
    assert cache.nbytes == 6 * 3 * (24 * 4 * 2 + 4 * 16 * 16 * 4)
    cache.state(1)["conv"][5] = 1
    cache.copy_blocks([(5, 0)])
    assert (cache.state(1)["conv"][0] == 1).all()
    assert not cache.state(0)["conv"].any()
