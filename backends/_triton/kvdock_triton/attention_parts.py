"""What the kernels of attention are made of.

Softmax is kept up to date from one tile of keys to the next, in base 2; so are sums that go to ``sums``. The blocks of a tile are read
one tile ahead, as a value that the loop carries: left to the compiler, loads of keys would wait for their block ids. A key that is not
to be seen by any row is not loaded, so that it may be anything, and block ids are compared with the pool before they are used. Where
rows of a tile see different keys, a value that is no number makes them attend once more, key by key.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "DONE",
    "LN2",
    "LOG2E",
    "attend_keys",
    "count_bad",
    "count_outside",
    "find_sequence",
    "load_keys",
    "spread_of",
    "store_rows",
]

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
DONE = tl.constexpr(-3.0e38)
"""In place of the sum of a first split: it was the only one, and the result is stored."""


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
):
    """Let rows attend to the keys from ``begin`` to ``end`` of a sequence: causal and by window where rows differ in that.

    What is not ``CHECKED`` are whole tiles, all of whose blocks are in the pool. What a key has behind ``K_WIDE`` elements is read by
    itself, in ``K_REST``; where values are ``WITHIN`` keys, those elements are the values, and read once.
    """
    k_dim = tl.arange(0, K_WIDE)[None, :]
    v_dim = tl.arange(0, V_WIDE)[None, :]
    places = tl.arange(0, KEYS)
    ahead = begin + places
    ids = tl.load(table + ahead // BLOCK_SIZE * table_column, mask=ahead < end, other=-1)
    for start in range(begin, end, KEYS):
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
        factor: tl.constexpr = SCALE * LOG2E
        if SOFTCAP > 0:  # the tangent by its exponential, which may overflow: 1 is right then
            scores = SOFTCAP * LOG2E * (1 - 2 / (tl.exp2(scores * (2 * LOG2E * SCALE / SOFTCAP)) + 1))
        elif SCALE <= 0:  # the highest is not that of the product
            scores = scores * factor
        if CHECKED or CAUSAL or WINDOW > 0:
            shown = seen[None, :]
            if CAUSAL:
                shown = shown & (key[None, :] <= position[:, None])
            if WINDOW > 0:
                shown = shown & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(shown, scores, float("-inf"))
        before = highest
        if SOFTCAP > 0 or SCALE <= 0:
            highest = tl.maximum(before, tl.max(scores, 1))
        else:
            highest = tl.maximum(before, tl.max(scores, 1) * factor)
        level = tl.where(highest == float("-inf"), 0.0, highest)  # of -inf and -inf there is no difference
        if SOFTCAP > 0 or SCALE <= 0:
            weights = tl.exp2(scores - level[:, None])
        else:  # once rounded, and one instruction for each score less
            weights = tl.exp2(tl.fma(scores, tl.full([ROWS, KEYS], factor, tl.float32), -tl.broadcast_to(level[:, None], (ROWS, KEYS))))
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


@triton.jit
def store_rows(
    found,
    highest,
    total,
    query,
    head,
    is_real,
    split,
    splits,
    used,
    out,
    lse,
    parts,
    sums,
    out_token,
    out_head,
    lse_token,
    lse_head,
    QUERY_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_WIDE: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    LSE: tl.constexpr,
):
    """Store what rows found: the result, or where several splits are used, a part for `join_kernel`."""
    dim = tl.arange(0, V_WIDE)[None, :]
    inside = is_real[:, None] & (dim < V_DIM)
    values = found / tl.where(total == 0, 1.0, total)[:, None]
    logarithm = tl.where(total == 0, float("-inf"), highest + tl.log2(tl.where(total == 0, 1.0, total)))
    part = (query * QUERY_HEADS + head) * splits + split
    if used > 1:
        tl.store(sums + part, logarithm, mask=is_real)
        tl.store(parts + part[:, None] * V_DIM + dim, values, mask=inside & (total > 0)[:, None])
    else:
        at = (query * out_token + head * out_head) * OUT_UNIT
        tl.store(out + at[:, None] + dim, values.to(out.dtype.element_ty), mask=inside)
        if LSE:
            tl.store(lse + query * lse_token + head * lse_head, logarithm * LN2, mask=is_real)
        if splits > 1:
            tl.store(sums + part, tl.full([found.shape[0]], DONE, tl.float32), mask=is_real)


@triton.jit
def spread_of(lens, lens_step, batch, room, WINDOW: tl.constexpr):
    """Return the most keys that a sequence has, and how many they have on average."""
    places = tl.arange(0, 128)
    most = tl.zeros([128], tl.float32)
    total = tl.zeros([128], tl.float32)
    for start in range(0, batch, 128):
        row = start + places
        said = tl.load(lens + row.to(tl.int64) * lens_step, mask=row < batch, other=0).to(tl.int64)
        keys = tl.minimum(tl.maximum(said, 0), room).to(tl.float32)
        if WINDOW > 0:
            keys = tl.minimum(keys, WINDOW)
        most = tl.maximum(most, keys)
        total += keys
    return tl.max(most, 0), tl.sum(total, 0) / batch


@triton.jit
def count_outside(table, table_column, begin, end, num_blocks):
    """Return how many blocks of some columns are not in the pool."""
    places = tl.arange(0, 512)
    outside = tl.zeros([512], tl.int64)
    for start in range(begin, end, 512):
        column = start + places
        ids = tl.load(table + column * table_column, mask=column < end, other=0)
        outside += ((column < end) & ((ids < 0) | (ids >= num_blocks))).to(tl.int64)
    return tl.sum(outside, 0)


@triton.jit
def count_bad(skipped, table, table_column, length, room, begin, num_blocks, BLOCK_SIZE: tl.constexpr):
    """Count a length that the table has no room for, and blocks that are not in the pool where a query looks."""
    if (length < 0) | (length > room):
        tl.atomic_add(skipped, 1, sem="relaxed")
    end = tl.minimum(length, room).to(tl.int32)
    number = count_outside(table, table_column, begin // BLOCK_SIZE, (end + BLOCK_SIZE - 1) // BLOCK_SIZE, num_blocks)
    if number > 0:
        tl.atomic_add(skipped, number, sem="relaxed")


@triton.jit
def find_sequence(cu, cu_step, batch, tile, TILE: tl.constexpr):
    """Return whose a tile is, where sequence ``b`` begins with tile ``cu[b] // TILE + b``."""
    low = tile * 0
    high = low + batch
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(cu + middle * cu_step).to(tl.int64) // TILE + middle
        low = tl.where(begins <= tile, middle, low)
        high = tl.where(begins <= tile, high, middle)
    return low
