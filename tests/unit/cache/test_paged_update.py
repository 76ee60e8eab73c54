"""Writing to a paged cache and reading from it, over every layout, against plain loops."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import kvdock
from support_caches import CPU, LAYOUT_NAMES, LAYOUTS, SPECS, bits, contents, read_slots, same, tokens, write_slots

BLOCKS, BLOCK = 5, 4

SLOTS = {
    "one block": torch.tensor([4, 5, 6, 7]),
    "last of one block and first of the next": torch.tensor([3, 4, 11, 12]),
    "scattered": torch.tensor([17, 2, 9, 0, 19, 5]),
    "reversed": torch.arange(19, 4, -1),
    "padding": torch.tensor([-1, 6, -2, 7, torch.iinfo(torch.int64).min]),
    "only padding": torch.tensor([-1, -1]),
    "rows": torch.tensor([[8, 9, 10], [0, -1, 16]]),
    "none": torch.zeros(0, dtype=torch.int64),
    "int32": torch.tensor([1, 18, 6], dtype=torch.int32),
    "strided": torch.tensor([13, -7, 2, -7, 8, -7])[::2],
}


def make(
    spec: kvdock.KVSpec,
    ops: kvdock.OpDispatcher,
    layout: tuple[kvdock.KVCacheLayout, kvdock.HeadLayout] = LAYOUTS[0],
    *,
    blocks: int = BLOCKS,
    block: int = BLOCK,
) -> kvdock.PagedKVCache:
    config = kvdock.PagedKVCacheConfig(num_blocks=blocks, block_size=block, layout=layout[0], head_layout=layout[1])
    return kvdock.create_cache(spec, config, CPU, ops=ops)


@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_NAMES)
@pytest.mark.parametrize("name", SPECS)
def test_update_writes_the_addressed_slots_of_one_layer_and_nothing_else(
    name: str, layout: tuple[kvdock.KVCacheLayout, kvdock.HeadLayout], ops: kvdock.OpDispatcher
) -> None:
    spec = SPECS[name]
    cache = make(spec, ops, layout)
    expected = contents(cache)
    for seed, (slots, layer) in enumerate(itertools.product(SLOTS.values(), range(cache.num_layers))):
        k, v = tokens(spec, layer, slots.shape, seed)
        returned = cache.update(layer, k, v, slots)
        pair = expected[layer]
        expected[layer] = (write_slots(pair[0], bits(k), slots), write_slots(pair[1], bits(v), slots))
        assert returned[0] is cache.k_cache(layer)
        assert returned[1] is cache.v_cache(layer)
        assert same(contents(cache), expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=LAYOUT_NAMES)
@pytest.mark.parametrize("name", SPECS)
def test_gather_reads_back_what_was_written(
    name: str, layout: tuple[kvdock.KVCacheLayout, kvdock.HeadLayout], ops: kvdock.OpDispatcher
) -> None:
    spec = SPECS[name]
    cache = make(spec, ops, layout)
    whole = torch.arange(BLOCKS * BLOCK)
    for layer in range(cache.num_layers):
        cache.update(layer, *tokens(spec, layer, whole.shape, seed=layer), whole)
    before = contents(cache)
    for slots, layer in itertools.product(SLOTS.values(), range(cache.num_layers)):
        k, v = cache.gather(layer, slots)
        assert torch.equal(bits(k), read_slots(before[layer][0], slots))
        assert torch.equal(bits(v), read_slots(before[layer][1], slots))
    assert same(contents(cache), before), "reading changes nothing"


def test_gather_fills_the_tensors_it_is_given(ops: kvdock.OpDispatcher) -> None:
    spec = SPECS["values differ from keys"]
    cache = make(spec, ops)
    slots = torch.tensor([19, -1, 3])
    k, v = tokens(spec, 1, slots.shape)
    cache.update(1, k, v, slots)
    out = (torch.full_like(k, 7), torch.full_like(v, 7))
    got = cache.gather(1, slots, out=out)
    assert got[0] is out[0]
    assert got[1] is out[1]
    k[1], v[1] = 0, 0
    assert torch.equal(bits(out[0]), bits(k))
    assert torch.equal(bits(out[1]), bits(v))


@pytest.mark.parametrize("block", [1, 3, 16])
def test_a_slot_is_block_times_size_plus_offset(block: int, ops: kvdock.OpDispatcher) -> None:
    spec = SPECS["uniform"]
    cache = make(spec, ops, blocks=3, block=block)
    assert cache.k_cache(0).shape == (3, block, 2, 8)
    for slot in range(3 * block):
        k, v = tokens(spec, 0, (1,), seed=slot)
        cache.update(0, k, v, torch.tensor([slot]))
        assert torch.equal(bits(cache.k_cache(0)[slot // block, slot % block]), bits(k[0]))
        assert torch.equal(bits(cache.v_cache(0)[slot // block, slot % block]), bits(v[0]))


def test_sources_may_be_slices_of_a_fused_projection(ops: kvdock.OpDispatcher) -> None:
    spec = SPECS["uniform"]
    cache = make(spec, ops)
    fused = torch.randn(6, 4 * 8 + 2 * 8 + 2 * 8)
    q, k, v = fused.split([32, 16, 16], dim=1)
    kept = fused.clone()
    slots = torch.tensor([0, 7, 8, 15, 16, 19])
    cache.update(0, k.view(6, 2, 8), v.view(6, 2, 8), slots)
    assert torch.equal(cache.gather(0, slots)[0], k.reshape(6, 2, 8))
    assert torch.equal(cache.gather(0, slots)[1], v.reshape(6, 2, 8))
    assert torch.equal(fused, kept), "inputs are not changed"
    assert q.shape == (6, 32)


def test_a_slot_past_the_pool_raises_and_writes_nothing(ops: kvdock.OpDispatcher) -> None:
    spec = SPECS["uniform"]
    cache = make(spec, ops)
    before = contents(cache)
    k, v = tokens(spec, 0, (2,))
    for bad in (BLOCKS * BLOCK, BLOCKS * BLOCK + 1, 2**40):
        with pytest.raises(kvdock.IndexRangeError, match=rf"slot_mapping\[1\].*{bad}"):
            cache.update(0, k, v, torch.tensor([3, bad]))
        assert same(contents(cache), before)


def bad_updates(spec: kvdock.KVSpec) -> dict[str, tuple[tuple[object, ...], type[Exception], str]]:
    k, v = tokens(spec, 0, (3,))
    slots = torch.tensor([0, 1, 2])
    return {
        "wrong dtype of k": ((k.double(), v, slots), kvdock.ArgumentTypeError, "k: expected torch.float32.*got torch.float64"),
        "wrong dtype of v": ((k, v.half(), slots), kvdock.ArgumentTypeError, "v: expected torch.float32.*got torch.float16"),
        "float slots": ((k, v, slots.float()), kvdock.ArgumentTypeError, "slot_mapping: expected one of torch.int32, torch.int64"),
        "too many heads": ((k.repeat(1, 2, 1), v, slots), kvdock.ArgumentValueError, r"k: expected shape.*got shape \[3, 4, 8\]"),
        "wrong dim": ((k, v[..., :4], slots), kvdock.ArgumentValueError, r"v: expected shape.*got shape \[3, 2, 4\]"),
        "fewer slots than tokens": ((k, v, slots[:2]), kvdock.ArgumentValueError, "expected shape"),
        "more slots than tokens": ((k[:2], v[:2], slots), kvdock.ArgumentValueError, "expected shape"),
        "a list": ((k.tolist(), v, slots), kvdock.ArgumentTypeError, "k: expected a torch.Tensor, got list"),
        "no tensor": ((k, None, slots), kvdock.ArgumentTypeError, "v: expected a torch.Tensor, got NoneType"),
        "numpy slots": ((k, v, np.array([0, 1, 2])), kvdock.ArgumentTypeError, "slot_mapping: expected a torch.Tensor"),
        "rows that are not dense": ((k.mT.contiguous().mT, v, slots), kvdock.ArgumentValueError, "k: expected an innermost stride of 1"),
        "another device": ((k.to("meta"), v, slots), kvdock.ArgumentValueError, "k: expected a tensor on cpu"),
        "slots on another device": ((k, v, slots.to("meta")), kvdock.ArgumentValueError, "slot_mapping: expected a tensor on cpu"),
    }


@pytest.mark.parametrize("case", bad_updates(SPECS["uniform"]))
def test_a_wrong_argument_is_named_and_nothing_is_written(case: str, ops: kvdock.OpDispatcher) -> None:
    spec = SPECS["uniform"]
    cache = make(spec, ops)
    cache.update(0, *tokens(spec, 0, (4,)), torch.tensor([0, 1, 2, 3]))
    before = contents(cache)
    arguments, error, text = bad_updates(spec)[case]
    with pytest.raises(error, match=text) as caught:
        cache.update(0, *arguments)  # type: ignore[arg-type]
    assert isinstance(caught.value, kvdock.KVDockError)
    assert "Fix: " in str(caught.value)
    assert same(contents(cache), before)
    cache.update(0, *tokens(spec, 0, (1,), seed=9), torch.tensor([2]))  # the cache goes on
    assert not same(contents(cache), before)


def test_a_source_inside_the_pool_is_refused(ops: kvdock.OpDispatcher) -> None:
    cache = make(SPECS["uniform"], ops)
    inside = cache.k_cache(0)[0]
    with pytest.raises(kvdock.ArgumentValueError, match=r"k: expected memory outside k_cache.*clone\(\)"):
        cache.update(0, inside, inside.clone(), torch.tensor([8, 9, 10, 11]))
    with pytest.raises(kvdock.ArgumentValueError, match="v: expected memory outside k_cache"):
        cache.update(0, inside.clone(), inside, torch.tensor([8, 9, 10, 11]))
    other = cache.k_cache(1)[0]  # another layer is other memory
    cache.update(0, other, other.clone(), torch.tensor([8, 9, 10, 11]))
