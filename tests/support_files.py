"""Pools whose contents follow from the tokens alone, so that what a file brought can be told from what it should have."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import kvdock
from kvdock.bits import as_bits
from kvdock.cache.grouped import GroupedCache
from kvdock.files.contents import Content, contents_of
from kvdock.layers import ChunkedLayerSpec, SharedLayerSpec
from kvdock.scheduler.cached import cached_blocks
from support_blocks import chain

__all__ = ["CANARY", "KINDS", "cached", "check_sequence", "compute", "expected", "pool", "snapshot"]

CANARY = 0x5A

_FULL, _OTHER = kvdock.LayerSpec(2, 2, 8, 8), kvdock.LayerSpec(1, 2, 16, 4)
_WINDOW, _SINKS = kvdock.LayerSpec(2, 2, 8, 8, window=9), kvdock.LayerSpec(2, 2, 8, 8, window=6, sinks=3)

KINDS: dict[str, tuple[Any, ...]] = {
    "equal": (_FULL, _FULL),
    "unlike": (_FULL, _OTHER, SharedLayerSpec(of=0)),
    "latents": (kvdock.MLALayerSpec(16, 8), kvdock.MLALayerSpec(16, 8)),
    "both": (_FULL, kvdock.MLALayerSpec(24, 8)),
    "windows": (_FULL, _WINDOW, _WINDOW, _WINDOW),
    "only windows": (_WINDOW, _WINDOW),
    "sinks": (_FULL, _SINKS, _SINKS),
    "chunks": (_FULL, ChunkedLayerSpec(2, 2, 8, 8, chunk=16)),
}


def pool(
    kind: str = "equal",
    *,
    dtype: torch.dtype = torch.float16,
    num_blocks: int = 64,
    block_size: int = 4,
    rank: kvdock.RankInfo | None = None,
    layout: kvdock.KVCacheLayout | None = None,
    head_layout: kvdock.HeadLayout = kvdock.HeadLayout.NHD,
    **how: Any,
) -> tuple[GroupedCache, kvdock.CacheManager]:
    """Make a cache, full of canaries, and its manager."""
    spec = kvdock.KVSpec(KINDS[kind], max_positions=4096, dtype=dtype)
    conf = kvdock.PagedKVCacheConfig(num_blocks=num_blocks, block_size=block_size, layout=layout, head_layout=head_layout)
    cache = kvdock.create_cache(spec, conf, rank or kvdock.RankInfo("cpu"))
    assert isinstance(cache, GroupedCache)
    for each in cache._store.pools:
        each.memory.view(torch.uint8).fill_(CANARY)
    return cache, kvdock.CacheManager(cache.num_blocks, groups=cache.groups, **how)


def expected(content: Content, namespace: tuple[Any, ...], ids: list[int]) -> np.ndarray[Any, Any]:
    """Return the bytes that a buffer has for each token, ``[tokens, bytes]``: any bits, so NaNs with payloads too."""
    seeds = np.array(chain(namespace, ids), dtype=np.int64).view(np.uint64)
    places = np.arange(content.buffer.nbytes, dtype=np.uint64) + np.uint64(
        1000 * content.layer + 100 * len(content.buffer.name) + ord(content.buffer.name[0])
    )
    mixed = (seeds[:, None] + places) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(56)).astype(np.uint8)


def compute(
    cache: GroupedCache, manager: kvdock.CacheManager, ids: list[int], namespace: tuple[Any, ...] = (), *, finish: bool = True
) -> kvdock.scheduler.CacheSequence:
    """Compute what is not cached of a prompt, and let it be found."""
    seq = manager.begin(ids, namespace)
    begin = seq.cached_len
    check_sequence(cache, seq, ids, begin)
    for content in contents_of(cache):
        slots = torch.from_numpy(seq.slot_mapping(begin, len(ids), group=content.group))
        rows = torch.from_numpy(expected(content, namespace, ids)[begin:])
        view = as_bits(cache.buffers(content.layer)[content.buffer.name])
        for slot, row in zip(slots.tolist(), rows, strict=True):
            if slot >= 0:
                view[slot // content.block_size, slot % content.block_size] = row.view(view.dtype).view(content.buffer.shape)
    manager.commit(seq, (), computed=len(ids))
    if finish:
        manager.finish(seq)
    return seq


def check_sequence(cache: GroupedCache, seq: kvdock.scheduler.CacheSequence, ids: list[int], length: int) -> None:
    """Compare all that the next token reads, behind so many, with what must be there."""
    for content in contents_of(cache):
        slots, want = seq.slot_mapping(0, length, group=content.group), expected(content, seq.namespace, ids)
        view = as_bits(cache.buffers(content.layer)[content.buffer.name])
        for token in (token for span in cache.groups[content.group].retention.spans(length) for token in span):
            found = view[slots[token] // content.block_size, slots[token] % content.block_size].contiguous().view(torch.uint8)
            assert (found.reshape(-1).numpy() == want[token]).all(), f"{content.name}: token {token} of {length}"


def cached(cache: GroupedCache, manager: kvdock.CacheManager, ids: list[int], namespace: tuple[Any, ...] = ()) -> int:
    """Return how much of a prompt is cached, and compare every block of it that is there with what it must hold."""
    length, tables = cached_blocks(manager, ids, namespace)
    for content in contents_of(cache):
        want = expected(content, namespace, ids[:length]).reshape(-1, content.nbytes)
        view = as_bits(cache.buffers(content.layer)[content.buffer.name])
        for place, block in enumerate(tables[content.group].tolist()):
            if block >= 0:
                found = view[block].contiguous().view(torch.uint8).reshape(-1).numpy()
                assert (found == want[place]).all(), f"{content.name}: block {place}"
    return length


def snapshot(cache: GroupedCache) -> list[torch.Tensor]:
    """Return all bytes of a cache."""
    return [each.memory.view(torch.uint8).clone() for each in cache._store.pools]
