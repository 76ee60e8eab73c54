"""Pools whose contents follow from the tokens alone, so that what a file brought can be told from what it should have."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import kvdock
from kvdock.bits import as_bits
from kvdock.cache.grouped import GroupedCache
from kvdock.files.contents import Content, contents_of
from kvdock.layers import Buffer, ChunkedLayerSpec, SharedLayerSpec, StateLayerSpec
from kvdock.scheduler.cached import cached_blocks
from support_blocks import chain

__all__ = ["CANARY", "KINDS", "cached", "check_sequence", "compute", "expected", "pool", "snapshot"]

CANARY = 0x5A

_FULL, _OTHER = kvdock.LayerSpec(2, 2, 8, 8), kvdock.LayerSpec(1, 2, 16, 4)
_WINDOW, _SINKS = kvdock.LayerSpec(2, 2, 8, 8, window=9), kvdock.LayerSpec(2, 2, 8, 8, window=6, sinks=3)

_STATE = StateLayerSpec([Buffer("conv", (6, 3), torch.float16), Buffer("recurrent", (4, 8), torch.float32)])

KINDS: dict[str, tuple[Any, ...]] = {
    "equal": (_FULL, _FULL),
    "unlike": (_FULL, _OTHER, SharedLayerSpec(of=0)),
    "latents": (kvdock.MLALayerSpec(16, 8), kvdock.MLALayerSpec(16, 8)),
    "both": (_FULL, kvdock.MLALayerSpec(24, 8)),
    "windows": (_FULL, _WINDOW, _WINDOW, _WINDOW),
    "only windows": (_WINDOW, _WINDOW),
    "sinks": (_FULL, _SINKS, _SINKS),
    "chunks": (_FULL, ChunkedLayerSpec(2, 2, 8, 8, chunk=16)),
    "states": (_FULL, _STATE, _STATE),
    "states and windows": (_STATE, _WINDOW, _FULL, _WINDOW),
    "only states": (_STATE, _STATE),
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
    if kind == "only states":
        how["block_size"] = block_size
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
    """Compute what is not cached of a prompt, and let it be found: of a cache with states in chunks, as these are kept where one ends."""
    if any(group.retention.is_state for group in cache.groups):
        seq = manager.begin([*ids, ids[0]], namespace, at_most=max(len(ids) - cached_blocks(manager, ids, namespace)[0], 0))
    else:
        seq = manager.begin(ids, namespace)
    begin = seq.cached_len
    pairs = seq.block_pairs
    while True:
        cache.copy_blocks(pairs)
        check_sequence(cache, seq, ids, begin)
        stop = min(seq.num_tokens, len(ids))
        for content in contents_of(cache.groups):
            if begin < stop:
                _write(cache, seq, content, torch.from_numpy(expected(content, namespace, ids[:stop])), begin)
        manager.commit(seq, (), computed=stop)
        if stop == len(ids):
            break
        begin, (_, pairs) = stop, manager.extend(seq, len(ids) - stop)
    if finish:
        manager.finish(seq)
    return seq


def _write(cache: GroupedCache, seq: kvdock.scheduler.CacheSequence, content: Content, rows: torch.Tensor, begin: int) -> None:
    """Write what tokens from ``begin`` on leave behind."""
    view = as_bits(cache.buffers(content.layer)[content.buffer.name])
    if cache.groups[content.group].retention.is_state:
        view[int(seq.block_table(content.group)[0])] = rows[-1].view(view.dtype).view(content.buffer.shape)
        return
    slots = seq.slot_mapping(begin, len(rows), group=content.group)
    for slot, row in zip(slots.tolist(), rows[begin:], strict=True):
        if slot >= 0:
            view[slot // content.block_size, slot % content.block_size] = row.view(view.dtype).view(content.buffer.shape)


def check_sequence(cache: GroupedCache, seq: kvdock.scheduler.CacheSequence, ids: list[int], length: int) -> None:
    """Compare all that the next token reads, behind so many, with what must be there."""
    for content in contents_of(cache.groups):
        want, view = expected(content, seq.namespace, ids), as_bits(cache.buffers(content.layer)[content.buffer.name])
        if cache.groups[content.group].retention.is_state:
            found = view[int(seq.block_table(content.group)[0])].contiguous().view(torch.uint8).reshape(-1).numpy()
            assert not length or (found == want[length - 1]).all(), f"{content.name}: state behind {length}"
            continue
        slots = seq.slot_mapping(0, length, group=content.group)
        for token in (token for span in cache.groups[content.group].retention.spans(length) for token in span):
            found = view[slots[token] // content.block_size, slots[token] % content.block_size].contiguous().view(torch.uint8)
            assert (found.reshape(-1).numpy() == want[token]).all(), f"{content.name}: token {token} of {length}"


def cached(cache: GroupedCache, manager: kvdock.CacheManager, ids: list[int], namespace: tuple[Any, ...] = ()) -> int:
    """Return how much of a prompt is cached, and compare every block of it that is there with what it must hold."""
    length, tables = cached_blocks(manager, ids, namespace)
    for content in contents_of(cache.groups):
        want = expected(content, namespace, ids[:length])
        if cache.groups[content.group].retention.is_state:
            want = want[manager.block_size - 1 :: manager.block_size]
        want = want.reshape(-1, content.nbytes)
        view = as_bits(cache.buffers(content.layer)[content.buffer.name])
        for place, block in enumerate(tables[content.group].tolist()):
            if block >= 0:
                found = view[block].contiguous().view(torch.uint8).reshape(-1).numpy()
                assert (found == want[place]).all(), f"{content.name}: block {place}"
    return length


def snapshot(cache: GroupedCache) -> list[torch.Tensor]:
    """Return all bytes of a cache."""
    return [each.memory.view(torch.uint8).clone() for each in cache._store.pools]
