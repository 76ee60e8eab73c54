"""One process, several devices."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import kvdock
from support_caches import bits, counting_runtime, random_bits

LENGTH = 12
SPEC = kvdock.KVSpec((kvdock.LayerSpec(4, 2, 8, 6), kvdock.LayerSpec(2, 2, 3, 5)), 32, torch.bfloat16)


def create(ops: kvdock.OpDispatcher, devices: list[str] | None = None) -> kvdock.ShardedKVCache:
    return kvdock.ShardedKVCache.create(SPEC, LENGTH, devices or ["cpu", "cpu"], ops=ops)


def views(cache: kvdock.ShardedKVCache) -> list[torch.Tensor]:
    """Return every tensor of a cache."""
    places = [(shard, layer) for shard in range(len(cache.devices)) for layer in range(cache.num_layers)]
    return [view(*place) for place in places for view in (cache.k_cache, cache.v_cache)]


def fill(cache: kvdock.ShardedKVCache) -> None:
    """Write every position through `update`."""
    for shard in range(len(cache.devices)):
        for layer in range(cache.num_layers):
            shapes = cache.k_cache(shard, layer).shape, cache.v_cache(shard, layer).shape
            k, v = (random_bits(shape, SPEC.dtype, seed=10 * shard + layer) for shape in shapes)
            for got, given in zip(cache.update(shard, layer, k, v, 0), (k, v), strict=True):
                assert torch.equal(bits(got), bits(given))


def test_heads_are_split_over_the_devices(ops: kvdock.OpDispatcher) -> None:
    cache = create(ops)
    assert cache.devices == (torch.device("cpu"), torch.device("cpu"))
    assert (cache.num_layers, cache.max_len) == (2, LENGTH)
    assert [shard.rank.tp_rank for shard in cache.shards] == [0, 1]
    assert all(isinstance(shard, kvdock.StaticKVCache) for shard in cache.shards)
    for shard in (0, 1):
        assert cache.k_cache(shard, 0).shape == (1, 2, LENGTH, 8)
        assert cache.v_cache(shard, 0).shape == (1, 1, LENGTH, 6)
        assert cache.k_cache(shard, 1).shape == (1, 1, LENGTH, 3)
        assert cache.v_cache(shard, 1).shape == (1, 1, LENGTH, 5)
    assert len({view.untyped_storage().data_ptr() for view in views(cache)}) == 8
    assert cache.nbytes == sum(view.nbytes for view in views(cache)) == LENGTH * (4 * 8 + 2 * 6 + 2 * 3 + 2 * 5) * 2
    assert not any(view.any() for view in views(cache))


def test_each_shard_is_written_on_its_own(ops: kvdock.OpDispatcher) -> None:
    cache = create(ops)
    k, v = random_bits((1, 2, 3, 8), SPEC.dtype), random_bits((1, 1, 3, 6), SPEC.dtype)
    got = cache.update(1, 0, k, v, 4)
    assert got[0].shape == (1, 2, 7, 8)
    assert torch.equal(bits(cache.k_cache(1, 0)[:, :, 4:7]), bits(k))
    assert torch.equal(bits(cache.v_cache(1, 0)[:, :, 4:7]), bits(v))
    assert not cache.k_cache(0, 0).any()
    with pytest.raises(kvdock.IndexRangeError, match="cache_lengths"):
        cache.update(1, 0, k, v, LENGTH - 2)


@pytest.mark.parametrize("count", [0, 1, 7, LENGTH])
def test_a_duplicate_holds_the_first_tokens_and_zeros_after(count: int, ops: kvdock.OpDispatcher) -> None:
    cache = create(ops)
    fill(cache)
    before = [bits(view).clone() for view in views(cache)]
    twin = cache.duplicate(count)
    assert type(twin) is kvdock.ShardedKVCache
    assert (twin.max_len, twin.devices, twin.nbytes) == (cache.max_len, cache.devices, cache.nbytes)
    for mine, its in zip(before, views(twin), strict=True):
        assert torch.equal(bits(its)[:, :, :count], mine[:, :, :count])
        assert not bits(its)[:, :, count:].any()
    assert all(torch.equal(bits(view), kept) for view, kept in zip(views(cache), before, strict=True)), "the source is unchanged"


def test_a_duplicate_has_memory_of_its_own(ops: kvdock.OpDispatcher) -> None:
    cache = create(ops)
    fill(cache)
    twin = cache.duplicate(LENGTH)
    mine, its = ({view.untyped_storage().data_ptr() for view in views(of)} for of in (cache, twin))
    assert not mine & its
    before = [bits(view).clone() for view in views(twin)]
    cache.reset()
    assert not any(bits(view).any() for view in views(cache))
    cache.drop()
    assert all(torch.equal(bits(view), kept) for view, kept in zip(views(twin), before, strict=True))
    again = twin.duplicate(3)
    twin.reset()
    assert torch.equal(bits(again.k_cache(0, 0))[:, :, :3], before[0][:, :, :3])


@pytest.mark.parametrize(
    ("count", "error", "text"),
    [
        (LENGTH + 1, kvdock.IndexRangeError, "seq_len: expected 0 to 12.*got 13. Fix: "),
        (-1, kvdock.ArgumentValueError, "seq_len: expected at least 0, got -1"),
        (1.0, kvdock.ArgumentTypeError, "seq_len: expected an int"),
        (True, kvdock.ArgumentTypeError, "seq_len: expected an int"),
    ],
)
def test_duplicating_past_the_length_is_an_error(count: Any, error: type[Exception], text: str, ops: kvdock.OpDispatcher) -> None:
    with pytest.raises(error, match=text):
        create(ops).duplicate(count)


USES: dict[str, Callable[[kvdock.ShardedKVCache], object]] = {
    "shards": lambda cache: cache.shards,
    "max_len": lambda cache: cache.max_len,
    "num_layers": lambda cache: cache.num_layers,
    "devices": lambda cache: cache.devices,
    "nbytes": lambda cache: cache.nbytes,
    "k_cache": lambda cache: cache.k_cache(0, 0),
    "v_cache": lambda cache: cache.v_cache(0, 0),
    "update": lambda cache: cache.update(0, 0, torch.zeros(1), torch.zeros(1), 0),
    "duplicate": lambda cache: cache.duplicate(1),
    "reset": lambda cache: cache.reset(),
    "with": lambda cache: cache.__enter__(),
}


def test_the_uses_are_all_that_there_are() -> None:
    public = {name for name in vars(kvdock.ShardedKVCache) if not name.startswith("_")}
    assert public - set(USES) == {"create", "drop"}


@pytest.mark.parametrize("use", USES)
def test_a_dropped_cache_raises(use: str, ops: kvdock.OpDispatcher) -> None:
    cache = create(ops)
    cache.drop()
    with pytest.raises(kvdock.DroppedCacheError, match=r"released by drop\(\).*Fix: create or duplicate") as caught:
        USES[use](cache)
    assert isinstance(caught.value, RuntimeError)


def test_dropping_gives_the_memory_back_and_may_be_done_twice(ops: kvdock.OpDispatcher) -> None:
    cache = create(ops)
    fill(cache)
    twin = cache.duplicate(2)
    storages = [StorageWeakRef(view.untyped_storage()) for view in views(cache)]
    assert not any(storage.expired() for storage in storages)
    cache.drop()
    assert all(storage.expired() for storage in storages), "at once, without waiting for a garbage collector"
    cache.drop()
    assert twin.nbytes > 0


def test_a_with_block_drops_at_its_end(ops: kvdock.OpDispatcher) -> None:
    with create(ops) as cache:
        storage = StorageWeakRef(cache.k_cache(0, 0).untyped_storage())
        cache.reset()
    assert storage.expired()
    with pytest.raises(kvdock.DroppedCacheError):
        cache.reset()
    dropped_inside = create(ops)
    with dropped_inside:
        dropped_inside.drop()


def test_a_with_block_drops_on_an_error_and_lets_it_through(ops: kvdock.OpDispatcher) -> None:
    cache = create(ops)
    with pytest.raises(ZeroDivisionError), cache:
        _ = 1 // 0
    with pytest.raises(kvdock.DroppedCacheError):
        cache.reset()


@pytest.mark.parametrize(
    ("length", "devices", "error", "text"),
    [
        (0, ["cpu"], kvdock.ArgumentValueError, "max_len: expected at least 1, got 0"),
        (33, ["cpu"], kvdock.ArgumentValueError, "max_len: expected at most 32.*got 33"),
        (4.0, ["cpu"], kvdock.ArgumentTypeError, "max_len: expected an int"),
        (4, [], kvdock.ArgumentValueError, r"devices: expected a list of devices.*got \[\]"),
        (4, "cpu", kvdock.ArgumentValueError, "devices: expected a list of devices.*got 'cpu'"),
        (4, torch.device("cpu"), kvdock.ArgumentValueError, "devices: expected a list of devices"),
        (4, ["cpu", "no such device"], kvdock.ArgumentValueError, "device: .*'no such device'"),
        (4, ["cpu", None], kvdock.ArgumentTypeError, "device: .*None"),
        (4, ["cpu"] * 3, kvdock.ArgumentValueError, "num_k_heads = 4 on tp_size = 3"),
        (4, ["cpu"] * 6, kvdock.ArgumentValueError, "num_k_heads = 4 on tp_size = 6"),
    ],
)
def test_wrong_arguments_are_named(length: Any, devices: Any, error: type[Exception], text: str, ops: kvdock.OpDispatcher) -> None:
    with pytest.raises(error, match=text):
        kvdock.ShardedKVCache.create(SPEC, length, devices, ops=ops)


def test_more_devices_than_heads_hold_each_head_more_than_once(ops: kvdock.OpDispatcher) -> None:
    cache = create(ops, ["cpu"] * 4)
    assert [cache.k_cache(shard, 0).shape[1] for shard in range(4)] == [1, 1, 1, 1]
    assert [cache.v_cache(shard, 0).shape[1] for shard in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("shard", [-1, 2, 10**9])
def test_a_shard_out_of_range_is_named(shard: int, ops: kvdock.OpDispatcher) -> None:
    with pytest.raises(kvdock.IndexRangeError, match=f"shard: expected 0 to 1, got {shard}. Fix: "):
        create(ops).k_cache(shard, 0)


@pytest.mark.parametrize("shard", [True, 0.0, "0", None])
def test_a_shard_that_is_no_int_is_refused(shard: Any, ops: kvdock.OpDispatcher) -> None:
    with pytest.raises(kvdock.ArgumentTypeError, match=r"shard: expected an int from 0 to 1, got .*Fix: pass a plain int"):
        create(ops).v_cache(shard, 0)


def test_use_backend_is_kept_for_good() -> None:
    runtime, calls = counting_runtime("usual", "other")
    with kvdock.use_backend("other"):
        cache = create(runtime.dispatcher)
    fill(cache)
    assert set(calls) == {("other", "static_update_")}


def test_a_duplicate_keeps_the_backend() -> None:
    runtime, calls = counting_runtime("first", "second")
    with kvdock.use_backend("second"):
        cache = create(runtime.dispatcher)
    for twin in (cache.duplicate(3), copy.deepcopy(cache), copy.copy(cache)):
        calls.clear()
        fill(twin)
        assert {backend for backend, _ in calls} == {"second"}
    with kvdock.use_backend("second"):
        free = create(runtime.dispatcher, ["cpu"])
    with kvdock.use_backend("first"):
        calls.clear()
        fill(free.duplicate(0))
    assert {backend for backend, _ in calls} == {"second"}


@pytest.mark.parametrize("inferring", [False, True])
def test_a_deep_copy_has_memory_of_its_own(ops: kvdock.OpDispatcher, inferring: bool) -> None:
    cache = create(ops)
    fill(cache)
    before = [bits(view).clone() for view in views(cache)]
    with torch.inference_mode(inferring):
        one, other = copy.deepcopy([cache, cache])
    assert one is other
    assert type(one) is type(cache)
    assert one.devices == cache.devices
    assert all(torch.equal(bits(view), old) for view, old in zip(views(one), before, strict=True))
    one.reset()
    fill(one)
    one.reset()
    assert not any(view.any() for view in views(one))
    assert all(torch.equal(bits(view), old) for view, old in zip(views(cache), before, strict=True))
    one.drop()
    assert cache.shards, "each is dropped by itself"


def test_a_shallow_copy_shares_the_memory_and_is_dropped_by_itself(ops: kvdock.OpDispatcher) -> None:
    cache = create(ops)
    twin = copy.copy(cache)
    fill(twin)
    assert all(x is y for x, y in zip(views(cache), views(twin), strict=True))
    twin.drop()
    assert cache.shards
    for dropped in (copy.copy(twin), copy.deepcopy(twin)):
        with pytest.raises(kvdock.errors.DroppedCacheError):
            _ = dropped.shards


def test_pickling_says_what_to_do(ops: kvdock.OpDispatcher) -> None:
    with pytest.raises(kvdock.errors.UnsupportedError, match="pickling a StaticKVCache"):
        pickle.dumps(create(ops))
