"""Swapping blocks of caches with latents, several groups and states: against a plain copy by view, and every other byte as it was."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch

import kvdock
from kvdock.layers import Buffer, HybridLayerSpec, KeepAll, KeepState, KeepWindow, OpaqueLayerSpec, SharedLayerSpec, StateLayerSpec
from support_caches import CPU, LAYOUTS, SPECS, random_bits, runtime_of
from support_plugins import InProcessBackend

BF16, F32 = torch.bfloat16, torch.float32
HND, NHD = kvdock.HeadLayout.HND, kvdock.HeadLayout.NHD
FULL, LATENT = kvdock.LayerSpec(2, 2, 16, 16), kvdock.MLALayerSpec(32, 8)
NEAR, FAR = (kvdock.LayerSpec(2, 2, 16, 16, window=window) for window in (8, 16))
STATE = StateLayerSpec([Buffer("conv", (24, 4), BF16), Buffer("steps", (3,), torch.uint8)])

ONE_GROUP = {
    "latents": kvdock.KVSpec((LATENT,) * 3, 64, BF16),
    "latents of two sizes": kvdock.KVSpec((LATENT, kvdock.MLALayerSpec(16, 4), LATENT), 64, F32),
    "a window": kvdock.KVSpec((NEAR, NEAR), 4096, BF16),
}
SEVERAL = {
    "windows": kvdock.KVSpec((NEAR, FULL, FAR, NEAR), 4096, F32),
    "states": kvdock.KVSpec((STATE, FULL, STATE), 4096, F32),
    "everything": kvdock.KVSpec(
        (NEAR, FULL, STATE, LATENT, SharedLayerSpec(1), OpaqueLayerSpec(40), HybridLayerSpec([FAR, STATE])), 4096, F32
    ),
}
PAIRS = [(0, 8), (5, 0), (-1, 3), (2, -4), (0, 1)]


def make(
    spec: kvdock.KVSpec, ops: kvdock.OpDispatcher | None = None, seed: int = 0, blocks: int = 9, **options: Any
) -> kvdock.PagedKVCache:
    """Return a cache full of bits, gaps included."""
    cache = kvdock.create_cache(spec, kvdock.PagedKVCacheConfig(num_blocks=blocks, **{"block_size": 4, **options}), CPU, ops=ops)
    for number, memory in enumerate(raw(cache)):
        memory.copy_(random_bits(memory.shape, torch.uint8, seed * 100 + number))
    return cache


def raw(cache: kvdock.PagedKVCache) -> list[torch.Tensor]:
    """All bytes of a cache, by pool; views."""
    return [pool.memory.view(torch.uint8) for pool in cache._store.pools]


def image(cache: kvdock.PagedKVCache) -> list[torch.Tensor]:
    return [memory.clone() for memory in raw(cache)]


def unchanged(cache: kvdock.PagedKVCache, before: list[torch.Tensor]) -> bool:
    return all(torch.equal(now, old) for now, old in zip(raw(cache), before, strict=True))


def copied_by_view(src: kvdock.PagedKVCache, twin: kvdock.PagedKVCache, pairs: Any, group: int | None = None) -> list[torch.Tensor]:
    """Copy block by block and buffer by buffer into a cache like the destination, and return its bytes."""
    for (a, b), layer in itertools.product(pairs, range(src.num_layers)):
        for name, theirs in twin.buffers(layer).items():
            if min(a, b) >= 0 and group in (None, twin.group_of(layer, name)):
                theirs[b] = src.buffers(layer)[name][a]
    return image(twin)


# One group


@pytest.mark.parametrize("name", ONE_GROUP)
@pytest.mark.parametrize("gaps", [(1, 1), (1, 64), (256, 1)], ids=str)
def test_one_group_between_any_layouts_and_alignments(name: str, gaps: tuple[int, int], ops: kvdock.OpDispatcher) -> None:
    spec = ONE_GROUP[name]
    for one, other in itertools.product(LAYOUTS, LAYOUTS):
        (ours, heads), (theirs, their_heads) = one, other
        src = make(spec, ops, 1, blocks=6, layout=ours, head_layout=heads, alignment=gaps[0])
        dst, twin = (make(spec, ops, 2, layout=theirs, head_layout=their_heads, alignment=gaps[1]) for _ in range(2))
        before = image(src)
        src.swap_blocks(dst, PAIRS)
        assert unchanged(dst, copied_by_view(src, twin, PAIRS)), (one, other)
        assert unchanged(src, before), (one, other)


@pytest.mark.parametrize("name", ONE_GROUP)
def test_keys_and_values_arrive_as_attention_reads_them(name: str, ops: kvdock.OpDispatcher) -> None:
    """Of latents, values are a part of what keys are: both are those of the source, and no other block's."""
    spec = ONE_GROUP[name]
    src, dst = make(spec, ops, 3, head_layout=HND), make(spec, ops, 4, head_layout=NHD, layout=kvdock.KVCacheLayout.PAGE_FIRST)
    before = copy.deepcopy(dst)
    src.swap_blocks(dst, [(7, 2)])
    for layer in range(src.num_layers):
        for read in (kvdock.PagedKVCache.k_cache, kvdock.PagedKVCache.v_cache):
            now, old, ours = (read(cache, layer).contiguous().view(torch.uint8) for cache in (dst, before, src))
            assert torch.equal(now[2], ours[7])
            assert torch.equal(now[[0, 1, *range(3, 9)]], old[[0, 1, *range(3, 9)]])


# Several groups


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("gaps", [(16, 64), (64, 16)], ids=str)
def test_with_another_order_of_heads_a_group_is_all_that_is_written(name: str, gaps: tuple[int, int], ops: kvdock.OpDispatcher) -> None:
    """A block is as many bytes in every group, but which of them are a group's own is its own affair."""
    spec = SEVERAL[name]
    for heads, theirs in ((HND, NHD), (NHD, HND)):
        src = make(spec, ops, 1, blocks=6, head_layout=heads, alignment=gaps[0])
        before = image(src)
        for group in range(len(src.groups)):
            dst, twin = (make(spec, ops, 2, head_layout=theirs, alignment=gaps[1]) for _ in range(2))
            src.swap_blocks(dst, PAIRS, group=group)
            assert unchanged(dst, copied_by_view(src, twin, PAIRS, group)), (heads, group)
        assert unchanged(src, before)


def test_an_alignment_that_makes_other_blocks_is_refused(ops: kvdock.OpDispatcher) -> None:
    """Whole blocks of groups become pages of 4096 bytes by holding more tokens each: those are other blocks."""
    src, dst = make(SEVERAL["windows"], ops, 1), make(SEVERAL["windows"], ops, 2, alignment=4096)
    assert [group.block_size for group in src.groups] != [group.block_size for group in dst.groups]
    before = image(dst)
    with pytest.raises(kvdock.ArgumentValueError, match=r"swap_blocks: dst: expected what this one keeps: blocks of \[8, 2, 16\] float32"):
        src.swap_blocks(dst, [(0, 1)])
    assert unchanged(dst, before)


@pytest.mark.parametrize("name", SEVERAL)
def test_alike_caches_swap_whole_blocks_whatever_the_group(name: str, ops: kvdock.OpDispatcher) -> None:
    """A block belongs to one group, so that all its bytes may go at once: those of the other blocks stay."""
    src = make(SEVERAL[name], ops, 1, blocks=6)
    for group in range(len(src.groups)):
        dst = make(SEVERAL[name], ops, 2)
        (after,), (source,) = image(dst), raw(src)
        for a, b in ((0, 8), (5, 0), (0, 1)):
            after[b] = source[a]
        src.swap_blocks(dst, PAIRS, group=group)
        assert unchanged(dst, [after]), group


def test_each_group_keeps_its_own_blocks_when_all_are_swapped_in_turn(ops: kvdock.OpDispatcher) -> None:
    """As an engine uses them: block ids of different groups are different, and no swap undoes another's."""
    spec = SEVERAL["everything"]
    src, dst = make(spec, ops, 5), make(spec, ops, 6, head_layout=HND)
    own = {group: [(group, 8 - group)] for group in range(len(src.groups))}
    assert {type(group.retention) for group in src.groups} == {KeepAll, KeepWindow, KeepState}
    for group, pairs in own.items():
        src.swap_blocks(dst, pairs, group=group)
    for layer in range(src.num_layers):
        for name, theirs in dst.buffers(layer).items():
            ((a, b),) = own[dst.group_of(layer, name)]
            ours = src.buffers(layer)[name]
            assert torch.equal(theirs[b].contiguous().view(torch.uint8), ours[a].contiguous().view(torch.uint8)), (layer, name)


@pytest.mark.parametrize("group", range(3))
def test_there_and_back_is_what_it_was(group: int, ops: kvdock.OpDispatcher) -> None:
    spec = SEVERAL["windows"]
    src, host = make(spec, ops, 7), make(spec, ops, 8, blocks=4, head_layout=HND, alignment=64)
    before = image(src)
    out = [(8, 0), (1, 3)]
    src.swap_blocks(host, out, group=group)
    for view in (view for layer in range(4) for name, view in src.buffers(layer).items() if src.group_of(layer, name) == group):
        view[[8, 1]] = 0
    assert not unchanged(src, before)
    host.swap_blocks(src, [(b, a) for a, b in out], group=group)
    assert unchanged(src, before)


# Pairs


FORMS: dict[str, Any] = {
    "a list": PAIRS,
    "int64 of numpy": np.array(PAIRS),
    "int32 of numpy": np.array(PAIRS, np.int32),
    "an int32 tensor": torch.tensor(PAIRS, dtype=torch.int32),
    "an int64 tensor": torch.tensor(PAIRS),
}


@pytest.mark.parametrize("form", FORMS)
def test_pairs_of_any_form_swap_one_group_alike(form: str, ops: kvdock.OpDispatcher) -> None:
    spec = SEVERAL["states"]
    src = make(spec, ops, 1, blocks=6)
    group = src.group_of(0, "conv")
    for options in (dict[str, Any](), {"head_layout": HND if src.config.head_layout is NHD else NHD}):
        dst, twin = (make(spec, ops, 2, **options) for _ in range(2))
        src.swap_blocks(dst, FORMS[form], group=group)
        if options:
            assert unchanged(dst, copied_by_view(src, twin, PAIRS, group))
        else:
            raw(twin)[0][[8, 0, 1]] = raw(src)[0][[0, 5, 0]]
            assert unchanged(dst, image(twin))


@pytest.mark.parametrize(
    ("pairs", "error", "place"),
    [
        ([(0, 1), (6, 2)], kvdock.IndexRangeError, r"block_pairs\[1, 0\]"),
        (np.array([(0, 9)], np.int32), kvdock.IndexRangeError, r"block_pairs\[0, 1\]"),
        (torch.tensor([(0, 1), (2, 1)], dtype=torch.int32), kvdock.ArgumentValueError, r"block_pairs\[1\]"),
    ],
    ids=["a source beyond", "a destination beyond", "a destination twice"],
)
def test_wrong_pairs_leave_every_group_as_it_was(pairs: Any, error: type[Exception], place: str, ops: kvdock.OpDispatcher) -> None:
    src, dst = make(SEVERAL["everything"], ops, 1, blocks=6), make(SEVERAL["everything"], ops, 2, head_layout=HND)
    before = image(src), image(dst)
    for group in range(len(src.groups)):
        with pytest.raises(error, match=rf"swap_blocks_: {place}: "):
            src.swap_blocks(dst, pairs, group=group)
    assert unchanged(src, before[0])
    assert unchanged(dst, before[1])


# Without memory


@pytest.mark.parametrize("spec", [SPECS["uniform"], ONE_GROUP["latents"], SEVERAL["windows"]], ids=["uniform", "latents", "windows"])
def test_pools_without_memory_are_checked_like_others(spec: kvdock.KVSpec) -> None:
    """What lies on meta has shapes alone: ids that the host can read are checked, and there is nothing to copy."""
    ops = runtime_of(InProcessBackend("any", claims=["cpu", "meta"], devices=["cpu", "meta"])).dispatcher
    config = kvdock.PagedKVCacheConfig(num_blocks=6, block_size=4)
    src, dst = (kvdock.create_cache(spec, config, kvdock.RankInfo("meta"), ops=ops) for _ in range(2))
    assert src.device.type == "meta"
    for pairs in ([(0, 1)], [], np.array([(5, 0)], np.int32), torch.tensor([(0, 1)], device="meta")):
        src.swap_blocks(dst, pairs)
    with pytest.raises(kvdock.IndexRangeError, match=r"block_pairs\[0, 1\]: expected a block id below 6"):
        src.swap_blocks(dst, [(0, 6)])
