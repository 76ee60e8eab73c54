"""Attention over paged caches as Triton kernels: what joins the parts of a row that several programs looked at."""

from __future__ import annotations

import triton
import triton.language as tl

from kvdock_triton.attention_parts import LN2, LOG2E
from kvdock_triton.attention_results import DONE, OPENER

__all__ = ["join_few_kernel", "join_kernel"]

FEW_PARTS = tl.constexpr(8)
"""Parts that are looked at at once where there are no more."""


@triton.jit
def join_kernel(
    parts,
    sums,
    sinks,
    out,
    lse,
    splits,
    out_token,
    out_head,
    lse_token,
    lse_head,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_WIDE: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    MOST: tl.constexpr,
    STEP: tl.constexpr,
):
    """Join the splits of one query and head, unless there was one alone. What is empty, by its sum, was not stored."""
    number = tl.program_id(0).to(tl.int64)
    query = number // QUERY_HEADS
    head = number % QUERY_HEADS
    sums += number * splits
    parts += number * splits * V_DIM
    if tl.load(sums) == DONE:
        return
    every = tl.arange(0, MOST)
    all_sums = tl.load(sums + every, mask=every < splits, other=float("-inf"))
    highest = tl.max(all_sums, 0)
    sink = highest
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        highest = tl.maximum(highest, sink)
    level = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp2(all_sums - level), 0)
    if SINKS:
        total += tl.exp2(sink - level)
    dim = tl.arange(0, V_WIDE)
    found = tl.zeros([V_WIDE], tl.float32)
    for start in range(0, splits.to(tl.int32), STEP):
        some = start + tl.arange(0, STEP)
        logarithms = tl.load(sums + some, mask=some < splits, other=float("-inf"))
        there = (logarithms > float("-inf"))[:, None] & (dim < V_DIM)[None, :]
        values = tl.load(parts + some[:, None] * V_DIM + dim[None, :], mask=there, other=0.0)
        found += tl.sum(values * tl.exp2(logarithms - level)[:, None], 0)
    found = found / tl.where(total == 0, 1.0, total)
    at = (query * out_token + head * out_head) * OUT_UNIT
    tl.store(out + at + dim, found.to(out.dtype.element_ty), mask=dim < V_DIM)
    if LSE:
        logarithm = tl.where(total == 0, float("-inf"), level + tl.log2(tl.where(total == 0, 1.0, total)))
        tl.store(lse + query * lse_token + head * lse_head, logarithm * LN2)


@triton.jit
def _join_some(
    found,
    highest,
    total,
    program,
    start,
    number,
    in_tile,
    parts,
    sums,
    ROWS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_WIDE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Add ``STEP`` of the parts of a row to what is found of it."""
    dim = tl.arange(0, V_WIDE)
    some = start + tl.arange(0, STEP)
    part = (2 * (program + some).to(tl.int64) + (some == 0)) * ROWS + in_tile
    logarithms = tl.load(sums + part, mask=some < number, other=float("-inf"))
    there = (some < number)[:, None] & (dim < V_DIM)[None, :]
    values = tl.load(parts + part[:, None] * V_DIM + dim[None, :], mask=there, other=0.0)  # not stored where their sum is of nothing
    before_these = highest
    highest = tl.maximum(highest, tl.max(logarithms, 0))
    level = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(logarithms - level)
    faded = tl.exp2(before_these - level)
    total = total * faded + tl.sum(weights, 0)
    found = found * faded + tl.sum(tl.where((weights > 0)[:, None], values, 0.0) * weights[:, None], 0)
    return found, highest, total


@triton.jit
def join_few_kernel(
    parts,
    sums,
    openers,
    sinks,
    out,
    lse,
    out_token,
    out_head,
    lse_token,
    lse_head,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    GROUP: tl.constexpr,
    SHARE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_WIDE: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    STEP: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Join the parts of one row of a tile of `attend_few_kernel`, of one segment, if there are several.

    With ``EARLY``, it is launched while parts are still made, and waits for their end: always, since what follows waits for this alone.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    opener = openers + OPENER * (tl.program_id(0) // (TILE * SHARE))
    in_tile = tl.program_id(0) % (TILE * SHARE)
    number = tl.load(opener)
    program = tl.load(opener + 1)
    segment = tl.load(opener + 2)
    first = tl.load(opener + 3)
    count = tl.load(opener + 4)
    if number <= 1:
        return
    SHARES: tl.constexpr = (GROUP + SHARE - 1) // SHARE  # noqa: N806 - a constant of Triton's
    query = in_tile // SHARE
    in_group = segment % SHARES * SHARE + in_tile % SHARE
    if (query >= count) | (in_group >= GROUP):
        return
    head = (segment // SHARES * GROUP + in_group).to(tl.int64)
    dim = tl.arange(0, V_WIDE)
    highest = float("-inf")
    total = 0.0
    if SINKS:
        highest = tl.load(sinks + head).to(tl.float32) * LOG2E
        total = 1.0
    found = tl.zeros([V_WIDE], tl.float32)
    if number <= FEW_PARTS:  # else what is loaded for nothing takes longer than the rest
        found, highest, total = _join_some(found, highest, total, program, 0, number, in_tile, parts, sums, ROWS, V_DIM, V_WIDE, FEW_PARTS)
    else:
        for start in range(0, number, STEP):
            found, highest, total = _join_some(
                found, highest, total, program, start, number, in_tile, parts, sums, ROWS, V_DIM, V_WIDE, STEP
            )
    found = found / tl.where(total == 0, 1.0, total)
    at = first.to(tl.int64) + query
    tl.store(out + (at * out_token + head * out_head) * OUT_UNIT + dim, found.to(out.dtype.element_ty), mask=dim < V_DIM)
    if LSE:
        logarithm = tl.where(total == 0, float("-inf"), highest + tl.log2(tl.where(total == 0, 1.0, total)))
        tl.store(lse + at * lse_token + head * lse_head, logarithm * LN2)
