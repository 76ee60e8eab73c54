"""`paged_attention` on the CPU: a tile of keys at a time is read from the pool and attended to, and tiles are joined by their sums.

* A tile that every query sees whole goes to torch's flash kernel: fewer passes over the scores than `torch.softmax`.
* At the edges of what queries see, with a soft cap, and where Dk is not Dv: scores, masks and an online softmax by hand.

All is computed in float32, or float64 for float64: torch's kernels for half-size floats are slower at a few queries and no quicker
at many, and tiles are rounded once, when they have been joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvdock.plugin import HOST, Descriptor, Kernel, Request, check_paged_attention, quantised_reasons
from kvdock_cpu.gather_paged import KeyTiles

__all__ = ["PagedAttention", "PagedAttentionDescriptor"]

_TILE = 1 << 20
"""Elements of keys and values in a tile, which fit into a cache of the third level. Smaller ones cost more in calls than they save."""

_LONGEST = 4096
"""Most keys in a tile, however small they are: scores are workspace too."""

_ROWS = 4096
"""Queries times heads that attend together."""

_INDICES = ("block_table", "seq_lens", "cu_query_lens", "starts")

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class PagedAttentionDescriptor(Descriptor):
    """Attends on one pool geometry.

    Workspace does not grow with the context: a tile of keys and values as they are read and one in float32, of 4 MiB at most unless
    16 tokens are more; the scores of a tile where they are not left to torch; the results of 4,096 rows, each a query's head.

    Args:
        request: the static signature.
    """

    def __init__(self, request: Request) -> None:
        k, v = (request.tensor(name) for name in ("k_cache", "v_cache"))
        heads, dims = int(k.shape[2] or 0), int(k.shape[3] or 0) + int(v.shape[3] or 0)
        query_heads = int(request.tensor("q").shape[1] or 0)
        self._names = tuple(request.args)
        self.tile = min(max(_TILE // max(heads * dims, 1), 16), _LONGEST)
        self.queries = max(_ROWS // max(query_heads, 1), 1)
        self.tiles = KeyTiles(k, self.tile), KeyTiles(v, self.tile)
        self.has_runs = all(tiles.has_runs for tiles in self.tiles)
        self._checked: tuple[Any, ...] = ()
        rows = self.queries * query_heads
        # Of each row: the query, what was found before and in this tile, and scores, weights and which are seen.
        results = rows * (2 * dims + 3 * self.tile) * 2 * max(k.dtype.itemsize, 4)
        self.workspace_bytes = sum(tiles.workspace_bytes for tiles in self.tiles) + results

    def __call__(self, *values: Any) -> None:
        """Check all index values, then fill ``out`` and, where it is given, ``lse``."""
        args = dict(zip(self._names, values, strict=True))
        checked = self._index_values(args)
        if checked != self._checked:
            check_paged_attention(args)
            self._checked = checked
        if torch.is_autocast_enabled("cpu"):  # which would round what is multiplied
            with torch.autocast("cpu", enabled=False):
                _Call(self, args).run()
        else:
            _Call(self, args).run()

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
        self.q, self.k_cache, self.v_cache, self.table = (args[name] for name in ("q", "k_cache", "v_cache", "block_table"))
        self.dtype = torch.promote_types(self.q.dtype, torch.float32)
        self.heads, self.block = self.k_cache.shape[2], self.k_cache.shape[1]
        self.scale = self.q.shape[2] ** -0.5 if args["scale"] is None else float(args["scale"])
        self.is_plain = args["softcap"] is not None or self.k_cache.shape[3] != self.v_cache.shape[3]
        self.offsets = torch.arange(self.block, device=HOST)
        self.rooms = [tiles.room(self.table.shape[1] * self.block) for tiles in made.tiles]
        sinks = args["sinks"]
        self.sinks = None if sinks is None else sinks.to(self.dtype).view(self.heads, -1, 1)

    def run(self) -> None:
        """Fill the outputs."""
        lens, cu, starts = (self.args[name] for name in ("seq_lens", "cu_query_lens", "starts"))
        sums = range(len(lens) + 1) if cu is None else cu.tolist()
        firsts = [0] * len(lens) if starts is None else starts.tolist()
        for row, length in enumerate(lens.tolist()):
            for begin in range(sums[row], sums[row + 1], self.made.queries):
                end = min(begin + self.made.queries, sums[row + 1])
                self._fill(row, firsts[row], length, begin, end, length - sums[row + 1])

    def _fill(self, row: int, start: int, length: int, begin: int, end: int, shift: int) -> None:
        """Fill the results of the queries from ``begin`` to ``end``, which stand ``shift`` further in their sequence than in ``q``."""
        part = _Part(start, length, begin + shift, end + shift, self.args["causal"], self.args["window"])
        joined = self._attend(row, part, self._queries(begin, end))
        if joined is None:
            for query in range(begin, end):
                self._fill(row, start, length, query, query + 1, shift)
            return
        if end - begin == 1 and self.sinks is None and self.args["lse"] is None:
            self.args["out"][begin].view(joined[0].shape).copy_(joined[0])
            return
        found, lse = (x.view(self.heads, -1, end - begin, *x.shape[2:]) for x in joined)  # [Hk, G, n, Dv] and [Hk, G, n]
        if self.sinks is not None:
            found = found * torch.sigmoid(lse - self.sinks)[..., None]
            lse = torch.logaddexp(lse, self.sinks)
        self.args["out"][begin:end].view(end - begin, self.heads, -1, found.shape[3]).copy_(found.permute(2, 0, 1, 3))
        if self.args["lse"] is not None:
            self.args["lse"][begin:end] = lse.permute(2, 0, 1).flatten(1)

    def _queries(self, begin: int, end: int) -> torch.Tensor:
        """Return queries as rows of each head of the cache, ``[Hk, G * n, Dk]``."""
        q: torch.Tensor = self.q[begin:end].to(self.dtype)
        if end - begin == 1:  # as in decoding, where each call counts
            return q.view(self.heads, -1, q.shape[2])
        return q.view(end - begin, self.heads, -1, self.q.shape[2]).permute(1, 2, 0, 3).flatten(1, 2)

    def _attend(self, row: int, part: _Part, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return results and logarithms of sums; None if queries must be taken one by one, since one does not see what is no number."""
        joined = None
        for begin, end in part.tiles(self.made.tile):
            k, v = self._tiles(row, begin, end)
            is_seen = part.is_seen(begin, end)
            if is_seen is not None and not bool(v.sum().isfinite()):  # 0 times NaN is not 0
                return None
            found = self._plain(q, k, v, is_seen) if self.is_plain or is_seen is not None else self._flash(q, k, v)
            joined = found if joined is None else _join(joined, found)
        if joined is None:
            joined = q.new_zeros((*q.shape[:2], self.v_cache.shape[3])), q.new_full(q.shape[:2], -torch.inf)
        return joined

    def _tiles(self, row: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a sequence from ``begin`` to ``end``, ``[heads, keys, dim]``, in the rooms."""
        column = begin // self.block
        blocks = self.table[row, column : (end - 1) // self.block + 1]
        skipped, count = begin - column * self.block, end - begin
        pairs = zip(self.made.tiles, (self.k_cache, self.v_cache), self.rooms, strict=True)
        if self.made.has_runs and (ids := blocks.tolist()) == list(range(ids[0], ids[0] + len(ids))):
            k, v = (tiles.read_run(cache, room, ids[0] * self.block + skipped, count) for tiles, cache, room in pairs)
            return k, v
        slots = (blocks.to(torch.int64)[:, None] * self.block + self.offsets).flatten()[skipped : skipped + count]
        k, v = (tiles.read(cache, room, slots) for tiles, cache, room in pairs)
        return k, v

    def _flash(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found, lse = _flash(q[None], k[None], v[None], scale=self.scale)
        return found[0], lse[0]

    def _plain(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_seen: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(self.scale)
        if self.args["softcap"] is not None:
            scores.div_(self.args["softcap"]).tanh_().mul_(self.args["softcap"])
        if is_seen is not None:
            scores.view(len(scores), -1, *is_seen.shape).masked_fill_(~is_seen, -torch.inf)
        highest = scores.amax(2, keepdim=True)
        highest.masked_fill_(highest == -torch.inf, 0)  # of -inf and -inf there is no difference
        weights = scores.sub_(highest).exp_()
        total = weights.sum(2, keepdim=True)
        found = torch.bmm(weights, v).div_(total.clamp(min=torch.finfo(total.dtype).tiny))
        return found, highest.add_(total.log_()).squeeze(2)


class _Part:
    """Some queries of a sequence, and which keys they see.

    Args:
        start: first key that may be seen.
        length: how many keys there are.
        begin: position of the first query.
        end: position behind the last.
        causal: whether a query sees none behind its own.
        window: how many it sees up to its own.
    """

    def __init__(self, start: int, length: int, begin: int, end: int, causal: bool, window: int | None) -> None:
        self.start, self.length, self.causal, self.window = start, length, causal, window
        self.begin, self.end = begin, end
        self.shared = self._first(end - 1), self._stop(begin)
        """The keys that all of them see."""

    def _first(self, position: int) -> int:
        return self.start if self.window is None else max(self.start, position - self.window + 1)

    def _stop(self, position: int) -> int:
        return min(position + 1, self.length) if self.causal else self.length

    def tiles(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of keys to look at: no key outside is seen by any."""
        stop = self._stop(self.end - 1)
        for begin in range(self._first(self.begin), stop, size):
            yield begin, min(begin + size, stop)

    def is_seen(self, begin: int, end: int) -> torch.Tensor | None:
        """Return which keys of a range each query sees, ``[n, keys]``; None for all."""
        if self.shared[0] <= begin and end <= self.shared[1]:
            return None
        keys, positions = torch.arange(begin, end, device=HOST), torch.arange(self.begin, self.end, device=HOST)[:, None]
        is_seen = keys <= positions if self.causal else torch.ones_like(keys <= positions)
        return is_seen if self.window is None else is_seen & (keys > positions - self.window)


def _join(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what two sets of keys give together; changes the first result."""
    lse = torch.logaddexp(one[1], other[1])
    level = lse.masked_fill(lse == -torch.inf, 0)
    weights = [(part[1] - level).exp_().unsqueeze(2) for part in (one, other)]
    return one[0].mul_(weights[0]).addcmul_(other[0], weights[1]), lse
