"""Host memory as a tier: what comes back is what was there, bit by bit, whatever the layers keep."""

from __future__ import annotations

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
