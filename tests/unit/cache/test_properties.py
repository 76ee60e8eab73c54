"""Any spec, any layout, any rank: places never alias, budgets hold, and a cache is a dictionary of slots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvdock
from kvdock.cache.pool import block_bytes, rank_layers
from support_caches import addresses, bits, random_bits, read_slots, runtime_for, write_slots
from support_slow import examples

OPS = runtime_for("portable").dispatcher
FEW = settings(max_examples=examples(40), deadline=None)

small = st.integers(1, 4)
tp_sizes = st.sampled_from([1, 2, 3, 4])


@st.composite
def layers(draw: st.DrawFn, tp_size: int) -> kvdock.LayerSpec:
    """Draw a layer whose heads divide over the ranks, or the other way round."""
    divisors = [n for n in range(1, tp_size + 1) if tp_size % n == 0]
    heads = st.one_of(st.integers(1, 3).map(lambda n: n * tp_size), st.sampled_from(divisors))
    return kvdock.LayerSpec(draw(heads), draw(heads), draw(st.integers(1, 6)), draw(st.integers(1, 6)))


@st.composite
def setups(draw: st.DrawFn) -> tuple[kvdock.KVSpec, kvdock.RankInfo, dict[str, object]]:
    """Draw a spec whose layers may repeat, a rank and a configuration without a size."""
    tp_size = draw(tp_sizes)
    kinds = draw(st.lists(layers(tp_size), min_size=1, max_size=3))
    picked = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4))
    spec = kvdock.KVSpec(picked, 32, draw(st.sampled_from([torch.float16, torch.float32])))
    rank = kvdock.RankInfo("cpu", tp_size, draw(st.integers(0, tp_size - 1)))
    layout = {"layout": draw(st.sampled_from(kvdock.KVCacheLayout)), "head_layout": draw(st.sampled_from(kvdock.HeadLayout))}
    return spec, rank, {**layout, "block_size": draw(small)}


def create(spec: kvdock.KVSpec, rank: kvdock.RankInfo, config: dict[str, object], **size: int) -> kvdock.PagedKVCache:
    return kvdock.create_cache(spec, kvdock.PagedKVCacheConfig(**config, **size), rank, ops=OPS)  # type: ignore[arg-type]


@FEW
@given(setups(), small)
def test_no_two_places_share_an_address_and_the_pool_has_no_other(
    setup: tuple[kvdock.KVSpec, kvdock.RankInfo, dict[str, object]], blocks: int
) -> None:
    cache = create(*setup, num_blocks=blocks)
    places = 0
    found: set[int] = set()
    for layer in range(cache.num_layers):
        for view in (cache.k_cache(layer), cache.v_cache(layer)):
            assert view.ndim == 4
            assert view.shape[:2] == (blocks, cache.block_size)
            start, storage = view.untyped_storage().data_ptr(), view.untyped_storage().nbytes()
            where = addresses(view)
            assert start <= int(where.min())
            assert int(where.max()) + cache.dtype.itemsize <= start + storage
            found.update(where.flatten().tolist())
            places += view.numel()
    assert len(found) == places == cache.nbytes // cache.dtype.itemsize


@FEW
@given(setups(), st.integers(1, 5000))
def test_a_budget_is_never_exceeded_and_one_more_block_would(
    setup: tuple[kvdock.KVSpec, kvdock.RankInfo, dict[str, object]], budget: int
) -> None:
    spec, rank, config = setup
    per_block = block_bytes(rank_layers(spec, rank).values(), int(config["block_size"]), spec.dtype)  # type: ignore[call-overload]
    if budget < per_block:
        with pytest.raises(kvdock.CapacityError, match=f"at least {per_block} bytes"):
            create(spec, rank, config, max_kv_memory_bytes=budget)
        return
    cache = create(spec, rank, config, max_kv_memory_bytes=budget)
    assert cache.nbytes == cache.num_blocks * per_block <= budget < cache.nbytes + per_block


@FEW
@given(setups(), st.data())
def test_a_cache_is_a_dictionary_of_slots(setup: tuple[kvdock.KVSpec, kvdock.RankInfo, dict[str, object]], data: st.DataObject) -> None:
    cache = create(*setup, num_blocks=3)
    capacity = 3 * cache.block_size
    layer = data.draw(st.integers(0, cache.num_layers - 1))
    model_k, model_v = bits(cache.k_cache(layer)).clone(), bits(cache.v_cache(layer)).clone()
    for seed in range(3):
        drawn = data.draw(st.lists(st.integers(0, capacity - 1), unique=True, max_size=6))
        slots = torch.tensor([*drawn, -1], dtype=torch.int64)
        k = random_bits((len(slots), *model_k.shape[2:]), cache.dtype, seed)
        v = random_bits((len(slots), *model_v.shape[2:]), cache.dtype, seed + 9)
        cache.update(layer, k, v, slots)
        model_k, model_v = write_slots(model_k, bits(k), slots), write_slots(model_v, bits(v), slots)
        src, dst = data.draw(st.permutations(range(3)))[:2]
        cache.copy_blocks([(src, dst)])
        model_k[dst], model_v[dst] = model_k[src], model_v[src]
        asked = torch.tensor(data.draw(st.lists(st.integers(-2, capacity - 1), max_size=6)), dtype=torch.int64)
        got_k, got_v = cache.gather(layer, asked)
        assert torch.equal(bits(got_k), read_slots(model_k, asked))
        assert torch.equal(bits(got_v), read_slots(model_v, asked))
    assert torch.equal(bits(cache.k_cache(layer)), model_k)
    assert torch.equal(bits(cache.v_cache(layer)), model_v)
    others = [i for i in range(cache.num_layers) if i != layer]
    assert not any(bits(view).any() for i in others for view in (cache.k_cache(i), cache.v_cache(i)))


@FEW
@given(st.integers(1, 64), st.integers(1, 64))
def test_ranks_hold_all_heads_evenly_or_the_split_is_refused(heads: int, tp_size: int) -> None:
    ranks = [kvdock.RankInfo("cpu", tp_size, i) for i in range(tp_size)]
    if heads % tp_size and tp_size % heads:
        for rank in ranks:
            with pytest.raises(kvdock.ArgumentValueError, match=f"heads = {heads} on tp_size = {tp_size}"):
                rank.head_range(heads)
        return
    held = [rank.head_range(heads) for rank in ranks]
    assert len({len(share) for share in held}) == 1
    counts = [sum(head in share for share in held) for head in range(heads)]
    assert counts == [max(1, tp_size // heads)] * heads
    assert [share.start for share in held] == sorted(share.start for share in held), "ranks hold heads in order"
