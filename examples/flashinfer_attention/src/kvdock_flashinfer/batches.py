"""A batch in the form that FlashInfer plans on: blocks one sequence behind the other. On the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from kvdock.plugin import IndexRangeError, check_paged_attention

__all__ = ["Batch"]

_READ = ("block_table", "seq_lens", "cu_query_lens")


@attrs.frozen(eq=False)
class Batch:
    """What a plan is made of. A sequence without tokens is one of a single token of block 0: FlashInfer has no empty ones.

    Args:
        query_ends: where each sequence's queries begin, and where the last one's end; int32 ``[B + 1]``.
        block_ends: the same of blocks.
        blocks: block ids, int32. Those that lie before the windows of all queries of a sequence are left out.
        last: tokens in the last block of each sequence, int32 ``[B]``.
        unseeing: queries of sequences without tokens, and those behind the last sequence's; int64.
        tokens: tokens that are looked at, of all sequences.
    """

    query_ends: torch.Tensor
    block_ends: torch.Tensor
    blocks: torch.Tensor
    last: torch.Tensor
    unseeing: torch.Tensor
    tokens: int

    @classmethod
    def read(cls, args: Mapping[str, Any]) -> Batch | None:
        """Read tables and lengths, which waits for the device, and arrange them; None where any of them is out of range.

        Args:
            args: those of the op, by name.
        """
        on_host: dict[str, Any] = {name: None if args[name] is None else args[name].cpu() for name in _READ}
        lens, cu, queries = on_host["seq_lens"].to(torch.int64), on_host["cu_query_lens"], args["q"].shape[0]
        ends = torch.arange(len(lens) + 1, device="cpu") if cu is None else cu
        counted = int(ends[-1])
        if not 0 < counted <= queries:
            return None
        try:
            check_paged_attention({**args, **on_host, "q": args["q"][:counted]})
        except IndexRangeError:
            return None
        return cls._arranged(on_host["block_table"], lens, ends, queries, args["k_cache"].shape[1], args["window"])

    @classmethod
    def _arranged(cls, table: torch.Tensor, lens: torch.Tensor, ends: torch.Tensor, queries: int, block: int, window: int | None) -> Batch:
        counts, is_empty = ends.diff(), lens == 0
        seen = torch.where(is_empty, 1, lens)
        first = torch.zeros_like(lens) if window is None else (seen - counts - window + 1).clamp(min=0) // block
        end = (seen + block - 1) // block
        columns = torch.arange(table.shape[1], device="cpu")
        is_looked_at = (columns >= first[:, None]) & (columns < end[:, None])
        return cls(
            query_ends=ends.to(torch.int32),
            block_ends=torch.nn.functional.pad((end - first).cumsum(0), (1, 0)).to(torch.int32),
            blocks=table.masked_fill(is_empty[:, None], 0)[is_looked_at],
            last=((seen - 1) % block + 1).to(torch.int32),
            unseeing=torch.cat([is_empty.repeat_interleave(counts).nonzero()[:, 0], torch.arange(int(ends[-1]), queries, device="cpu")]),
            tokens=int((seen - first * block).sum()),
        )
