"""What could have been hit: by a cache without end, and by a least-recently-used cache of the trace's own blocks.

Both know only the trace's blocks of 512 tokens. The first is a ceiling. The second is a yardstick: a cache that evicts in
smaller blocks can do a little better.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import attrs

from kvdock.replay.trace import TRACE_BLOCK, Trace, TraceRequest

__all__ = ["HitRate", "block_lru", "ceiling"]


@attrs.frozen
class HitRate:
    """Which part of the prompts was there already.

    Args:
        tokens: hit tokens per token of input; compare this with a replay's hit rate.
        blocks: hit blocks of 512 tokens per block of input, where the last block of a prompt counts as much as a whole one:
            how hit rates of traces are often given.
    """

    tokens: float
    blocks: float


def ceiling(trace: Trace) -> HitRate:
    """Return what a cache without end hits: every leading block that an earlier request had."""
    seen: set[int] = set()

    def hits(request: TraceRequest) -> int:
        ids = request.block_ids or ()
        found = _leading(ids, seen)
        seen.update(ids)
        return found

    return _rate(trace, [hits(request) for request in trace.requests])


def block_lru(trace: Trace, pool_tokens: int) -> HitRate:
    """Return what a least-recently-used cache of whole trace blocks hits.

    Args:
        trace: the trace.
        pool_tokens: size of the pool; it holds ``pool_tokens // 512`` blocks. Of the blocks of one request, the last go first.
    """
    room = pool_tokens // TRACE_BLOCK
    kept: OrderedDict[int, None] = OrderedDict()

    def hits(request: TraceRequest) -> int:
        ids = request.block_ids or ()
        found = _leading(ids, kept)
        # Backwards, so that the first block of a request was used last: its last blocks are evicted first.
        for number in reversed(ids):
            kept[number] = None
            kept.move_to_end(number)
        while len(kept) > room:
            kept.popitem(last=False)
        return found

    return _rate(trace, [hits(request) for request in trace.requests])


def _leading(ids: Iterable[int], known: set[int] | OrderedDict[int, None]) -> int:
    """Return how many of the first ids are known, up to the first that is not."""
    found = 0
    for number in ids:
        if number not in known:
            break
        found += 1
    return found


def _rate(trace: Trace, hits: list[int]) -> HitRate:
    """Return the hit rate when each request finds its first so many blocks."""
    blocks = sum(len(request.block_ids or ()) for request in trace.requests)
    pairs = zip(trace.requests, hits, strict=True)
    tokens = sum(min(found * TRACE_BLOCK, request.input_length) for request, found in pairs)
    return HitRate(tokens / trace.input_tokens, sum(hits) / blocks if blocks else 0.0)
