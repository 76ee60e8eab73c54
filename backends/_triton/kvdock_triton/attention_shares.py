"""How the keys of a batch are shared out among programs, each of which works it out from the lengths on the device.

Keys are counted in units. One behind the other lie the units of all rows of the batch, and of each row as often as programs read it:
segments, of each head of the cache and each share of its group. They are cut into chunks of one size, whosever they are, as many as
programs run at once, so that all of these have as much to do, however long each row is. Where rows are of about one length, each
segment has room for as many chunks, so that none begins within one.

Not all processors of a GPU are as quick: on an H200 some read 1.15 times as much as the others. So a chunk is cut into pieces, of which
the first is nearly all, and each of the others half of what is left; a program has one. Those of first pieces begin at once, those of
second ones when these have ended and wherever that is, and so on: who is quick has more of them, and all end at about one time.
Which keys a piece has depends on lengths alone, so that results do not depend on who was quick.

Of a segment that it has not all of, a program stores a part: two at most, of the segment that began before its piece, and of the one
that ends behind it. Parts of a segment lie in the order of its pieces.

What is known of the rows comes as a tuple: pointers to lengths, to first queries and to starts, the steps of these, the number of all
queries, and the most keys that a row has room for.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["ENDING", "LEAST_KEYS", "find_units", "program_of", "queries_of", "share_out", "units_from", "units_of"]

LEAST_KEYS = tl.constexpr(16)
"""Of which the keys of a tile are a multiple: what matrix units take."""

ENDING = tl.constexpr(3)
"""What is behind the first piece of a chunk is this power of a half of it."""


@triton.jit
def _piece_begin(piece, chunk):
    """Return how many units of a chunk lie before a piece of it. Those behind the end of the chunk have none."""
    return tl.where(piece > 0, chunk - (chunk >> tl.maximum(ENDING + piece - 1, 0)), 0)


@triton.jit
def program_of(unit, chunk, pieces):
    """Return which program has a unit that is counted from the beginning of a chunk, counted from the first program of that."""
    number = unit // chunk
    within = unit - number * chunk
    found = number * pieces
    for piece in range(1, pieces):
        found += (within >= _piece_begin(number * 0 + piece, chunk)).to(tl.int32)
    return found


@triton.jit
def queries_of(
    row, there, rows, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, RAGGED: tl.constexpr, STARTS: tl.constexpr, TILE: tl.constexpr
):
    """Return of some rows the first query, how many there are, the length as said, the length, and the keys that any query sees.

    Of more than ``TILE`` queries only so many are looked at.
    """
    lens, cu, starts, lens_step, cu_step, starts_step, queries, room = rows
    first = row.to(tl.int64)
    count = there.to(tl.int32)
    if RAGGED:
        first = tl.load(cu + row * cu_step, mask=there, other=0).to(tl.int64)
        last = tl.minimum(tl.load(cu + (row + 1) * cu_step, mask=there, other=0).to(tl.int64), queries)
        first = tl.minimum(tl.maximum(first, 0), queries)
        count = tl.maximum(last - first, 0).to(tl.int32)
    said = tl.load(lens + row * lens_step, mask=there, other=0).to(tl.int64)
    length = tl.minimum(tl.maximum(said, 0), room).to(tl.int32)
    begin = length * 0
    if STARTS:
        begin = tl.minimum(tl.maximum(tl.load(starts + row * starts_step, mask=there, other=0).to(tl.int64), 0), room).to(tl.int32)
    if WINDOW > 0:
        begin = tl.maximum(begin, length - count - WINDOW + 1)
    end = length
    if CAUSAL:
        end = tl.minimum(end, length - count + tl.minimum(count, TILE))
    end = tl.where(count > 0, end, begin)
    return first, count, said, length, begin, end


@triton.jit
def units_of(begin, end, UNIT: tl.constexpr):
    """Return how many units some keys are, from a multiple of `LEAST_KEYS`: one at least, so that every row is somebody's."""
    return tl.maximum((end - begin // LEAST_KEYS * LEAST_KEYS + UNIT - 1) // UNIT, 1)


@triton.jit
def units_from(
    start,
    batch,
    rows,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    RAGGED: tl.constexpr,
    STARTS: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return the units of ``ROWS`` rows, 0 for those behind the last.

    One for each lane, since code that runs once takes long for being read. The sum of 32 has room in 32 bits.
    """
    row = start + tl.arange(0, ROWS)
    there = row < batch
    _, _, _, _, begin, end = queries_of(row, there, rows, CAUSAL, WINDOW, RAGGED, STARTS, TILE)
    units = tl.where(there, units_of(begin, end, UNIT), 0)
    if ROWS > 32:
        units = units.to(tl.int64)
    else:
        units = units.to(tl.uint32)
    return units


@triton.jit
def share_out(
    first,
    wanted,
    each,
    batch,
    rows,
    SEGMENTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    RAGGED: tl.constexpr,
    STARTS: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Return the units of a chunk, those of each segment where these have as many chunks each, else 0, and those of all.

    There are ``wanted`` chunks at most, ``each`` of a segment where there are enough. One has ``LEAST`` keys at least. The units of the
    ``first`` rows are known: what is loaded before all else is not waited for as long.
    """
    ROWS: tl.constexpr = first.shape[0]  # noqa: N806 - a constant of Triton's
    longest = tl.max(first, 0).to(tl.int32)
    total = tl.sum(first, 0).to(tl.int64)
    for start in range(ROWS, batch, ROWS):
        units = units_from(start, batch, rows, CAUSAL, WINDOW, RAGGED, STARTS, TILE, UNIT, ROWS)
        longest = tl.maximum(longest, tl.max(units, 0).to(tl.int32))
        total += tl.sum(units, 0).to(tl.int64)
    least: tl.constexpr = (LEAST + UNIT - 1) // UNIT
    chunk = longest * 0
    everything = total * SEGMENTS
    if (each > 0) & ((4 * longest.to(tl.int64) * batch <= 5 * total) | (longest <= least)):
        chunk = tl.maximum((longest + each - 1) // tl.maximum(each, 1), least)
    else:
        chunk = tl.maximum((everything + wanted - 1) // wanted, least).to(tl.int32)
        longest = longest * 0
    return chunk, longest, everything


@triton.jit
def find_units(
    place,
    piece,
    pieces,
    each,
    chunk,
    longest,
    everything,
    batch,
    rows,
    SEGMENTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    RAGGED: tl.constexpr,
    STARTS: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return how many units a piece of a chunk has, and where they begin: in the chunk, the row, the segment of it, and in that."""
    row = place * 0
    segment = place // tl.maximum(each, 1)
    within = _piece_begin(piece, chunk)
    number = tl.where(piece + 1 == pieces, chunk, _piece_begin(piece + 1, chunk)) - within
    offset = within
    if longest > 0:
        offset += (place - segment * each) * chunk
        row = segment // SEGMENTS
        segment = segment - row * SEGMENTS
        number = tl.minimum(number, longest - offset)
    else:
        unit = place.to(tl.int64) * chunk + within
        passed = unit * 0
        before = unit * 0
        for start in range(0, batch, ROWS):
            units = units_from(start, batch, rows, CAUSAL, WINDOW, RAGGED, STARTS, TILE, UNIT, ROWS)
            ends = passed + tl.cumsum(units, 0).to(tl.int64) * SEGMENTS
            is_before = (ends <= unit) & (units > 0)
            row += tl.sum(is_before.to(tl.int32), 0)
            before = tl.maximum(before, tl.max(tl.where(is_before, ends, 0), 0))
            passed += tl.sum(units, 0).to(tl.int64) * SEGMENTS
        _, _, _, _, begin, end = queries_of(row, row < batch, rows, CAUSAL, WINDOW, RAGGED, STARTS, TILE)
        own = units_of(begin, end, UNIT)
        number = tl.minimum(tl.maximum(everything - unit, 0), number).to(tl.int32)
        segment = ((unit - before) // own).to(tl.int32)
        offset = (unit - before - segment.to(tl.int64) * own).to(tl.int32)
    return number, within, row, segment, offset
