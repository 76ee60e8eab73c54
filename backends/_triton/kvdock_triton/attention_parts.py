"""What the kernels of attention are made of.

Softmax is kept up to date from one tile of keys to the next, in base 2; so are sums that go to ``sums``. The blocks of a tile are read
one tile ahead, as a value that the loop carries: left to the compiler, loads of keys would wait for their block ids. A key that is not
to be seen by any row is not loaded, so that it may be anything, and block ids are compared with the pool before they are used. Where
rows of a tile see different keys, a value that is no number makes them attend once more, key by key.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["LN2", "LOG2E", "attend_keys", "bend", "load_keys", "peak_of", "weigh"]

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_keys(at, seen, dim, DIM: tl.constexpr, WIDE: tl.constexpr, CHECKED: tl.constexpr):
    """Load keys or values, zeros for what is not to be seen and behind the end of a head."""
    if CHECKED:
        if DIM == WIDE:
            found = tl.load(at, mask=seen[:, None], other=0.0)
        else:
            found = tl.load(at, mask=seen[:, None] & (dim < DIM), other=0.0)
    else:
        if DIM == WIDE:
            found = tl.load(at)
        else:
            found = tl.load(at, mask=(dim < DIM) & seen[:, None], other=0.0)
    return found


@triton.jit
def bend(scores, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Make logits in base 2 of products, or leave the products where `weigh` scales them."""
    if SOFTCAP > 0:  # the tangent by its exponential, which may overflow: 1 is right then
        scores = SOFTCAP * LOG2E * (1 - 2 / (tl.exp2(scores * (2 * LOG2E * SCALE / SOFTCAP)) + 1))
    elif SCALE <= 0:  # the highest is not that of the product
        scores = scores * (SCALE * LOG2E)
    return scores


@triton.jit
def peak_of(scores, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Return the highest logit of each row."""
    peak = tl.max(scores, 1)
    if SOFTCAP == 0 and SCALE > 0:
        peak = peak * (SCALE * LOG2E)
    return peak


@triton.jit
def weigh(scores, level, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Return the weights of keys, of what `bend` returned."""
    if SOFTCAP > 0 or SCALE <= 0:
        weights = tl.exp2(scores - level[:, None])
    else:  # once rounded, and one instruction for each score less
        factor: tl.constexpr = SCALE * LOG2E
        weights = tl.exp2(tl.fma(scores, factor, -level[:, None]))
    return weights


@triton.jit
def attend_keys(
    q,
    q_rest,
    found,
    highest,
    total,
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
    K_REST: tl.constexpr,
    V_WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WITHIN: tl.constexpr,
    WIDEN: tl.constexpr,
    CHECKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Let rows attend to the keys from ``begin`` to ``end`` of a sequence: causal and by window where rows differ in that.

    What is not ``CHECKED`` are whole tiles, all of whose blocks are in the pool. What a key has behind ``K_WIDE`` elements is read by
    itself, in ``K_REST``; where values are ``WITHIN`` keys, those elements are the values, and read once.
    ``STAGES`` is as in `kvdock_triton.tuning.AttentionTile`, None for the kernel's.
    """
    k_dim = tl.arange(0, K_WIDE)[None, :]
    v_dim = tl.arange(0, V_WIDE)[None, :]
    places = tl.arange(0, KEYS)
    ahead = begin + places
    ids = tl.load(table + ahead // BLOCK_SIZE * table_column, mask=ahead < end, other=-1)
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        key = start + places
        if CHECKED:
            seen = (key < end) & (ids >= 0) & (ids < num_blocks)
        else:
            seen = key >= 0
        block = ids.to(tl.int64)
        slot = key % BLOCK_SIZE
        ahead = key + KEYS
        ids = tl.load(table + ahead // BLOCK_SIZE * table_column, mask=ahead < end, other=-1)
        k_at = k_cache + (block * K_BLOCK + slot * K_SLOT)[:, None]
        k = load_keys(k_at + k_dim, seen, k_dim, K_WIDE if K_REST > 0 else K_DIM, K_WIDE, CHECKED)
        if WIDEN:
            k = k.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if K_REST > 0:
            rest = tl.arange(0, K_REST)[None, :]
            k_rest = load_keys(k_at + K_WIDE + rest, seen, rest, K_DIM - K_WIDE, K_REST, CHECKED)
            if WIDEN:
                k_rest = k_rest.to(tl.float32)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        scores = bend(scores, SCALE, SOFTCAP)
        if CHECKED or CAUSAL or WINDOW > 0:
            shown = seen[None, :]
            if CAUSAL:
                shown = shown & (key[None, :] <= position[:, None])
            if WINDOW > 0:
                shown = shown & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(shown, scores, float("-inf"))
        before = highest
        highest = tl.maximum(before, peak_of(scores, SCALE, SOFTCAP))
        level = tl.where(highest == float("-inf"), 0.0, highest)  # of -inf and -inf there is no difference
        weights = weigh(scores, level, SCALE, SOFTCAP)
        faded = tl.exp2(before - level)
        total = total * faded + tl.sum(weights, 1)
        if WITHIN:
            v = k
        else:
            v = load_keys(v_cache + (block * V_BLOCK + slot * V_SLOT)[:, None] + v_dim, seen, v_dim, V_DIM, V_WIDE, CHECKED)
            if WIDEN:
                v = v.to(tl.float32)
        found = tl.dot(weights.to(v.dtype), v, found * faded[:, None], input_precision="ieee")
    return found, highest, total
