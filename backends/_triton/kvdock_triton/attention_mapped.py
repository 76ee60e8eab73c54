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
    WIDEN: tl.constexpr,
):
    """Let rows attend to the keys from ``seen_from`` on that lie between ``begin``, where a tile begins, and ``end`` of a sequence.

    Causal and by window where rows differ in that. Two tiles a step, since what becomes of one waits for the other's, from the product
    to the weights: with one tile the warp waits longer for itself than for memory. Behind the last tile comes one without a block.
    Values that no row sees are read and weigh nothing; where one is no number, what is found is none either, and to be found otherwise.
    """
    num_blocks = num_blocks.to(tl.int32)
    ids = tl.load(table + begin // BLOCK_SIZE * table_column, mask=begin < end, other=-1)
    next_ids = tl.load(table + (begin + KEYS) // BLOCK_SIZE * table_column, mask=begin + KEYS < end, other=-1)
    for start in range(begin, end, 2 * KEYS):
        block = ids
        next_block = next_ids
        slot = start % BLOCK_SIZE
        next_slot = (start + KEYS) % BLOCK_SIZE
        ahead = start + 2 * KEYS
        ids = tl.load(table + ahead // BLOCK_SIZE * table_column, mask=ahead < end, other=-1)
        next_ids = tl.load(table + (ahead + KEYS) // BLOCK_SIZE * table_column, mask=ahead + KEYS < end, other=-1)
        k = _load_tile(k_map, block, kv_head, slot, KEYS, K_WIDE, WIDEN)
        next_k = _load_tile(k_map, next_block, kv_head, next_slot, KEYS, K_WIDE, WIDEN)
        scores = bend(tl.dot(q, tl.trans(k), input_precision="ieee"), SCALE, SOFTCAP)
        next_scores = bend(tl.dot(q, tl.trans(next_k), input_precision="ieee"), SCALE, SOFTCAP)
        scores = _hide(scores, start, block, seen_from, end, position, num_blocks, BEGUN, CAUSAL, WINDOW, KEYS)
        next_scores = _hide(next_scores, start + KEYS, next_block, seen_from, end, position, num_blocks, BEGUN, CAUSAL, WINDOW, KEYS)
        before = highest
        peak = tl.maximum(peak_of(scores, SCALE, SOFTCAP), peak_of(next_scores, SCALE, SOFTCAP))
        highest = tl.maximum(before, peak)
        level = tl.where(highest == float("-inf"), 0.0, highest)  # of -inf and -inf there is no difference
        weights = weigh(scores, level, SCALE, SOFTCAP)
        next_weights = weigh(next_scores, level, SCALE, SOFTCAP)
        faded = tl.exp2(before - level)
        total = total * faded + (tl.sum(weights, 1) + tl.sum(next_weights, 1))
        v = _load_tile(v_map, block, kv_head, slot, KEYS, V_WIDE, WIDEN)
        next_v = _load_tile(v_map, next_block, kv_head, next_slot, KEYS, V_WIDE, WIDEN)
        found = tl.dot(weights.to(v.dtype), v, found * faded[:, None], input_precision="ieee")
        found = tl.dot(next_weights.to(v.dtype), next_v, found, input_precision="ieee")
    return found, highest, total
