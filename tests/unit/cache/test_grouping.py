"""Which memory a model gets: of well-known mixtures of layers, on every rank, before any is taken and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import kvdock
from kvdock.cache.grouping import grouping, only_use, places_in, rank_parts, used_parts
from kvdock.cache.mixed import MixedKVCache
from kvdock.cache.uses import KeysAndValues, Latents, use_of
from kvdock.layers import (
    Buffer,
    ChunkedLayerSpec,
    HybridLayerSpec,
    KeepAll,
    KeepChunk,
    KeepState,
    KeepWindow,
    LayerKind,
    OpaqueLayerSpec,
    Part,
    SharedLayerSpec,
    StateLayerSpec,
)
from support_caches import CPU, runtime_for

BF16, F32 = torch.bfloat16, torch.float32
OPS = runtime_for("portable").dispatcher


def every(period: int, others: LayerKind, last: LayerKind, count: int) -> list[LayerKind]:
    """Return layers of which the last of each period is another."""
    return [last if (index + 1) % period == 0 else others for index in range(count)]


def heads(count: int, dim: int, window: int | None = None) -> kvdock.LayerSpec:
    return kvdock.LayerSpec(count, count, dim, dim, window)


DELTA = StateLayerSpec([Buffer("conv", (512, 4), BF16), Buffer("recurrent", (8, 64, 64), F32)])
MAMBA = StateLayerSpec([Buffer("conv", (512, 4), BF16), Buffer("recurrent", (512, 16), F32)])
MODELS: dict[str, tuple[list[LayerKind], type[kvdock.PagedKVCache], set[Any]]] = {
    "Llama": ([heads(4, 64)] * 4, kvdock.PagedKVCache, {KeepAll()}),
    "Mistral": ([heads(4, 64, 512)] * 4, kvdock.PagedKVCache, {KeepWindow(512)}),
    "YOCO": ([heads(4, 64), heads(4, 64), SharedLayerSpec(1), SharedLayerSpec(0)], kvdock.PagedKVCache, {KeepAll()}),
    "DeepSeek": ([kvdock.MLALayerSpec(128, 16)] * 4, kvdock.MLAKVCache, {KeepAll()}),
    "Gemma 3": (every(6, heads(2, 64, 128), heads(2, 64), 12), MixedKVCache, {KeepAll(), KeepWindow(128)}),
    "Gemma 3n": (
        [*every(3, heads(2, 64, 128), heads(2, 64), 6), SharedLayerSpec(4), SharedLayerSpec(5)],
        MixedKVCache,
        {KeepAll(), KeepWindow(128)},
    ),
    "gpt-oss": (every(2, heads(4, 64, 128), heads(4, 64), 8), MixedKVCache, {KeepAll(), KeepWindow(128)}),
    "Llama 4": (every(4, ChunkedLayerSpec(4, 4, 64, 64, 512), heads(4, 64), 8), MixedKVCache, {KeepAll(), KeepChunk(512)}),
    "Qwen3-Next": (every(4, DELTA, heads(2, 64), 8), MixedKVCache, {KeepAll(), KeepState()}),
    "Jamba": (every(8, MAMBA, heads(4, 64), 16), MixedKVCache, {KeepAll(), KeepState()}),
    "Falcon-H1": ([HybridLayerSpec([heads(2, 64), MAMBA])] * 3, MixedKVCache, {KeepAll(), KeepState()}),
    "Kimi Linear": (every(4, DELTA, kvdock.MLALayerSpec(128, 16), 8), MixedKVCache, {KeepAll(), KeepState()}),
    "Mamba": ([MAMBA] * 3, MixedKVCache, {KeepState()}),
    "sparse attention": ([kvdock.MLALayerSpec(128, 16), OpaqueLayerSpec(132)] * 3, MixedKVCache, {KeepAll()}),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_class_and_the_rules_follow_from_the_layers(name: str) -> None:
    layers, kind, rules = MODELS[name]
    spec, config = kvdock.KVSpec(layers, 32_768, BF16), kvdock.PagedKVCacheConfig(num_blocks=2)
    cache = kvdock.create_cache(spec, config, CPU, ops=OPS)
    assert type(cache) is kind
    assert {group.retention for group in cache.groups} == rules
    plan = kvdock.plan_blocks(spec, config, CPU)
    assert (cache.groups, cache.nbytes) == (plan.groups, plan.nbytes)
    for layer, found in enumerate(layers):
        of = found.of if isinstance(found, SharedLayerSpec) else layer
        kept = {buffer.name: buffer for part in layers[of].parts(CPU.head_range, BF16) for buffer in part.buffers}
        assert {view.dtype for view in cache.buffers(layer).values()} == {buffer.dtype for buffer in kept.values()}
        assert {n: view.shape[-len(kept[n].shape) :] for n, view in cache.buffers(layer).items()} == {n: b.shape for n, b in kept.items()}
        groups = {cache.group_of(layer, n) for n in kept}
        assert {cache.groups[number].retention for number in groups} == {part.retention for part in layers[of].parts(CPU.head_range, BF16)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_agree_on_groups_and_bytes(name: str, tp_size: int) -> None:
    layers, _, _ = MODELS[name]
    spec = kvdock.KVSpec(layers, 32_768, BF16)
    for config in (kvdock.PagedKVCacheConfig(num_blocks=2), kvdock.PagedKVCacheConfig(num_blocks=2, alignment=512)):
        plans = [kvdock.plan_blocks(spec, config, kvdock.RankInfo("cpu", tp_size, rank)) for rank in range(tp_size)]
        assert all(plan == plans[0] for plan in plans)


@pytest.mark.parametrize("name", MODELS)
def test_a_budget_holds_as_many_blocks_as_are_planned(name: str) -> None:
    spec = kvdock.KVSpec(MODELS[name][0], 32_768, BF16)
    one = kvdock.plan_blocks(spec, kvdock.PagedKVCacheConfig(num_blocks=1), CPU).nbytes
    for budget, blocks in ((one, 1), (2 * one - 1, 1), (3 * one, 3)):
        cache = kvdock.create_cache(spec, kvdock.PagedKVCacheConfig(max_kv_memory_bytes=budget), CPU, ops=OPS)
        assert cache.num_blocks == blocks
        assert cache.nbytes <= budget
    with pytest.raises(kvdock.CapacityError, match=f"at least {one} bytes"):
        kvdock.create_cache(spec, kvdock.PagedKVCacheConfig(max_kv_memory_bytes=one - 1), CPU, ops=OPS)


def part(*buffers: tuple[Any, ...], rule: Any = None) -> Part:
    return Part(tuple(Buffer(*each) for each in buffers), rule or KeepAll())


K, V = ("k", (2, 8), BF16), ("v", (2, 4), BF16)
USES: dict[str, tuple[Part, Any]] = {
    "keys and values": (part(K, V), KeysAndValues),
    "in a window": (part(K, V, rule=KeepWindow(4)), KeysAndValues),
    "latents": (part(("rows", (12,), BF16, 8)), Latents),
    "as wide as their values": (part(("rows", (12,), BF16, 12)), Latents),
    "values before keys": (part(V, K), None),
    "keys alone": (part(K), None),
    "something beside them": (part(K, V, ("scale", (2, 1), BF16)), None),
    "of two dtypes": (part(K, ("v", (2, 4), F32)), None),
    "without heads": (part(("k", (8,), BF16), ("v", (8,), BF16)), None),
    "a state of these names": (part(K, V, rule=KeepState()), None),
    "a row without values": (part(("rows", (12,), BF16)), None),
    "two rows": (part(("rows", (12,), BF16, 8), ("more", (12,), BF16, 8)), None),
    "a state with values": (part(("rows", (12,), BF16, 8), rule=KeepState()), None),
}


@pytest.mark.parametrize("name", USES)
def test_how_a_part_is_used_follows_from_its_buffers(name: str) -> None:
    kept, expected = USES[name]
    assert use_of(kept) is expected


def used_alike(*layers: Sequence[Part]) -> Any:
    return only_use([tuple(parts) for parts in layers])


def test_pools_by_layer_are_for_one_use_and_one_rule() -> None:
    heads_, latents, windowed = part(K, V), part(("rows", (12,), BF16, 8)), part(K, V, rule=KeepWindow(4))
    assert used_alike([heads_], [], [heads_]) is KeysAndValues
    assert used_alike([latents], [latents]) is Latents
    assert used_alike([windowed], [windowed]) is KeysAndValues
    for mixed in ([[heads_], [latents]], [[heads_], [windowed]], [[heads_, heads_]], [[part(K)]], []):
        assert used_alike(*mixed) is None


class FirstOfTwo(LayerKind):
    """A kind of somebody else's that keeps heads in a window, and latents."""

    def parts(self, split: Any, dtype: torch.dtype) -> tuple[Part, ...]:
        return part(K, V, rule=KeepWindow(4)), part(("rows", (12,), BF16, 8))


def test_a_layer_with_two_parts_that_ops_know_is_used_by_its_first() -> None:
    cache = kvdock.create_cache(
        kvdock.KVSpec([FirstOfTwo()], 64, BF16), kvdock.PagedKVCacheConfig(num_blocks=3, block_size=2), CPU, ops=OPS
    )
    assert cache.group_of(0, "rows") < cache.group_of(0, "k"), "the order of groups is another"
    assert [use for _, use in used_parts(cache.groups).values()] == [KeysAndValues]
    assert cache.k_cache(0).shape == (3, cache.groups[cache.group_of(0, "k")].block_size, 2, 8)
    assert set(cache.buffers(0)) == {"rows", "k", "v"}


def test_places_follow_one_another_at_multiples_of_16() -> None:
    spec = kvdock.KVSpec([kvdock.LayerSpec(1, 2, 3, 5), OpaqueLayerSpec(7)], 64, BF16)
    config = kvdock.PagedKVCacheConfig(num_blocks=1, block_size=3)
    found = grouping(spec, config, CPU)
    (group,) = found.plan.groups
    assert [(layer, buffer.name, begin, end) for layer, _, buffer, begin, end in places_in(group)] == [
        (0, "k", 0, 18),
        (0, "v", 32, 92),
        (1, "bytes", 96, 117),
    ]
    assert found.plan.block_bytes == 128
    assert [tuple(part.retention for part in parts) for parts in rank_parts(spec, config, CPU)] == [(KeepAll(),)] * 2
