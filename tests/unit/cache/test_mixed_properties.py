"""Layers of any kinds in one memory, as bytes: each write changes what it names, and nothing around it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import kvdock
from support_caches import CPU, RUNTIMES, addresses, random_bits, runtime_for
from support_mixed import Spot, as_bytes, config_of, guarded, mixtures, planned, spots
from support_slow import examples

FEW = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
OPS = {name: runtime_for(name).dispatcher for name in RUNTIMES}


@FEW
@given(mixtures())
def test_no_two_buffers_of_a_block_overlap_and_all_are_in_it(mixture: tuple[kvdock.KVSpec, dict[str, Any]]) -> None:
    spec, options = mixture
    plan = planned(spec, options, CPU)
    assume(plan is not None)
    assert plan.bytes_per_block % max(16, options["alignment"]) == 0
    _, memory = guarded(plan.nbytes, max(16, options["alignment"]))
    cache = kvdock.PagedKVCache.from_tensors(spec, config_of(options), CPU, memory, ops=OPS["portable"])
    assert cache.groups == plan.groups
    for number, group in enumerate(cache.groups):
        found: list[int] = []
        for (layer, _), part in zip(group.members, group.parts, strict=True):
            for buffer in part.buffers:
                view = cache.buffers(layer)[buffer.name]
                assert cache.group_of(layer, buffer.name) == number
                assert view.dtype == buffer.dtype
                assert view.shape[1:] == (buffer.shape if group.retention.is_state else (group.block_size, *buffer.shape))
                first = addresses(view[0]) - memory.data_ptr()
                assert int(first.min()) % 16 == 0
                assert int(addresses(view[-1]).max()) + view.itemsize <= memory.data_ptr() + plan.nbytes
                found += [at + byte for at in first.flatten().tolist() for byte in range(view.itemsize)]
        assert len(set(found)) == len(found), "two buffers of a group's block share a byte"
        assert max(found) < plan.bytes_per_block


def written(cache: kvdock.PagedKVCache, spot: Spot, data: st.DataObject, seed: int) -> list[tuple[int, list[int], Any]]:
    """Write to a layer's buffer or buffers, in the way for it; returns block, places in it, and bytes that must be there."""
    group, layer = spot.group, spot.layer
    slots = data.draw(st.lists(st.integers(0, cache.num_blocks * group.block_size - 1), unique=True, max_size=5))
    rows = random_bits((len(slots), *spot.buffer.shape), spot.buffer.dtype, seed)
    is_hnd = cache.config.head_layout is kvdock.HeadLayout.HND and not group.retention.is_state
    parts = [(spot, rows)]
    mapping = torch.tensor([*slots, -1])
    names = list(cache.buffers(layer))
    if spot.buffer.name == "k":
        other = next(each for each in spots(cache.groups) if each.layer == layer and each.buffer.name == "v")
        parts.append((other, random_bits((len(slots), *other.buffer.shape), other.buffer.dtype, seed + 1)))
        new = [torch.cat([part, torch.zeros(1, *part.shape[1:], dtype=part.dtype)]) for _, part in parts]
        cache.update(layer, new[0], new[1], mapping)
        assert all(
            torch.equal(as_t(a), as_t(b)) for a, b in zip(cache.gather(layer, mapping[:-1]), (new[0][:-1], new[1][:-1]), strict=True)
        )
    elif spot.buffer.values:
        padded = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
        cache.update(layer, padded[:, : spot.buffer.values], padded[:, spot.buffer.values :], mapping)
        assert torch.equal(as_t(torch.cat(cache.gather(layer, mapping[:-1]), -1)), as_t(rows))
    else:
        view = (cache.state if group.retention.is_state else cache.buffers)(layer)[spot.buffer.name]
        for slot, row in zip(slots, rows, strict=True):
            target = view[slot] if group.retention.is_state else view[slot // group.block_size, slot % group.block_size]
            target.view(torch.uint8).copy_(row.view(torch.uint8))
    assert spot.buffer.name in names
    return [
        (slot // group.block_size, each.token(slot % group.block_size, is_hnd), row)
        for each, new_rows in parts
        for slot, row in zip(slots, as_bytes(new_rows) if slots else [], strict=True)
    ]


def as_t(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("runtime", RUNTIMES)
@FEW
@given(mixtures(), st.data())
def test_a_memory_changes_where_something_is_written_and_nowhere_else(
    runtime: str, mixture: tuple[kvdock.KVSpec, dict[str, Any]], data: st.DataObject
) -> None:
    spec, options = mixture
    plan = planned(spec, options, CPU)
    assume(plan is not None)
    whole, memory = guarded(plan.nbytes, max(16, options["alignment"]))
    expected = whole.copy()
    begin = memory.data_ptr() - whole.ctypes.data
    blocks = expected[begin : begin + plan.nbytes].reshape(options["num_blocks"], plan.bytes_per_block)
    cache = kvdock.PagedKVCache.from_tensors(spec, config_of(options), CPU, memory, ops=OPS[runtime])
    assert np.array_equal(whole, expected), "nothing is zeroed"
    usable = [spot for spot in spots(plan.groups) if spot.buffer.name != "v"]
    for seed in range(4):
        spot = data.draw(st.sampled_from(usable))
        for block, places, row in written(cache, spot, data, 10 * seed):
            blocks[block, places] = row
        assert np.array_equal(whole, expected)
        src, dst = data.draw(st.permutations(range(options["num_blocks"])))[:2]
        cache.copy_blocks([(src, dst), (-1, src)])
        blocks[dst] = blocks[src]
        assert np.array_equal(whole, expected), "all bytes of a block, and no other"
    twin = copy.deepcopy(cache)
    cache.reset()
    blocks[:] = 0
    assert np.array_equal(whole, expected), "what is around the memory is somebody else's"
    twin.copy_blocks([(0, 1)])
    assert np.array_equal(whole, expected), "a copy has memory of its own"


@FEW
@given(mixtures(), st.integers(2, 4))
def test_ranks_plan_alike_where_heads_divide(mixture: tuple[kvdock.KVSpec, dict[str, Any]], tp_size: int) -> None:
    spec, options = mixture
    plans = []
    for rank in range(tp_size):
        try:
            plans.append(kvdock.plan_blocks(spec, config_of(options), kvdock.RankInfo("cpu", tp_size, rank)))
        except kvdock.ArgumentValueError as error:
            plans.append(str(error).partition(" ranks")[0])  # type: ignore[arg-type]
    assert all(plan == plans[0] for plan in plans)


@FEW
@given(mixtures())
def test_a_cache_takes_what_is_planned(mixture: tuple[kvdock.KVSpec, dict[str, Any]]) -> None:
    spec, options = mixture
    assume(planned(spec, options, CPU) is not None)
    plan = kvdock.plan_blocks(spec, config_of(options), CPU)
    cache = kvdock.create_cache(spec, config_of(options), CPU, ops=OPS["portable"])
    assert cache.groups == plan.groups
    assert cache.num_blocks == options["num_blocks"]
    assert cache.nbytes == plan.nbytes
    for region in cache.memory_regions():
        assert region.address % options["alignment"] == 0
        assert {place.block_stride % options["alignment"] for place in region.places} <= {0}
    assert not any(view.view(torch.uint8).any() for layer in range(cache.num_layers) for view in cache.buffers(layer).values())
    with pytest.raises(kvdock.UnsupportedError, match="pickling a"):
        cache.__reduce_ex__(4)
