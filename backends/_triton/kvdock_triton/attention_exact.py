"""Attention key by key, for tiles whose rows see different keys, one of which has a value that is no number."""

from __future__ import annotations

import triton
import triton.language as tl

from kvdock_triton.attention_parts import LOG2E

__all__ = ["attend_key_by_key", "begin_rows"]


@triton.jit
def begin_rows(sink, used, V_WIDE: tl.constexpr, ROWS: tl.constexpr, SINKS: tl.constexpr):
    """Return what rows have found before the first key: nothing, or where there are no splits to join, a sink."""
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        if used == 1:  # a key of each head whose value is nothing
            highest = sink
            total = total + 1.0
    return tl.zeros([ROWS, V_WIDE], tl.float32), highest, total


@triton.jit
def attend_key_by_key(
    found,
    highest,
    total,
    q_at,
    is_real,
    lanes,
    v_dim,
    begin,
    end,
    position,
    k_cache,
    v_cache,
    table,
    table_column,
    num_blocks,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    K_SLOT: tl.constexpr,
    V_BLOCK: tl.constexpr,
    V_SLOT: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_WIDE: tl.constexpr,
):
    """Let rows attend to one key after the other, so that a value reaches no row that does not see it.

    It is slow and rarely needed. Queries are read anew, as many elements at a time as ``lanes`` counts, 16: it must not need more
    registers than the rest. ``v_dim`` counts the elements of a value.
    """
    for key in range(begin, end):
        block = tl.load(table + key // BLOCK_SIZE * table_column).to(tl.int64)
        slot = key % BLOCK_SIZE
        inside = (block >= 0) & (block < num_blocks)
        scores = total * 0
        for first in range(0, K_WIDE, lanes.shape[0]):
            dim = first + lanes
            q = tl.load(q_at[:, None] + dim[None, :], mask=is_real[:, None] & (dim < K_DIM)[None, :], other=0.0).to(tl.float32)
            k = tl.load(k_cache + block * K_BLOCK + slot * K_SLOT + dim, mask=inside & (dim < K_DIM), other=0.0).to(tl.float32)
            scores += tl.sum(q * k[None, :], 1)
        scores = scores * SCALE
        if SOFTCAP > 0:
            scores = SOFTCAP * (1 - 2 / (tl.exp2(scores * (2 * LOG2E / SOFTCAP)) + 1))
        shown = is_real & inside
        if CAUSAL:
            shown = shown & (key <= position)
        if WINDOW > 0:
            shown = shown & (key > position - WINDOW)
        scores = tl.where(shown, scores * LOG2E, float("-inf"))
        before = highest
        highest = tl.maximum(before, scores)
        level = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - level)
        faded = tl.exp2(before - level)
        total = total * faded + weights
        v = tl.load(v_cache + block * V_BLOCK + slot * V_SLOT + v_dim, mask=inside & (v_dim < V_DIM), other=0.0).to(tl.float32)
        found = found * faded[:, None] + tl.where(shown[:, None], weights[:, None] * v[None, :], 0.0)
    return found, highest, total
