"""What a copy of a cache shares with it: after `copy.deepcopy` nothing, after `copy.copy` the memory. Pickling is refused."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch

import kvdock
from kvdock.cache.pool import PagedPool
from support_caches import (
    CPU,
    LAYOUT_NAMES,
    LAYOUTS,
    SPECS,
    addresses,
    bits,
    contents,
    counting_runtime,
    random_bits,
    same,
    tokens,
)

BLOCKS, BLOCK, ROWS, LENGTH = 4, 3, 2, 5

PAGED = [kvdock.PagedKVCacheConfig(num_blocks=BLOCKS, block_size=BLOCK, layout=layout, head_layout=heads) for layout, heads in LAYOUTS]
CONFIGS = [*PAGED, kvdock.StaticKVCacheConfig(max_batch_size=ROWS, max_cache_len=LENGTH)]
NAMES = [*LAYOUT_NAMES, "static"]

Way = Callable[[Any], Any]


@pytest.fixture(params=SPECS.values(), ids=SPECS)
def spec(request: pytest.FixtureRequest) -> kvdock.KVSpec:
    found: kvdock.KVSpec = request.param
    return found


@pytest.fixture(params=CONFIGS, ids=NAMES)
def cache(request: pytest.FixtureRequest, spec: kvdock.KVSpec, ops: kvdock.OpDispatcher) -> Any:
    """A cache whose every place holds other bits."""
    made = kvdock.create_cache(spec, request.param, CPU, ops=ops)
    fill(made, 0)
    return made


def fill(cache: Any, seed: int) -> None:
    """Put bits everywhere, by way of the views."""
    for index, view in enumerate(views(cache)):
        bits(view).copy_(bits(random_bits(view.shape, view.dtype, seed + index)))


def views(cache: Any) -> list[torch.Tensor]:
    return [view(layer) for layer in range(cache.num_layers) for view in (cache.k_cache, cache.v_cache)]


def write(cache: Any, seed: int = 100) -> list[tuple[torch.Tensor, ...]]:
    """Use every op of a cache on every layer, and return the bits of what its calls returned."""
    found: list[tuple[torch.Tensor, ...]] = []
    for layer in range(cache.num_layers):
        if isinstance(cache, kvdock.StaticKVCache):
            new = [x.transpose(1, 2) for x in tokens(cache.spec, layer, (ROWS, 2), seed + layer)]
            got = cache.update(layer, *new, 1)
        else:
            slots = torch.tensor([4, -1, 11, 0])
            got = cache.update(layer, *tokens(cache.spec, layer, (4,), seed + layer), slots)
            found.append(tuple(bits(x).clone() for x in cache.gather(layer, slots)))
        found.append(tuple(bits(x).clone() for x in got))
    if isinstance(cache, kvdock.PagedKVCache):
        cache.copy_blocks([(0, 2), (3, 1)])
    return found


def storages(cache: Any) -> list[int]:
    """Return the storage of each view, as the number of the first view that has it."""
    found = [view.untyped_storage().data_ptr() for view in views(cache)]
    return [found.index(storage) for storage in found]


def in_a_module(cache: Any) -> Any:
    module = torch.nn.Module()
    module.inner = torch.nn.Linear(2, 2)
    module.inner.cache = cache
    return copy.deepcopy(module).inner.cache


def in_a_list(cache: Any) -> Any:
    one, other = copy.deepcopy([cache, {"again": cache}])
    assert other["again"] is one
    return one


def beside_its_views(cache: Any) -> Any:
    """Copy a cache after views of it: they are views of the copy."""
    *seen, made = copy.deepcopy([*views(cache), cache])
    assert [x.data_ptr() for x in seen] == [x.data_ptr() for x in views(made)]
    return made


def before_its_views(cache: Any) -> Any:
    made, *seen = copy.deepcopy([cache, *views(cache)])
    assert all(x is y for x, y in zip(seen, views(made), strict=True))
    return made


def while_inferring(cache: Any) -> Any:
    with torch.inference_mode():
        return copy.deepcopy(cache)


def of_a_copy(cache: Any) -> Any:
    return copy.deepcopy(copy.deepcopy(cache))


WAYS: Sequence[Way] = (copy.deepcopy, in_a_module, in_a_list, beside_its_views, before_its_views, while_inferring, of_a_copy)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_deep_copy_has_memory_of_its_own(cache: Any, way: Way) -> None:
    before = contents(cache)
    twin = way(cache)
    assert type(twin) is type(cache)
    assert same(contents(twin), before)
    expected = write(twin)
    assert not same(contents(twin), before)
    assert same(contents(cache), before), "what is written to the copy does not reach the original"
    after = contents(twin)
    assert same(write(cache), expected), "both do the same"
    assert same(contents(cache), after)
    fill(cache, 7)
    assert same(contents(twin), after), "nor the other way round"
    twin.reset()
    assert not any(view.any() for view in views(twin))
    third = copy.deepcopy(twin)
    assert same(write(twin), write(third))
    assert not any(view.is_inference() for view in views(twin))


def test_a_deep_copy_lies_in_memory_as_the_original_does(cache: Any) -> None:
    twin = copy.deepcopy(cache)
    assert storages(twin) == storages(cache)
    for mine, its in zip(views(cache), views(twin), strict=True):
        assert mine.untyped_storage().data_ptr() != its.untyped_storage().data_ptr()
        assert torch.equal(addresses(mine) - mine.untyped_storage().data_ptr(), addresses(its) - its.untyped_storage().data_ptr())
    assert (twin.nbytes, twin.device, twin.dtype, twin.num_layers, repr(twin)) == (
        cache.nbytes,
        cache.device,
        cache.dtype,
        cache.num_layers,
        repr(cache),
    )
    assert (twin.spec, twin.config, twin.rank) == (cache.spec, cache.config, cache.rank)


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_a_cache_goes_at_once_when_nobody_has_it(config: Any, ops: kvdock.OpDispatcher) -> None:
    gc.disable()
    try:
        made = kvdock.create_cache(SPECS["uniform"], config, CPU, ops=ops)
        twin = copy.deepcopy(made)
        gone = [weakref.ref(cache.k_cache(0)) for cache in (made, twin)]
        del made, twin
        assert [ref() for ref in gone] == [None, None], "its memory must not wait for a garbage collection"
    finally:
        gc.enable()


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_a_deep_copy_keeps_the_backend(config: Any) -> None:
    runtime, calls = counting_runtime("first", "second")
    with kvdock.use_backend("second"):
        cache = kvdock.create_cache(SPECS["uniform"], config, CPU, ops=runtime.dispatcher)
    with kvdock.use_backend("first"):
        twin = copy.deepcopy(cache)
        write(twin)
    write(twin)
    assert {backend for backend, _ in calls} == {"second"}
    unnamed = copy.deepcopy(kvdock.create_cache(SPECS["uniform"], config, CPU, ops=runtime.dispatcher))
    calls.clear()
    write(unnamed)
    assert {backend for backend, _ in calls} == {"first"}
    with kvdock.use_backend("second"):
        write(unnamed)
    assert {backend for backend, _ in calls} == {"first", "second"}


def test_a_shallow_copy_shares_the_memory(cache: Any) -> None:
    twin = copy.copy(cache)
    assert type(twin) is type(cache)
    assert twin is not cache
    assert all(x is y for x, y in zip(views(cache), views(twin), strict=True))
    write(twin)
    assert same(contents(cache), contents(twin))


@pytest.mark.parametrize("dump", [pickle.dumps, lambda cache: torch.save(cache, io.BytesIO())], ids=["pickle", "torch.save"])
def test_pickling_says_what_to_do(cache: Any, dump: Way) -> None:
    with pytest.raises(kvdock.errors.UnsupportedError, match=rf"pickling a {type(cache).__name__}: .*Fix: pickle what it was made of"):
        dump({"cache": cache})


def test_what_a_cache_was_made_of_can_be_pickled_and_copied(cache: Any, ops: kvdock.OpDispatcher) -> None:
    made_of = (cache.spec, cache.config, cache.rank)
    for again in (pickle.loads(pickle.dumps(made_of)), copy.deepcopy(made_of)):  # noqa: S301 - what was just dumped
        assert again == made_of
        other = kvdock.create_cache(*again, ops=ops)
        for mine, its in zip(views(cache), views(other), strict=True):
            assert (mine.shape, mine.stride(), mine.dtype) == (its.shape, its.stride(), its.dtype)


class Own(kvdock.Cache):
    """A cache that someone else wrote: one layer, keys only; it keeps its ops and where they came from."""

    __slots__ = ("k",)  # beside the __dict__ that it inherits

    def __init__(self, ops: kvdock.OpDispatcher) -> None:
        self.k = torch.zeros(BLOCKS, BLOCK, 2, 4)
        self.v = torch.zeros(BLOCKS, BLOCK, 2, 4)
        self.ops, self.op = ops, ops.op("gather_paged")
        self.write = ops.op("paged_caching_").bind(self.k, self.v)

    num_layers, nbytes, device, dtype = 1, 0, torch.device("cpu"), torch.float32

    def k_cache(self, layer: int) -> torch.Tensor:
        return self.k

    def v_cache(self, layer: int) -> torch.Tensor:
        return self.v

    def reset(self) -> None:
        raise NotImplementedError


def test_a_cache_of_ones_own_is_copied_right(ops: kvdock.OpDispatcher) -> None:
    cache = Own(ops)
    twin, alias = copy.deepcopy(cache), copy.copy(cache)
    one, slot = torch.ones(1, 2, 4), torch.tensor([5])
    twin.write(one, one, slot, None, None)
    assert not cache.k.any()
    assert torch.equal(twin.k[1, 2], one[0])
    assert torch.equal(twin.v[1, 2], one[0])
    assert (twin.ops, twin.op) == (cache.ops, cache.op)
    assert alias.k is cache.k
    with pytest.raises(kvdock.errors.UnsupportedError, match="pickling a Own"):
        pickle.dumps(cache)


def test_a_bound_op_is_copied_with_its_pools(ops: kvdock.OpDispatcher) -> None:
    pool = torch.zeros(2, BLOCKS, BLOCK, 2, 4)
    kept = {"write": ops.op("paged_caching_").bind(*pool), "pool": pool}
    twin, alias = copy.deepcopy(kept), copy.copy(kept["write"])
    one = torch.ones(1, 2, 4)
    twin["write"](one, one, torch.tensor([5]), None, None)
    assert not pool.any()
    assert torch.equal(twin["pool"][:, 1, 2], torch.ones(2, 2, 4))
    alias(one, 2 * one, torch.tensor([0]), None, None)
    assert torch.equal(pool[1, 0, 0], 2 * one[0])
    with pytest.raises(kvdock.errors.UnsupportedError, match=r"pickling a bound op: .*2 pool.*Fix: bind one anew"):
        pickle.dumps(kept["write"])


@pytest.mark.parametrize("made", ["runtime", "dispatcher", "op"])
def test_parts_of_a_runtime_are_shared_by_copies(made: str) -> None:
    runtime, _ = counting_runtime("only")
    part: Any = {"runtime": runtime, "dispatcher": runtime.dispatcher, "op": runtime.dispatcher.op("copy_blocks_")}[made]
    assert copy.deepcopy([part])[0] is part
    assert copy.copy(part) is part
    with pytest.raises(kvdock.errors.UnsupportedError, match=rf"pickling a {type(part).__name__}: .*Fix: leave it out"):
        pickle.dumps(part)


@pytest.mark.parametrize(("layout", "heads"), LAYOUTS, ids=LAYOUT_NAMES)
def test_a_pool_stays_one_where_torch_copies_views_one_by_one(layout: kvdock.KVCacheLayout, heads: kvdock.HeadLayout) -> None:
    pool = PagedPool.allocate(3, BLOCKS, BLOCK, 2, 4, torch.float32, torch.device("meta"), layout, heads)
    twin, view = copy.deepcopy([pool, pool.layers[1]])
    assert view is twin.layers[1]
    for mine, its in zip((pool.memory, *pool.layers, pool.whole), (twin.memory, *twin.layers, twin.whole), strict=True):
        assert (mine.shape, mine.stride(), mine.storage_offset()) == (its.shape, its.stride(), its.storage_offset())
        assert its.untyped_storage()._cdata == twin.memory.untyped_storage()._cdata
    assert twin.memory.untyped_storage()._cdata != pool.memory.untyped_storage()._cdata


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_an_evolved_or_unique_copy_of_a_config_makes_the_same_cache(config: Any, ops: kvdock.OpDispatcher) -> None:
    for other in (config.unique_copy(), copy.copy(config), copy.deepcopy(config), attrs.evolve(config)):
        assert other == config
        made = kvdock.create_cache(SPECS["uniform"], other, CPU, ops=ops)
        assert [view.shape for view in views(made)] == [
            view.shape for view in views(kvdock.create_cache(SPECS["uniform"], config, CPU, ops=ops))
        ]
