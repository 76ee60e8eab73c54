"""`paged_attention` in portable torch: keys and values a few blocks at a time, for any number of queries."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from kvdock.interface import Descriptor, Request
from kvdock.ops.attention import PAGED_ATTENTION, check_paged_attention, query_rows, visible
from kvdock.ops.portable.rows import PortableDescriptor, PortableKernel

__all__ = ["PagedAttention"]

_MOST = 1 << 22
"""Elements of keys that are looked at in one step."""

_NAMES = PAGED_ATTENTION.arg_names


class PagedAttention(PortableKernel):
    """Attends with softmax that is kept up to date from one part of the keys to the next.

    The algorithm is that of Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
    """

    def prepare(self, request: Request) -> Descriptor:
        """Say what a step takes: keys and values as read, in the dtype that is computed in, and as multiplied, and those before them."""
        made = super().prepare(request)
        made.workspace_bytes = 12 * _MOST * max(request.tensor("k_cache").dtype.itemsize, 4)
        return made

    def run(self, plan: PortableDescriptor, *values: Any) -> None:
        """Fill ``out`` and, where it is given, ``lse``."""
        args = dict(zip(_NAMES, values, strict=True))
        if plan.on_host:
            check_paged_attention(args)
        kind = args["q"].device.type
        # In the dtypes that it says, whatever the user has set. Where nothing is set, torch may not even know autocast for the device.
        is_set = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        with torch.autocast(kind, enabled=False) if is_set else contextlib.nullcontext():
            _Call(args, plan.skipped).run()


class _Call:
    """One call: index values made safe, then queries and keys in parts. Nothing waits for the device."""

    def __init__(self, args: dict[str, Any], skipped: torch.Tensor) -> None:
        self.args = args
        self.q, self.k_cache, self.v_cache, table = (args[name] for name in ("q", "k_cache", "v_cache", "block_table"))
        self.dtype = torch.float64 if self.q.dtype == torch.float64 else torch.float32
        num_blocks, block, batch = self.k_cache.shape[0], self.k_cache.shape[1], table.shape[0]
        lens = args["seq_lens"].to(torch.int64)
        room = table.shape[1] * block
        skipped += ((lens < 0) | (lens > room)).sum()
        lens = lens.clamp(0, room)
        starts = None if args["starts"] is None else args["starts"].to(torch.int64)
        rows, behind = query_rows(args["cu_query_lens"], self.q.shape[0], batch, self.q.device)
        is_real, self.rows = rows < batch, rows.clamp(max=batch - 1)
        first, end = visible(
            lens[self.rows], behind, None if starts is None else starts[self.rows], causal=args["causal"], window=args["window"]
        )
        self.first, self.end = first, torch.where(is_real, end, 0)
        counts = torch.ones_like(lens) if args["cu_query_lens"] is None else args["cu_query_lens"].diff().to(torch.int64)
        seen_from = torch.zeros_like(lens) if starts is None else starts
        if args["window"] is not None:
            seen_from = torch.maximum(seen_from, lens - counts - args["window"] + 1)
        columns = torch.arange(table.shape[1], device=table.device)
        used = (columns >= (seen_from // block)[:, None]) & (columns < ((lens + block - 1) // block)[:, None])
        is_block = (table >= 0) & (table < num_blocks)
        skipped += (used & ~is_block).sum()
        self.is_block, self.table = is_block, torch.where(is_block, table, 0)

    def run(self) -> None:
        """Attend, a part of the queries at a time."""
        heads, dim, block = self.k_cache.shape[2], max(self.k_cache.shape[3], self.v_cache.shape[3]), self.k_cache.shape[1]
        tile = max(1, _MOST // (heads * dim * block))
        for begin in range(0, self.q.shape[0], tile):
            queries = slice(begin, begin + tile)
            columns = max(1, _MOST // (heads * dim * block * (queries.stop - begin)))
            out, lse = self._attend(queries, columns)
            self.args["out"][queries] = out
            if self.args["lse"] is not None:
                self.args["lse"][queries] = lse

    def _attend(self, queries: slice, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what some queries get, ``[n, Hq, Dv]``, and the logarithms of their sums, ``[n, Hq]``."""
        args, heads = self.args, self.k_cache.shape[2]
        scale = self.q.shape[2] ** -0.5 if args["scale"] is None else float(args["scale"])
        q = self.q[queries].to(self.dtype).unflatten(1, (heads, -1)) * scale
        size = q.shape[:3]
        highest, total = q.new_full(size, -torch.inf), q.new_zeros(size)
        if args["sinks"] is not None:  # a key of each head whose value is nothing
            highest, total = args["sinks"].to(self.dtype).view(1, heads, -1).expand(size), q.new_ones(size)
        found = q.new_zeros((*size, self.v_cache.shape[3]))
        for begin in range(0, self.table.shape[1] if self.k_cache.shape[0] else 0, columns):
            k, v, is_seen = self._keys(queries, begin, columns)
            scores = torch.einsum("nhgd,nkhd->nhgk", q, k)
            if args["softcap"] is not None:
                scores = torch.tanh(scores / args["softcap"]) * args["softcap"]
            scores = torch.where(is_seen[:, None, None], scores, -torch.inf)
            before, highest = highest, torch.maximum(highest, scores.amax(-1))
            level = torch.where(highest == -torch.inf, 0, highest)  # of -inf and -inf there is no difference
            weights, faded = torch.exp(scores - level[..., None]), torch.exp(before - level)
            total = total * faded + weights.sum(-1)
            found = found * faded[..., None] + torch.einsum("nhgk,nkhd->nhgd", weights, v)
        out = torch.where(total[..., None] == 0, 0, found / total[..., None])
        return out.flatten(1, 2).to(self.q.dtype), (highest + torch.log(total)).flatten(1, 2)

    def _keys(self, queries: slice, begin: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return keys and values of some columns of each query's table, ``[n, keys, Hk, D]``, and which of them it sees."""
        rows, block = self.rows[queries], self.k_cache.shape[1]
        blocks = self.table[rows, begin : begin + columns]
        keys = torch.arange(begin * block, begin * block + blocks.shape[1] * block, device=rows.device)
        is_seen = (keys >= self.first[queries, None]) & (keys < self.end[queries, None])
        is_seen &= self.is_block[rows, begin : begin + columns].repeat_interleave(block, 1)
        k, v = (cache[blocks].flatten(1, 2).to(self.dtype) for cache in (self.k_cache, self.v_cache))
        # What is not seen may be anything, and 0 times NaN is not 0.
        return k, torch.where(is_seen[..., None, None], v, 0), is_seen
