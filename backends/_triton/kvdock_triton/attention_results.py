"""What the kernels of attention store, and count."""

from __future__ import annotations

import triton
import triton.language as tl

from kvdock_triton.attention_parts import LN2

__all__ = ["DONE", "OPENER", "count_bad", "count_outside", "results_of", "store_nothing", "store_opener", "store_rows"]

DONE = tl.constexpr(-3.0e38)
"""In place of the sum of a first split: it was the only one, and the result is stored."""

OPENER = tl.constexpr(8)
"""Numbers by which who has the first part of a segment says how many there are, whose is the first, and whose queries these are: as many
as are a sector of memory, which is not read before it is written as a whole."""


@triton.jit
def results_of(found, highest, total):
    """Return the weighted mean of the values that rows have seen, zeros where they saw none, and the logarithm of their weights."""
    divisor = tl.where(total == 0, 1.0, total)
    return found * (1 / divisor)[:, None], tl.where(total == 0, float("-inf"), highest + tl.log2(divisor))


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
    dim,
    QUERY_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    LSE: tl.constexpr,
):
    """Store what rows found: the result, or where several splits are used, a part for `join_kernel`. ``dim`` counts the elements."""
    dim = dim[None, :]
    inside = is_real[:, None] & (dim < V_DIM)
    values, logarithm = results_of(found, highest, total)
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
            tl.store(sums + part, DONE, mask=is_real)


@triton.jit
def store_nothing(
    query,
    sinks,
    out,
    lse,
    out_token,
    out_head,
    lse_token,
    lse_head,
    QUERY_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_WIDE: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    LSE: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Store what a query finds that sees no key: zeros, and the logarithm of its sink."""
    dim = tl.arange(0, V_WIDE)
    nothing = tl.zeros([V_WIDE], tl.float32).to(out.dtype.element_ty)
    for number in range(QUERY_HEADS):
        tl.store(out + (query * out_token + number * out_head) * OUT_UNIT + dim, nothing, mask=dim < V_DIM)
        if LSE:
            logarithm = float("-inf")
            if SINKS:
                logarithm = tl.load(sinks + number).to(tl.float32)
            tl.store(lse + query * lse_token + number * lse_head, logarithm)


@triton.jit
def store_opener(opener, number, program, segment, first, count):
    """Store how many parts a segment has, the program of the first, the segment, its first query, and how many there are."""
    place = tl.arange(0, OPENER)
    values = tl.where(place == 0, number, tl.where(place == 1, program, tl.where(place == 2, segment, tl.where(place == 3, first, count))))
    tl.store(opener + place, values)


@triton.jit
def count_outside(table, table_column, begin, end, num_blocks, places):
    """Return how many blocks of some columns are not in the pool. So many are looked at at once as ``places`` counts."""
    outside = (places * 0).to(tl.int64)
    for start in range(begin, end, places.shape[0]):
        column = start + places
        ids = tl.load(table + column * table_column, mask=column < end, other=0)
        outside += ((column < end) & ((ids < 0) | (ids >= num_blocks))).to(tl.int64)
    return tl.sum(outside, 0)


@triton.jit
def count_bad(skipped, table, table_column, is_bad, begin, end, num_blocks, places):
    """Count a length that the table has no room for, and blocks of some columns, where a query looks, that are not in the pool."""
    if is_bad:
        tl.atomic_add(skipped, 1, sem="relaxed")
    number = count_outside(table, table_column, begin, end, num_blocks, places)
    if number > 0:
        tl.atomic_add(skipped, number, sem="relaxed")
