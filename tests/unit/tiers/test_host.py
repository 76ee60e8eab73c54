"""Host memory as a tier: what comes back is what was there, bit by bit, whatever the layers keep."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import pytest
import torch

import kvdock
from kvdock.errors import ArgumentTypeError, ArgumentValueError, CapacityError, KVDockWarning
from kvdock.layout import KVCacheLayout
from kvdock.scheduler import NumberTier
from kvdock.spec import KVSpec, LayerSpec, MLALayerSpec
from kvdock.tiers import HostTier, Tier
from kvdock.tiers.host import bound_tiers

LAYER = LayerSpec(2, 2, 8, 4)
SPECS = {
    "one kind": (LAYER, LAYER),
    "latents": (MLALayerSpec(16, 8), MLALayerSpec(16, 8)),
    "latents and keys": (MLALayerSpec(16, 8), LAYER),
    "a window": (LAYER, LayerSpec(2, 2, 8, 4, window=8)),
}
LAYOUTS = [None, KVCacheLayout.PAGE_FIRST]


def cache_of(name: str, layout: KVCacheLayout | None = None, num_blocks: int = 24) -> Any:
    spec = KVSpec(layers=SPECS[name], max_positions=512, dtype=torch.float32)
    return kvdock.create_cache(spec, kvdock.PagedKVCacheConfig(num_blocks=num_blocks, block_size=4, layout=layout), kvdock.RankInfo("cpu"))


class Loop:
    """Writes noise of each token's own into a cache, and compares what is read with it."""

    def __init__(self, cache: Any, tiers: list[Tier]) -> None:
        self.cache, self.tiers = cache, tiers
        self.manager = kvdock.CacheManager(cache.num_blocks, groups=cache.groups, tiers=tiers)

    def slots(self, seq: Any, layer: int, start: int, stop: int) -> torch.Tensor:
        return torch.from_numpy(seq.slot_mapping(start, stop, group=self.cache.group_of(layer)))

    def written(self, layer: int, ids: Any) -> list[torch.Tensor]:
        """Return what each token of a prompt leaves in a layer: it follows from all before it."""
        shapes = [view.shape[2:] for view in self.cache.buffers(layer).values()]
        made = [np.random.default_rng([layer, *ids[: at + 1]]).standard_normal((len(shapes), 64)) for at in range(len(ids))]
        return [
            torch.from_numpy(np.stack([row[i, : shape.numel()] for row in made])).float().view(-1, *shape) for i, shape in enumerate(shapes)
        ]

    def run(self, ids: Any) -> int:
        ids = np.asarray(ids)
        seq = self.manager.begin(ids)
        cached = seq.cached_len
        for layer in range(self.cache.num_layers):
            slots, wanted = self.slots(seq, layer, 0, len(ids)), self.written(layer, ids)
            for view, rows in zip(self.cache.buffers(layer).values(), wanted, strict=True):
                size = view.shape[1]
                found = [at for at in range(cached) if slots[at] >= 0 and (not self.manager.lets_go or at >= cached - 4)]
                assert torch.equal(view[slots[found] // size, slots[found] % size], rows[found]), f"layer {layer}"
                view[slots[cached:] // size, slots[cached:] % size] = rows[cached:]
        self.manager.commit(seq, [], computed=len(ids))
        self.manager.finish(seq)
        self.manager.check_integrity()
        return cached


def prompt(name: int, length: int = 30) -> list[int]:
    return [name + 50] * length


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SPECS)
def test_what_comes_back_is_what_was_there(name: str, layout: KVCacheLayout | None) -> None:
    cache = cache_of(name, layout)
    tier = HostTier(100 * cache.nbytes // cache.num_blocks).bind(cache)
    loop = Loop(cache, [tier])
    assert [loop.run(prompt(each)) for each in (1, 2, 3, 4, 5)] == [0] * 5
    assert [loop.run(prompt(each)) for each in (1, 2, 3)] == [28] * 3
    assert loop.manager.tier_usage[0].loaded >= 3 * 7
    assert loop.manager.tier_usage[0].lost == 0


def test_what_comes_back_from_the_second_is_what_was_there() -> None:
    cache = cache_of("one kind", num_blocks=9)
    tiers: list[Tier] = [HostTier(count * cache.nbytes // 9).bind(cache) for count in (8, 100)]
    loop = Loop(cache, tiers)
    for each in range(6):
        loop.run(prompt(each))
    assert loop.run(prompt(1)) == 28
    first, second = loop.manager.tier_usage
    assert (first.num_blocks, second.num_blocks) == (8, 100)
    assert second.loaded == 7


def test_its_memory_has_the_size_of_its_blocks() -> None:
    cache = cache_of("one kind")
    per_block = cache.nbytes // cache.num_blocks
    tier = HostTier(10 * per_block + per_block - 1).bind(cache)
    assert tier.num_blocks == 10
    assert tier.memory.nbytes == 10 * per_block
    assert tier.memory.device.type == "cpu"
    assert repr(tier) == f"HostTier({10 * per_block + per_block - 1}, num_blocks=10)"
    assert repr(HostTier(5)) == "HostTier(5)"


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, True, "8G"])
def test_bytes_are_an_int_above_0(nbytes: Any) -> None:
    with pytest.raises((ArgumentTypeError, ArgumentValueError), match="HostTier: nbytes"):
        HostTier(nbytes)


def test_memory_that_the_system_does_not_give_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that were never made were unlocked: an error of `__del__` on the user's screen, beside the one that says what to do."""
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with pytest.raises(CapacityError, match="bytes of memory on cpu, got fewer"):
        HostTier(1 << 55).bind(cache_of("one kind"))
    gc.collect()
    assert unraisable == []


def test_what_cannot_be_bound_is_refused() -> None:
    cache = cache_of("one kind")
    with pytest.raises(ArgumentTypeError, match=r"HostTier\.bind: cache: expected a PagedKVCache, got 5"):
        HostTier(100).bind(5)  # type: ignore[arg-type]
    with pytest.raises(CapacityError, match="max_kv_memory_bytes"):
        HostTier(100).bind(cache)
    tier = HostTier(cache.nbytes).bind(cache)
    with pytest.raises(ArgumentValueError, match=r"expected a tier without a cache, .*make a tier for each cache"):
        tier.bind(cache)


def test_a_manager_takes_it_when_it_is_bound() -> None:
    with pytest.raises(ArgumentValueError, match=r"expected one that is bound to a cache, got HostTier\(100\).*bind\(cache\)"):
        kvdock.CacheManager(4, tiers=[HostTier(100)])


def test_behind_a_tier_without_memory_it_loses_what_should_come_from_there() -> None:
    cache = cache_of("one kind", num_blocks=9)
    loop = Loop(cache, [])
    loop.manager = kvdock.CacheManager(9, groups=cache.groups, tiers=[NumberTier(2), HostTier(cache.nbytes).bind(cache)])
    loop.run(prompt(1))
    loop.run(prompt(2))
    with pytest.warns(KVDockWarning, match=r"HostTier\.store: source: expected the pool or a HostTier, got NumberTier"):
        loop.run(prompt(3))
    assert loop.manager.tier_usage[1].used == 0


def test_tiers_that_are_not_bound_yet_are_bound_to_a_cache() -> None:
    cache = cache_of("one kind")
    bound, fresh, counted = HostTier(cache.nbytes).bind(cache), HostTier(cache.nbytes), NumberTier(3)
    assert bound_tiers("here", [bound, fresh, counted], cache) == (bound, fresh, counted)
    assert fresh.num_blocks == cache.num_blocks
    assert bound._bound()[0] is cache


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_is_copied_whole_and_nothing_beside_it(layout: KVCacheLayout | None) -> None:
    cache = cache_of("a window" if layout is None else "one kind", layout, num_blocks=6)
    tier = HostTier(4 * cache.nbytes // 6).bind(cache)
    for end in (cache, tier.memory):
        for pool in end._store.pools:
            pool.memory.view(torch.uint8).random_(0, 256)
    before = [[view.clone() for view in end.buffers(layer).values()] for end in (cache, tier.memory) for layer in range(2)]
    tier.store(np.array([[5, 0], [2, 3]]), None)
    after = [[view.clone() for view in end.buffers(layer).values()] for end in (cache, tier.memory) for layer in range(2)]
    for layer in range(2):
        for was, now in zip(before[layer], after[layer], strict=True):
            assert torch.equal(bits(was), bits(now)), "the pool is only read"
        for pool, was, now in zip(before[layer], before[2 + layer], after[2 + layer], strict=True):
            assert torch.equal(bits(now[[0, 3]]), bits(pool[[5, 2]]))
            assert torch.equal(bits(now[[1, 2]]), bits(was[[1, 2]])), "canaries"
    tier.load(np.array([[3, 1]]))
    for layer in range(2):
        for was, now in zip(after[layer], cache.buffers(layer).values(), strict=True):
            assert torch.equal(bits(now[1]), bits(was[2]))
            assert torch.equal(bits(now[[0, 2, 3, 4, 5]]), bits(was[[0, 2, 3, 4, 5]])), "canaries"


def bits(values: torch.Tensor) -> torch.Tensor:
    """Return values as they lie in memory: random bits may be NaN, which is equal to nothing."""
    return values.contiguous().view(torch.uint8)


def test_a_rank_s_tier_has_its_share_of_the_heads() -> None:
    spec = KVSpec(layers=SPECS["one kind"], max_positions=512, dtype=torch.float32)
    conf, sizes = kvdock.PagedKVCacheConfig(num_blocks=9, block_size=4), set()
    found = []
    for rank in range(2):
        cache = kvdock.create_cache(spec, conf, kvdock.RankInfo("cpu", tp_size=2, tp_rank=rank))
        tier = HostTier(40 * cache.nbytes // 9).bind(cache)
        loop = Loop(cache, [tier])
        loop.manager.keep_digest()
        found.append([loop.run(prompt(each)) for each in (1, 2, 3, 1)])
        sizes.add((tier.num_blocks, loop.manager.digest()))
    assert found == [[0, 0, 0, 28]] * 2
    assert len(sizes) == 1, "both decide alike"


def test_a_prefix_of_another_namespace_is_not_brought_back() -> None:
    cache = cache_of("one kind", num_blocks=9)
    loop = Loop(cache, [HostTier(100 * cache.nbytes // 9).bind(cache)])
    for each in (1, 2, 3):
        loop.run(prompt(each))
    assert loop.manager.plan(prompt(1), ("other",)).cached_len == 0
    assert loop.manager.plan(prompt(1)).cached_len == 28
