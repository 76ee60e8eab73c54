"""Attention over paged caches as Triton kernels: what joins the splits of a sequence."""

from __future__ import annotations

import triton
import triton.language as tl

from kvdock_triton.attention_parts import DONE, LN2, LOG2E

__all__ = ["join_kernel"]


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
