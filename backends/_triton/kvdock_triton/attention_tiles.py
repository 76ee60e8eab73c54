"""Which queries and keys are a program's, where rows of the batch have any number of queries."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["place_tile"]


@triton.jit
def _find_row(cu, cu_step, batch, tile, TILE: tl.constexpr):
    """Return whose a tile is, where row ``b`` begins with tile ``cu[b] // TILE + b``."""
    low = tile * 0
    high = low + batch
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(cu + middle * cu_step).to(tl.int64) // TILE + middle
        low = tl.where(begins <= tile, middle, low)
        high = tl.where(begins <= tile, high, middle)
    return low


@triton.jit
def place_tile(
    tile,
    split,
    splits,
    batch,
    queries,
    room,
    lens,
    cu,
    starts,
    lens_step,
    cu_step,
    starts_step,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    STARTS: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST: tl.constexpr,
    FROM: tl.constexpr,
):
    """Return what a tile of ``TILE`` queries is of, and what one split of its keys is.

    These are the row, its first query, how many there are, and the place of the tile among those of the row, which may have no query;
    the length as said, the length, the first key that the row sees, and the first that the tile sees; and how many splits are used, and
    the keys of this one: of equal length, as many as there are ``LEAST`` keys for, the first from a multiple of ``FROM``.
    """
    row = _find_row(cu, cu_step, batch.to(tl.int32), tile, TILE).to(tl.int32)
    first = tl.load(cu + row * cu_step).to(tl.int64)
    last = tl.minimum(tl.load(cu + (row + 1) * cu_step).to(tl.int64), queries)
    first = tl.minimum(tl.maximum(first, 0), queries)
    count = tl.maximum(last - first, 0).to(tl.int32)
    place = (tile - (first // TILE + row)).to(tl.int32)

    said = tl.load(lens + row * lens_step).to(tl.int64)
    length = tl.minimum(tl.maximum(said, 0), room).to(tl.int32)
    row_begin = length * 0
    if STARTS:
        row_begin = tl.minimum(tl.maximum(tl.load(starts + row * starts_step).to(tl.int64), 0), room).to(tl.int32)
    begin = row_begin
    end = length
    if WINDOW > 0:
        row_begin = tl.maximum(begin, length - count - WINDOW + 1)
        begin = tl.maximum(begin, length - count + place * TILE - WINDOW + 1)
    if CAUSAL:
        end = tl.minimum(end, length - count + tl.minimum(place * TILE + TILE, count))
    end = tl.where((place >= 0) & (place * TILE < count), end, begin)

    split_from = begin // FROM * FROM
    keys = tl.maximum(end - split_from, 0)
    used = tl.maximum(tl.minimum(splits.to(tl.int32), (keys + LEAST - 1) // LEAST), 1)
    each = (keys + used - 1) // used
    each = (each + KEYS - 1) // KEYS * KEYS
    split_begin = split_from + split * each
    split_end = tl.minimum(split_begin + each, end)
    return row, first, count, place, said, length, row_begin, begin, used, split_begin, split_end
