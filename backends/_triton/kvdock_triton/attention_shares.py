"""How the keys of a batch are shared out among programs, each of which works it out from the lengths on the device.

Keys are counted in units. One behind the other lie the units of all rows of the batch, and of each row as often as programs read it:
segments, of each head of the cache and each share of its group. Program ``p`` has the units from ``p * chunk``, whosever they are, so
that all programs have as much to do, however long each row is. Of a segment that it has not all of, a program stores a part: two at
most, of the segment that began before its chunk, and of the one that ends behind it. Where rows are of about one length, each segment
has room for as many chunks, so that none begins within one.

What is known of the rows comes as a tuple: pointers to lengths, to first queries and to starts, the steps of these, the number of all
queries, and the most keys that a row has room for.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["LEAST_KEYS", "find_units", "queries_of", "share_out", "units_of"]

LEAST_KEYS = tl.constexpr(16)
"""Of which the keys of a tile are a multiple: what matrix units take."""


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
def _units_from(
    start,
    batch,
    rows,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    RAGGED: tl.constexpr,
    STARTS: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Return the units of 128 rows, 0 for those behind the last."""
    row = start + tl.arange(0, 128)
    there = row < batch
    _, _, _, _, begin, end = queries_of(row, there, rows, CAUSAL, WINDOW, RAGGED, STARTS, TILE)
    return tl.where(there, units_of(begin, end, UNIT), 0)


@triton.jit
def share_out(
    programs,
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
    """Return the units of a chunk, how many chunks each of a row's ``SEGMENTS`` has, 0 where it has what it takes, and the units of all.

    A chunk has ``LEAST`` keys at least.
    """
    longest = batch * 0
    total = longest.to(tl.int64)
    if batch == 1:  # what is known at once: a program of a short step has little else to do
        _, _, _, _, begin, end = queries_of(longest, batch > 0, rows, CAUSAL, WINDOW, RAGGED, STARTS, TILE)
        longest = units_of(begin, end, UNIT)
        total = longest.to(tl.int64)
    else:
        for start in range(0, batch, 128):
            units = _units_from(start, batch, rows, CAUSAL, WINDOW, RAGGED, STARTS, TILE, UNIT)
            longest = tl.maximum(longest, tl.max(units, 0))
            total += tl.sum(units.to(tl.int64), 0)
    least: tl.constexpr = (LEAST + UNIT - 1) // UNIT
    segments = batch * SEGMENTS
    chunks = longest * 0
    chunk = longest * 0
    everything = total * SEGMENTS
    if (segments <= programs) & ((4 * longest.to(tl.int64) * batch <= 5 * total) | (longest <= least)):
        each = programs // tl.maximum(segments, 1)
        chunk = tl.maximum((longest + each - 1) // each, least)
        chunks = (longest + chunk - 1) // chunk
    else:
        chunk = tl.maximum((everything + programs - 1) // programs, least).to(tl.int32)
    return chunk, chunks, everything


@triton.jit
def find_units(
    program,
    chunk,
    chunks,
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
):
    """Return how many units a program has, and where they begin: the row, the segment of it, and the unit of that."""
    row = program * 0
    segment = program * 0
    offset = program * 0
    number = chunk
    if chunks > 0:
        segment = program // chunks
        offset = (program - segment * chunks) * chunk
        row = segment // SEGMENTS
        segment = segment - row * SEGMENTS
        number = tl.where(row < batch, chunk, 0)
    else:
        unit = program.to(tl.int64) * chunk
        passed = unit * 0
        before = unit * 0
        for start in range(0, batch, 128):
            units = _units_from(start, batch, rows, CAUSAL, WINDOW, RAGGED, STARTS, TILE, UNIT).to(tl.int64) * SEGMENTS
            ends = passed + tl.cumsum(units, 0)
            is_before = (ends <= unit) & (units > 0)
            row += tl.sum(is_before.to(tl.int32), 0)
            before = tl.maximum(before, tl.max(tl.where(is_before, ends, 0), 0))
            passed += tl.sum(units, 0)
        _, _, _, _, begin, end = queries_of(row, row < batch, rows, CAUSAL, WINDOW, RAGGED, STARTS, TILE)
        own = units_of(begin, end, UNIT)
        number = tl.minimum(tl.maximum(everything - unit, 0), chunk).to(tl.int32)
        segment = ((unit - before) // own).to(tl.int32)
        offset = (unit - before - segment.to(tl.int64) * own).to(tl.int32)
    return number, row, segment, offset
