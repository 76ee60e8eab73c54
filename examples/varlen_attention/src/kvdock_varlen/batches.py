"""Tables and lengths made safe on the device, without waiting for it: torch's kernels trust them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

__all__ = ["Batch"]


@attrs.frozen(eq=False)
class Batch:
    """What `varlen_attn` is given. A sequence of which a number is out of range has no tokens, as a padding row has none.

    Args:
        ends: where each sequence's queries begin, and where the last one's end; int32 ``[B + 1]``, not above the number of queries.
        lens: tokens of each sequence, int32 ``[B]``.
        table: block ids of the pool, int32 ``[B, W]``.
        sees_nothing: whether a query belongs to no sequence, or to one without tokens; bool ``[N]``.
        wrong: how many sequences have a number out of range, int64 ``[]``.
    """

    ends: torch.Tensor
    lens: torch.Tensor
    table: torch.Tensor
    sees_nothing: torch.Tensor
    wrong: torch.Tensor

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> Batch:
        """Arrange the arguments of a call, which are given by name."""
        table, lens, cu, queries = args["block_table"], args["seq_lens"].to(torch.int64), args["cu_query_lens"], args["q"].shape[0]
        num_blocks, block = args["k_cache"].shape[:2]
        ends = torch.arange(len(lens) + 1, device=lens.device) if cu is None else cu.to(torch.int64).clamp(0, queries).cummax(0).values
        counts = ends.diff()
        columns = torch.arange(table.shape[1], device=table.device)
        is_used = columns < ((lens + block - 1) // block)[:, None]
        if args["window"] is not None:
            first = (lens - counts - args["window"] + 1).clamp(min=0)
            is_used &= columns >= (first // block)[:, None]
        is_block = (table >= 0) & (table < num_blocks)
        is_wrong = (lens < 0) | (lens > table.shape[1] * block) | ((lens > 0) & (lens < counts)) | (is_used & ~is_block).any(1)
        if cu is not None:
            is_wrong |= counts > args["max_query_len"]
        lens = torch.where(is_wrong, 0, lens)
        places = torch.arange(queries, device=lens.device)
        row = torch.searchsorted(ends[1:].contiguous(), places, right=True)
        sees_nothing = (places < ends[0]) | (row >= len(lens)) | (lens[row.clamp(max=len(lens) - 1)] == 0)
        return cls(ends.to(torch.int32), lens.to(torch.int32), torch.where(is_block, table, 0), sees_nothing, is_wrong.sum())
