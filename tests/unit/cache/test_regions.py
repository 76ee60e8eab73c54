"""Where a cache lies, in numbers: what a transport reads through them is what the views show, and `alignment` is kept."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import kvdock
from kvdock.cache.memory import fresh
from kvdock.cache.regions import MemoryRegion, Place
from support_caches import CPU, LAYOUT_NAMES, LAYOUTS, SPECS, addresses, random_bits, runtime_for
from support_mixed import config_of, mixtures, planned
from support_slow import examples

OPS = runtime_for("portable").dispatcher
LATENTS = kvdock.KVSpec((kvdock.MLALayerSpec(16, 4), kvdock.MLALayerSpec(5, 3), kvdock.MLALayerSpec(16, 4)), 64, torch.bfloat16)
UNIFORM = {**SPECS, "latents": LATENTS}


def fill(cache: kvdock.PagedKVCache) -> None:
    for layer in range(cache.num_layers):
        for number, view in enumerate(cache.buffers(layer).values()):
            view.view(torch.uint8).copy_(random_bits(view.view(torch.uint8).shape, torch.uint8, 10 * layer + number))


def seen(region: MemoryRegion, place: Place) -> Any:
    """Return the elements of a place as numpy sees them from the numbers alone."""
    stretch = (ctypes.c_char * region.nbytes).from_address(region.address)
    shape = (region.num_blocks, *place.shape)
    return np.ndarray(shape, f"V{place.dtype.itemsize}", stretch, place.offset, (place.block_stride, *place.strides))


def shown(view: torch.Tensor) -> Any:
    """Return the elements of a view."""
    return view.contiguous().view(torch.uint8).numpy().view(f"V{view.itemsize}").reshape(tuple(view.shape))


def check(cache: kvdock.PagedKVCache) -> None:
    """Compare everything that a cache holds with what its regions say."""
    fill(cache)
    found = {}
    for region in cache.memory_regions():
        assert (region.device, region.num_blocks) == (cache.device, cache.num_blocks)
        for place in region.places:
            view = cache.buffers(place.layer)[place.name]
            assert place.dtype == view.dtype
            assert place.group == cache.group_of(place.layer, place.name)
            assert np.array_equal(seen(region, place), shown(view))
            for block in range(cache.num_blocks):
                run = place.block(block)
                assert 0 <= run.start < run.stop <= region.nbytes
                mine = {at - region.address for at in addresses(view[block]).flatten().tolist()}
                assert (min(mine), max(mine) + view.itemsize) == (run.start, run.stop), "a block is one run of bytes"
                assert len(run) == place.nbytes == len(mine) * view.itemsize
            assert (place.layer, place.name) not in found, "each buffer is in one region"
            found[place.layer, place.name] = region
    kept = {
        (layer, buffer.name)
        for group in cache.groups
        for (layer, _), part in zip(group.members, group.parts, strict=True)
        for buffer in part.buffers
    }
    assert set(found) == kept


@pytest.mark.parametrize("alignment", [1, 64, 4096])
@pytest.mark.parametrize(("layout", "heads"), LAYOUTS, ids=LAYOUT_NAMES)
@pytest.mark.parametrize("name", UNIFORM)
def test_pools_by_layer(name: str, layout: kvdock.KVCacheLayout, heads: kvdock.HeadLayout, alignment: int) -> None:
    config = kvdock.PagedKVCacheConfig(num_blocks=5, block_size=3, layout=layout, head_layout=heads, alignment=alignment)
    cache = kvdock.create_cache(UNIFORM[name], config, CPU, ops=OPS)
    check(cache)
    plan = kvdock.plan_blocks(UNIFORM[name], config, CPU)
    regions = cache.memory_regions()
    assert sum(region.nbytes for region in regions) == cache.nbytes == plan.nbytes
    assert {region.address % alignment for region in regions} == {0}
    assert {place.block_stride % alignment for region in regions for place in region.places} == {0}
    before = [tuple(view.clone() for view in cache.buffers(layer).values()) for layer in range(cache.num_layers)]
    cache.copy_blocks([(0, 4), (2, 1)])
    for layer, views in enumerate(before):
        for old, view in zip(views, cache.buffers(layer).values(), strict=True):
            expected = old.view(torch.uint8)[[0, 2, 2, 3, 0]]
            assert torch.equal(view.view(torch.uint8), expected), "padding between blocks changes nothing"


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mixtures())
def test_one_memory(mixture: tuple[kvdock.KVSpec, dict[str, Any]]) -> None:
    spec, options = mixture
    if planned(spec, options, CPU) is None:
        return
    cache = kvdock.create_cache(spec, config_of(options), CPU, ops=OPS)
    for region in cache.memory_regions():
        assert region.address % options["alignment"] == 0
        assert {place.offset % 16 for place in region.places} <= {0} or len(cache.groups) == 1
    if len(cache.groups) == 1:
        check(cache)
        return
    for number in range(len(cache.groups)):
        check(OneGroup(cache, number))  # type: ignore[arg-type] # blocks belong to one group at a time, so each is filled by itself


@attrs.frozen
class OneGroup:
    """A cache as if it had one of its groups alone."""

    cache: kvdock.PagedKVCache
    number: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    @property
    def groups(self) -> tuple[Any, ...]:
        return (self.cache.groups[self.number],)

    def buffers(self, layer: int) -> dict[str, torch.Tensor]:
        return {name: view for name, view in self.cache.buffers(layer).items() if self.cache.group_of(layer, name) == self.number}

    def memory_regions(self) -> list[MemoryRegion]:
        regions = self.cache.memory_regions()
        return [attrs.evolve(each, places=tuple(place for place in each.places if place.group == self.number)) for each in regions]


def test_an_example_in_figures() -> None:
    spec = kvdock.KVSpec([kvdock.LayerSpec(2, 1, 8, 16), kvdock.LayerSpec(2, 1, 8, 16, window=9)], 4096, torch.float16)
    cache = kvdock.create_cache(spec, kvdock.PagedKVCacheConfig(num_blocks=3, block_size=4), CPU, ops=OPS)
    (region,) = cache.memory_regions()
    assert (region.nbytes, region.num_blocks) == (3 * 4 * 32 * 2, 3)
    places = {(place.layer, place.name): place for place in region.places}
    assert places[0, "v"] == Place(0, "v", cache.group_of(0), 128, 256, (4, 1, 16), (32, 32, 2), torch.float16)
    assert places[1, "k"] == Place(1, "k", cache.group_of(1), 0, 256, (4, 2, 8), (32, 16, 2), torch.float16)
    assert places[1, "v"].block(2) == range(640, 768)
    assert hash(region) == hash(attrs.evolve(region))


ALLOCATIONS: dict[str, Callable[[int], int]] = {
    "as asked": lambda _: 0,
    "one byte off": lambda size: size,
    "most of it off": lambda size: 4096 - size,
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ALLOCATIONS)
def test_an_address_is_aligned_whatever_the_allocator_gives(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def empty(shape: Any, **options: Any) -> torch.Tensor:
        count = int(np.prod(shape))
        pad = torch.zeros(count * dtype.itemsize + 3 * 4096, dtype=torch.uint8)
        begin = -pad.data_ptr() % 4096 + ALLOCATIONS[name](dtype.itemsize)
        made.append(pad)
        return pad[begin : begin + count * dtype.itemsize].view(dtype).view(shape)

    monkeypatch.setattr(torch, "empty", empty)
    memory = fresh((3, 5), dtype, torch.device("cpu"), 4096)
    assert memory.data_ptr() % 4096 == 0
    assert (memory.shape, memory.dtype, memory.is_contiguous()) == ((3, 5), dtype, True)
    assert len(made) == (1 if name == "as asked" else 2)
    assert not memory.any()
    memory.view(torch.uint8).fill_(255)
    assert sum(int((pad == 255).sum()) for pad in made) == memory.nbytes


@pytest.mark.parametrize(
    ("alignment", "error", "text"),
    [
        (0, kvdock.ArgumentValueError, "alignment: expected at least 1, got 0"),
        (3, kvdock.ArgumentValueError, "alignment: expected a power of two up to 1073741824, in bytes, got 3. Fix: name what a transport"),
        (2**31, kvdock.ArgumentValueError, "alignment: expected a power of two up to"),
        (4096.0, kvdock.ArgumentTypeError, "alignment: expected an int"),
        (True, kvdock.ArgumentTypeError, "alignment: expected an int"),
    ],
)
def test_wrong_alignments(alignment: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        kvdock.PagedKVCacheConfig(num_blocks=1, alignment=alignment)


def test_keep_all_is_a_yes_or_a_no() -> None:
    with pytest.raises(kvdock.ArgumentTypeError, match="keep_all: expected True or False, got 'windows'"):
        kvdock.PagedKVCacheConfig(num_blocks=1, keep_all="windows")  # type: ignore[arg-type] # what is under test
