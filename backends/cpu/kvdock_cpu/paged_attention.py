"""`paged_attention` on the CPU: a tile of keys at a time is read from the pool and attended to, and tiles are joined by their sums.

* One query of a sequence, as in decoding: scores, softmax and values by hand. All keys are read, then all values, while torch's flash
  kernel goes to and fro between them. Blocks that lie apart are copied, a few at a time, and computed with while they are near.
* Several queries: a tile that all of them see whole goes to the flash kernel, with fewer passes over the scores than `torch.softmax`.
* At the edges of what they see, with a soft cap, and where Dk is not Dv: scores, masks and an online softmax by hand.

All is computed in float32, or float64 for float64: torch's kernels for half-size floats are slower at a few queries and no quicker
at many, and tiles are rounded once, when they have been joined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from kvdock.plugin import Descriptor, Kernel, Request, check_paged_attention, quantised_reasons
from kvdock_cpu.key_tiles import KeyTiles, Read, SequenceKeys
from kvdock_cpu.rows import Part, ranges
from kvdock_cpu.softmax import Weigh, join, softmax, softmax_with_lse

__all__ = ["PagedAttention", "PagedAttentionDescriptor"]

_TILE = 1 << 20
"""Elements of keys and values in a tile, which fit into a cache of the third level. Smaller ones cost more in calls than they save."""

_NEAR = 1 << 17
"""Elements of keys, or of values, that are copied at once for one query, which fit into a cache of the second level. It is given two
calls for each, not those of a softmax too, so that smaller tiles pay."""

_LONGEST = 4096
"""Most keys in a tile, however small they are, or that one query has scores of at once: scores are workspace too."""

_ROWS = 4096
"""Queries times heads that attend together."""

_INDICES = ("block_table", "seq_lens", "cu_query_lens", "starts")

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class PagedAttentionDescriptor(Descriptor):
    """Attends on one pool geometry.

    Workspace does not grow with the context: a tile of keys and values as they are read and one in float32, of 4 MiB at most unless
    16 tokens are more; the scores of a tile where they are not left to torch, or of 4,096 keys for one query; the results of 4,096 rows,
    each a query's head.

    Args:
        request: the static signature.
    """

    uses_autograd = False  # see `_needs_inference_mode`, which asks less than the dispatcher would

    def __init__(self, request: Request) -> None:
        k, v = (request.tensor(name) for name in ("k_cache", "v_cache"))
        self.block, self.heads = int(k.shape[1] or 0), int(k.shape[2] or 0)
        k_dim, v_dim = int(k.shape[3] or 0), int(v.shape[3] or 0)
        dims, query_heads = k_dim + v_dim, int(request.tensor("q").shape[1] or 0)
        self._names = tuple(request.args)
        self.dtype, self.scale = torch.promote_types(k.dtype, torch.float32), max(k_dim, 1) ** -0.5
        self.is_even, self.wider = k_dim == v_dim, int(v_dim > k_dim)
        tile = min(max(_TILE // max(self.heads * dims, 1), 16), _LONGEST)
        self.tile = tile - tile % self.block if 0 < self.block <= tile else tile
        near = max(_NEAR // max(self.heads * max(k_dim, v_dim), 1), 16)
        self.near = min(max(near - near % self.block, self.block) if 0 < self.block <= tile else near, self.tile)
        self.queries = max(_ROWS // max(query_heads, 1), 1)
        self.tiles = KeyTiles(k, self.tile), KeyTiles(v, self.tile)
        self._checked: tuple[Any, ...] = ()
        # Of each query's head: the query, what was found before and in this tile, and scores, weights and which are seen.
        results = query_heads * max(self.queries * (2 * dims + 3 * self.tile), 2 * dims + 3 * _LONGEST) * 2 * max(k.dtype.itemsize, 4)
        self.workspace_bytes = sum(tiles.workspace_bytes for tiles in self.tiles) + results

    def __call__(self, *values: Any) -> None:
        """Check all index values, then fill ``out`` and, where it is given, ``lse``."""
        args = dict(zip(self._names, values, strict=True))
        checked = self._index_values(args)
        if checked != self._checked:
            check_paged_attention(args)
            self._checked = checked
        run = _Call(self, args).run
        if torch.is_autocast_enabled("cpu"):  # which would round what is multiplied
            run = torch.autocast("cpu", enabled=False)(run)
        if _needs_inference_mode(args["out"], args["lse"]):
            run = torch.inference_mode()(run)
        run()

    def _index_values(self, args: dict[str, Any]) -> tuple[Any, ...]:
        """Return what tells all that a check of index values looks at: the layers of a step, of one geometry, bring the same.

        Of bytes a hash of 64 bits, salted in each process: a plan that kept them would keep memory by the size of its calls.
        """
        arrays = [None if args[name] is None else args[name].numpy() for name in _INDICES]
        sizes = (args["q"].shape[0], args["max_query_len"])  # the pool's sizes are this descriptor's, and so is the window
        return *sizes, *[None if array is None else (array.dtype, array.shape, hash(array.tobytes())) for array in arrays]


class PagedAttention(Kernel):
    """Prepares `PagedAttentionDescriptor`."""

    def supports(self, request: Request) -> Sequence[str]:
        """Refuse quantised caches."""
        return quantised_reasons(request)

    def prepare(self, request: Request) -> Descriptor:
        """Choose tiles for the pool."""
        return PagedAttentionDescriptor(request)


class _Call:
    """One call: sequences in turn, a part of the queries of each at a time."""

    def __init__(self, made: PagedAttentionDescriptor, args: dict[str, Any]) -> None:
        self.made, self.args = made, args
        self.q, self.out, self.lse = args["q"], args["out"], args["lse"]
        pools = args["k_cache"], args["v_cache"]
        self.keys = SequenceKeys(pools, made.tiles, args["block_table"].numpy(), made.block, made.near, made.wider)
        self.scale = made.scale if args["scale"] is None else float(args["scale"])
        sinks = args["sinks"]
        self.sinks = None if sinks is None else sinks.to(made.dtype).view(made.heads, -1, 1)
        self.is_plain = args["softcap"] is not None or not made.is_even
        self.scores: torch.Tensor | None = None

    def run(self) -> None:
        """Fill the outputs."""
        cu, starts, window = (self.args[name] for name in ("cu_query_lens", "starts", "window"))
        lens = self.args["seq_lens"].tolist()
        sums = range(len(lens) + 1) if cu is None else cu.tolist()
        firsts = [0] * len(lens) if starts is None else starts.tolist()
        for row, length in enumerate(lens):
            begin, stop = sums[row], sums[row + 1]
            if stop - begin == 1:
                self._fill_one(row, firsts[row] if window is None else max(firsts[row], length - window), length, begin)
            for first in range(begin, stop, self.made.queries) if stop - begin > 1 else ():
                self._fill(row, firsts[row], length, first, min(first + self.made.queries, stop), length - stop)

    def _fill(self, row: int, start: int, length: int, begin: int, end: int, shift: int) -> None:
        """Fill the results of the queries from ``begin`` to ``end``, which stand ``shift`` further in their sequence than in ``q``."""
        part = Part(start, length, begin + shift, end + shift, self.args["causal"], self.args["window"])
        joined = self._attend(row, part, self._queries(begin, end))
        if joined is None:
            for query in range(begin, end):
                self._fill_one(row, part.first(query + shift), part.stop(query + shift), query)
        else:
            self._store(begin, end, *joined)

    def _fill_one(self, row: int, first: int, stop: int, query: int) -> None:
        """Fill the results of one query, which sees the keys from ``first`` to ``stop``: all that are looked at, so none is masked."""
        q, joined = self._queries(query, query + 1), None
        spans = list(ranges(first, stop, _LONGEST))
        if len(spans) == 1 and self.sinks is None and self.lse is None:
            found, _ = self._span(row, first, stop, q, softmax)
            if math.isfinite(found.sum()):  # a sum of weights that is 0 or no number makes no numbers of results
                self.out[query].view(found.shape).copy_(found)
                return
        for begin, end in spans:
            part = self._span(row, begin, end, q, softmax_with_lse)
            joined = part if joined is None else join(joined, part)
        self._store(query, query + 1, *(joined or self._nothing(q)))

    def _span(self, row: int, begin: int, end: int, q: torch.Tensor, weigh: Weigh) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a query finds in keys that it all sees, by weights that are made of all their scores."""
        if begin % self.made.block + end - begin <= self.made.near:
            return self._plain(q, self.keys.reader(row, begin, end), None, weigh)
        if self.scores is None:
            self.scores = q.new_empty(q.shape[0] * q.shape[1] * min(self.keys.longest, _LONGEST))
        scores = self.scores[: q.shape[0] * q.shape[1] * (end - begin)].view(*q.shape[:2], end - begin)
        for at, k in self.keys.walk(0, row, begin, end):
            scores[:, :, at : at + k.shape[1]] = self._scores(q, k)  # not in place: products into a part go head by head
        weights, lse = weigh(self._capped(scores))
        found = q.new_empty((*q.shape[:2], self.out.shape[2]))
        for at, v in self.keys.walk(1, row, begin, end):
            found.baddbmm_(weights[:, :, at : at + v.shape[1]], v, beta=1 if at else 0)
        return found, lse

    def _store(self, begin: int, end: int, found: torch.Tensor, lse: torch.Tensor) -> None:
        """Put results where they belong, ``[Hk, G * n, Dv]``, and logarithms of sums, ``[Hk, G * n]``."""
        found, lse = (x.view(len(x), -1, end - begin, *x.shape[2:]) for x in (found, lse))
        if self.sinks is not None:
            found = found * torch.sigmoid(lse - self.sinks).nan_to_num(0.0)[..., None]  # both are -inf: 0 is found, and remains
            lse = torch.logaddexp(lse, self.sinks)
        self.out[begin:end].view(end - begin, len(found), -1, found.shape[3]).copy_(found.permute(2, 0, 1, 3))
        if self.lse is not None:
            self.lse[begin:end] = lse.permute(2, 0, 1).flatten(1)

    def _queries(self, begin: int, end: int) -> torch.Tensor:
        """Return queries as rows of each head of the cache, ``[Hk, G * n, Dk]``."""
        q: torch.Tensor = self.q[begin:end].to(self.made.dtype)
        if end - begin == 1:  # as in decoding, where each call counts
            return q.view(self.made.heads, -1, q.shape[2])
        return q.view(end - begin, self.made.heads, -1, q.shape[2]).permute(1, 2, 0, 3).flatten(1, 2)

    def _attend(self, row: int, part: Part, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return results and logarithms of sums; None if queries must be taken one by one, since one does not see what is no number."""
        joined = None
        for begin, end in part.tiles(self.made.tile):
            read, is_seen = self.keys.reader(row, begin, end), part.is_seen(begin, end)
            if is_seen is not None and not bool(read(1).sum().isfinite()):  # 0 times NaN is not 0
                return None
            found = self._plain(q, read, is_seen) if self.is_plain or is_seen is not None else self._flash(q, read)
            joined = found if joined is None else join(joined, found)
        return joined or self._nothing(q)

    def _nothing(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what queries find that see no key."""
        return q.new_zeros((*q.shape[:2], self.out.shape[2])), q.new_full(q.shape[:2], -torch.inf)

    def _flash(self, q: torch.Tensor, read: Read) -> tuple[torch.Tensor, torch.Tensor]:
        found, lse = _flash(q[None], read(0)[None], read(1)[None], scale=self.scale)
        return found[0], lse[0]

    def _scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q.new_empty((*q.shape[:2], k.shape[1])).baddbmm_(q, k.mT, beta=0, alpha=self.scale)  # scaled on the way

    def _capped(self, scores: torch.Tensor) -> torch.Tensor:
        cap = self.args["softcap"]
        return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)

    def _plain(
        self, q: torch.Tensor, read: Read, is_seen: torch.Tensor | None, weigh: Weigh = softmax_with_lse
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self._capped(self._scores(q, read(0)))
        if is_seen is not None:
            scores.view(len(scores), -1, *is_seen.shape).masked_fill_(~is_seen, -torch.inf)
        weights, lse = weigh(scores)
        return torch.bmm(weights, read(1)), lse


def _needs_inference_mode(out: torch.Tensor, lse: torch.Tensor | None) -> bool:
    """Return whether something would be recorded, or may be written in that mode only. To enter it takes as long as a few operations."""
    if torch.is_inference_mode_enabled():
        return False
    return torch.is_grad_enabled() or out.is_inference() or (lse is not None and lse.is_inference())
