"""Attention to whole tiles of keys that come by maps of the caches: see `kvdock_triton.tensor_maps`."""

from __future__ import annotations

import triton
import triton.language as tl

from kvdock_triton.attention_parts import bend, peak_of, weigh

__all__ = ["attend_mapped"]


@triton.jit
def _load_tile(cache_map, block, kv_head, slot, KEYS: tl.constexpr, WIDE: tl.constexpr, WIDEN: tl.constexpr):
    """Load keys or values of one block. What lies outside of the pool, or behind the end of a head, is zeros."""
    found = cache_map.load([block, kv_head, slot, 0]).reshape(KEYS, WIDE)
    if WIDEN:
        found = found.to(tl.float32)
    return found


@triton.jit
def _load_tiles(
    cache_map,
    blocks,
    kv_head,
    start,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    WIDE: tl.constexpr,
    TILES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Load the keys or values of the tiles of a step."""
    found = ()
    for i in tl.static_range(TILES):
        found += (_load_tile(cache_map, blocks[i], kv_head, (start + i * KEYS) % BLOCK_SIZE, KEYS, WIDE, WIDEN),)
    return found


@triton.jit
def _hide(
    scores,
    start,
    block,
    begin,
    end,
    position,
    num_blocks,
    BEGUN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Let rows not see keys outside of ``begin`` and ``end``, nor those of a block that is not in the pool."""
    places = tl.arange(0, KEYS)
    shown = (places < tl.where((block >= 0) & (block < num_blocks), end - start, 0))[None, :]
    if BEGUN:
        shown = shown & (start + places >= begin)[None, :]
    if CAUSAL:
        shown = shown & ((start + places)[None, :] <= position[:, None])
    if WINDOW > 0:
        shown = shown & ((start + places)[None, :] > position[:, None] - WINDOW)
    return tl.where(shown, scores, float("-inf"))


@triton.jit
def _blocks_of(table, table_column, start, end, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr):
    """Return the blocks of some tiles, of those behind the end none."""
    found = ()
    for i in tl.static_range(TILES):
        at = start + i * KEYS
        found += (tl.load(table + at // BLOCK_SIZE * table_column, mask=at < end, other=-1),)
    return found


@triton.jit
def attend_mapped(
    q,
    found,
    highest,
    total,
    begin,
    end,
    seen_from,
    position,
    k_map,
    v_map,
    kv_head,
    table,
    table_column,
    num_blocks,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BEGUN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_WIDE: tl.constexpr,
    V_WIDE: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Let rows attend to the keys from ``seen_from`` on that lie between ``begin``, where a tile begins, and ``end`` of a sequence.

    Causal and by window where rows differ in that. ``TILES`` tiles a step, since what becomes of one waits for the others', from the
    product to the weights: with one tile the warp waits longer for itself than for memory. Behind the last tile come some without a
    block. Values that no row sees are read and weigh nothing; where one is no number, what is found is none either, and to be found
    otherwise.
    """
    num_blocks = num_blocks.to(tl.int32)
    STEP: tl.constexpr = TILES * KEYS  # noqa: N806 - a constant of Triton's
    ids = _blocks_of(table, table_column, begin, end, BLOCK_SIZE, KEYS, TILES)
    for start in range(begin, end, STEP):
        blocks = ids
        ids = _blocks_of(table, table_column, start + STEP, end, BLOCK_SIZE, KEYS, TILES)
        keys = _load_tiles(k_map, blocks, kv_head, start, BLOCK_SIZE, KEYS, K_WIDE, TILES, WIDEN)
        scores = ()
        for i in tl.static_range(TILES):  # all products before what becomes of the first, whose instructions wait for one another
            scores += (bend(tl.dot(q, tl.trans(keys[i]), input_precision="ieee"), SCALE, SOFTCAP),)
        seen = ()
        before = highest
        for i in tl.static_range(TILES):
            shown = _hide(scores[i], start + i * KEYS, blocks[i], seen_from, end, position, num_blocks, BEGUN, CAUSAL, WINDOW, KEYS)
            highest = tl.maximum(highest, peak_of(shown, SCALE, SOFTCAP))
            seen += (shown,)
        level = tl.where(highest == float("-inf"), 0.0, highest)  # of -inf and -inf there is no difference
        faded = tl.exp2(before - level)
        weights = ()
        more = tl.zeros([q.shape[0]], tl.float32)
        for i in tl.static_range(TILES):
            weight = weigh(seen[i], level, SCALE, SOFTCAP)
            more += tl.sum(weight, 1)
            weights += (weight,)
        total = total * faded + more
        found = found * faded[:, None]
        values = _load_tiles(v_map, blocks, kv_head, start, BLOCK_SIZE, KEYS, V_WIDE, TILES, WIDEN)
        for i in tl.static_range(TILES):
            found = tl.dot(weights[i].to(q.dtype), values[i], found, input_precision="ieee")
    return found, highest, total
