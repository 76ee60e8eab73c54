"""Context parallelism: ranks that have the same head hold every n-th block of a sequence each.

The manager, which decides alike on all ranks, has blocks of ``size * block_size`` tokens. Each of its blocks is one block of
``block_size`` tokens in every rank's pool, under the same id, so block tables are good everywhere as they are::

    positions of a manager's block:   | 0 .. B-1 | B .. 2B-1 | ... |          B: block size of the caches
    held by rank:                          0           1       ...

So of n ranks each has a n-th of the memory, and of the reads of each step. Every rank attends to its tokens with all query heads of the
ranks that share the KV head, and `kvdock.ops.merge_attention` puts the results together.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.distributed as dist

from kvdock import ops
from kvdock.checks import check_int, check_size
from kvdock.errors import ArgumentTypeError, ArgumentValueError
from kvdock.ops.attention import query_rows
from kvdock.rank import RankInfo, place_in

__all__ = ["ContextShare", "gather_heads", "merge_over_ranks"]

_MOST_TOKENS = 512  # of a block of a manager, and so of one of a cache
_SHAPES = "pass what kvdock.ops.paged_attention takes, and returns"


@attrs.frozen
class ContextShare:
    """Which tokens of each sequence a rank holds: its share of the blocks.

    Args:
        size: ranks that share the tokens, at least 1.
        index: this rank's place among them.
    """

    size: int
    index: int

    def __attrs_post_init__(self) -> None:
        check_int("ContextShare: size", self.size, 1)
        if check_int("ContextShare: index", self.index, 0) >= self.size:
            raise ArgumentValueError("ContextShare: index", expected=f"less than size = {self.size}", got=self.index, fix="count from 0")

    @classmethod
    def of(cls, rank: RankInfo, num_heads: int) -> ContextShare:
        """Return the share of a rank of a tensor-parallel group that has more ranks than the model has KV heads.

        Ranks that hold the same head (`RankInfo.head_range`) share the tokens; with no more ranks than heads each has all of them.

        Raises:
            ArgumentValueError: ranks and heads do not divide.
        """
        rank.head_range(num_heads, "num_kv_heads")
        size = max(rank.tp_size // num_heads, 1)
        return cls(size, rank.tp_rank % size)

    def tokens(self, counts: torch.Tensor, block_size: int) -> torch.Tensor:
        """Return how many of the first ``counts`` tokens of sequences are here, in the shape and dtype of ``counts``.

        Args:
            counts: int32 or int64, from 0.
            block_size: of the caches.

        Raises:
            ArgumentTypeError, ArgumentValueError: another type; no block size.
        """
        each = self.size * _checked("tokens: counts", counts, block_size)
        return counts // each * block_size + (counts % each - self.index * block_size).clamp(0, block_size)

    def slots(self, slot_mapping: torch.Tensor, block_size: int) -> torch.Tensor:
        """Return where this rank's pool has the tokens of a manager's slots, and -1 for those that it does not hold: they are skipped.

        Args:
            slot_mapping: of a manager whose blocks have ``size * block_size`` tokens; negative is padding, and stays that.
            block_size: of the caches.

        Raises:
            ArgumentTypeError, ArgumentValueError: another type than int32 and int64; no block size.
        """
        each = self.size * _checked("slots: slot_mapping", slot_mapping, block_size)
        inside = slot_mapping % each
        here = (slot_mapping >= 0) & (inside // block_size == self.index)
        return torch.where(here, slot_mapping // each * block_size + inside % block_size, -1)

    def attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        cu_query_lens: torch.Tensor | None = None,
        causal: bool = True,
        window: int | None = None,
        starts: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the tokens that are here; `merge_over_ranks` puts the ranks' results together.

        Takes what `kvdock.ops.paged_attention` takes, with the block tables and lengths of the whole sequences, and does not wait for a
        device. The tokens before a query are not contiguous here, so each query is a row of its own: a step of decoding costs what it
        does anyway, while the queries of a prompt do not share what they read.

        Args:
            q: ``[N, Hq, Dk]``: all query heads that read the heads of this rank's cache; see `gather_heads`.
            k_cache: ``[NB, block, Hk, Dk]``, this rank's.
            v_cache: ``[NB, block, Hk, Dv]``.
            block_table: ``[B, W]`` int32, the manager's.
            seq_lens: ``[B]``, of the whole sequences.
            cu_query_lens: ``[B + 1]``; one query each without.
            causal: as there.
            window: as there.
            starts: as there.
            sinks: as there; the first rank of the share puts them in.
            options: ``scale``, ``softcap``, ``k_scale``, ``v_scale`` and ``out``, as there.

        Returns:
            ``(out, lse)`` over these tokens, ``[N, Hq, Dv]`` and ``[N, Hq]``.

        Raises:
            ArgumentTypeError, ArgumentValueError, IndexRangeError, UnsupportedError: as `kvdock.ops.paged_attention` does.
        """
        _check_rows(q, k_cache, block_table, seq_lens, cu_query_lens, starts, window)
        block = k_cache.shape[1]
        rows, behind = query_rows(cu_query_lens, q.shape[0], seq_lens.shape[0], seq_lens.device)
        none = rows >= seq_lens.shape[0]  # queries of no sequence
        rows = rows.clamp(max=max(seq_lens.shape[0] - 1, 0))
        lens = torch.where(none, 0, seq_lens[rows])
        ends = lens - behind if causal else lens
        first = torch.zeros_like(lens) if starts is None else starts[rows].to(lens.dtype)
        if window is not None:
            first = torch.maximum(first, lens - behind - window)
        ends, first = self.tokens(ends.clamp(min=0), block), self.tokens(first.clamp(min=0), block)
        options |= {"starts": torch.minimum(first, ends), "sinks": sinks if self.index == 0 else None, "return_lse": True}
        table = block_table if cu_query_lens is None else block_table[rows]
        out, lse = ops.paged_attention(q, k_cache, v_cache, table, ends, **options)
        return out, lse


def _checked(name: str, values: Any, block_size: int) -> int:
    """Return a block size, or raise where it is none, or where values are not ones that can be shared out."""
    if not isinstance(values, torch.Tensor) or values.dtype not in (torch.int32, torch.int64):
        got = values.dtype if isinstance(values, torch.Tensor) else type(values).__name__
        fix = "pass torch.from_numpy(...) of what a manager returns"
        raise ArgumentTypeError(f"ContextShare.{name}", expected="an int32 or int64 tensor", got=got, fix=fix)
    return check_size(f"ContextShare.{name.split(':')[0]}: block_size", block_size, _MOST_TOKENS)


def _check_rows(q: Any, k_cache: Any, table: Any, lens: Any, cu: Any, starts: Any, window: Any) -> None:
    """Refuse what cannot be made into a row for each query. What else is wrong is for the op to say, of the rows."""
    dims = {"q": (q, 3), "k_cache": (k_cache, 4), "block_table": (table, 2), "seq_lens": (lens, 1)}
    dims |= {name: (each, 1) for name, each in (("cu_query_lens", cu), ("starts", starts)) if each is not None}
    for name, (tensor, count) in dims.items():
        _check_dims(f"ContextShare.attend: {name}", tensor, count)
        if count == 1 and tensor.dtype not in (torch.int32, torch.int64):
            raise ArgumentTypeError(
                f"ContextShare.attend: {name}", expected="int32 or int64", got=tensor.dtype, fix="convert it with .int()"
            )
    batch = table.shape[0]
    sizes = [("seq_lens", lens, batch), ("starts", starts, batch), ("cu_query_lens", cu, batch + 1)]
    sizes += [("q", q, batch)] if cu is None else []
    for name, tensor, size in sizes:
        if tensor is not None and tensor.shape[0] != size:
            expected = f"{size} rows, for the {batch} of block_table"
            raise ArgumentValueError(f"ContextShare.attend: {name}", expected=expected, got=f"shape {[*tensor.shape]}", fix=_SHAPES)
    if window is not None:
        check_int("ContextShare.attend: window", window, 1)


def _check_dims(subject: str, tensor: object, count: int) -> None:
    if not isinstance(tensor, torch.Tensor):
        fix = "convert it with torch.as_tensor"
        raise ArgumentTypeError(subject, expected="a torch.Tensor", got=type(tensor).__name__, fix=fix)
    if tensor.dim() != count:
        raise ArgumentValueError(subject, expected=f"{count} dimensions", got=f"shape {[*tensor.shape]}", fix=_SHAPES)


def gather_heads(q: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the query heads of all ranks of a group, ``[N, size * Hq, Dk]``, in the order of ranks.

    Args:
        q: this rank's heads, ``[N, Hq, Dk]``; all ranks have as many.
        group: the ranks that share the tokens; None: all processes.

    Raises:
        ArgumentTypeError, ArgumentValueError: no such tensor; no group with this process in it.
    """
    _check_dims("gather_heads: q", q, 3)
    size, _ = place_in("gather_heads: group", group)
    parts = [torch.empty_like(q, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(parts, q.contiguous(), group=group)
    return torch.cat(parts, 1)


def merge_over_ranks(out: torch.Tensor, lse: torch.Tensor, group: dist.ProcessGroup | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what attention to all tokens is, of what `ContextShare.attend` gave on each rank; all heads, the same bits on every rank.

    Args:
        out: ``[N, Hq, Dv]``.
        lse: ``[N, Hq]``.
        group: the ranks that share the tokens, in the order of their shares; None: all processes.

    Raises:
        ArgumentTypeError, ArgumentValueError: no such tensors; no group with this process in it.
    """
    for name, tensor, count in (("out", out, 3), ("lse", lse, 2)):
        _check_dims(f"merge_over_ranks: {name}", tensor, count)
    size, _ = place_in("merge_over_ranks: group", group)
    out, lse = out.contiguous(), lse.contiguous()  # some backends refuse strides, as of a permuted out=
    parts = [(torch.empty_like(out), torch.empty_like(lse)) for _ in range(size)]
    dist.all_gather([part for part, _ in parts], out, group=group)
    dist.all_gather([part for _, part in parts], lse, group=group)
    return ops.merge_attention(parts)
