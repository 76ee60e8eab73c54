"""How blocks of sequences become shared, and how they are taken back.

Who owns what:

=====================================  =========================  ================================================
a block                                is held by                 and is given up when
=====================================  =========================  ================================================
of a sequence, not published           it and its forks           the last of them ends, is cut, or copies it
published                              the prefix cache           it is evicted, or taken back; never while locked
found or published by a sequence       the prefix cache; the      --
                                       sequence has it locked
pinned                                 the prefix cache; the pin  --
                                       has it locked
equal to one that is cached            nobody: the sequence goes  it is published
                                       on with the cached one
promised                               nobody yet                 the sequence takes it, or ends
=====================================  =========================  ================================================

Who published a block is noted for the block. ``finish(keep=False)`` takes back what this sequence published and nobody
else uses: of each prefix that it has published, the blocks at the end, as long as they are its own publication, no other
sequence or pin has them locked, and nothing is stored behind them. What others published stays, also between.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.prefix.interface import BlockIds, PrefixHandle
from kvdock.scheduler.pool_blocks import PoolBlocks
from kvdock.scheduler.rows import Rows
from kvdock.scheduler.sequence import CacheSequence

__all__ = ["NOTHING_MORE", "Publisher"]

NOTHING_MORE = int(np.iinfo(np.intp).max)
"""A number of published blocks that no sequence reaches."""


class Publisher:
    """Moves blocks from sequences into the prefix cache, and back to the free ones.

    Args:
        pool: the blocks and the prefix cache.
        rows: what is known of the sequences.
    """

    def __init__(self, pool: PoolBlocks, rows: Rows) -> None:
        self._pool = pool
        self._prefix = pool.prefix
        self._rows = rows
        self._publisher = np.zeros(pool.allocator.num_blocks, dtype=np.int64)  # serial numbers; of free blocks anything

    def publish(self, seq: CacheSequence, count: int) -> None:
        """Insert the first ``count`` blocks of a sequence, and let it go on with what is cached of them."""
        rows, row, size = self._rows, seq._row, self._rows.block_size
        shared, handle = int(rows.shared[row]), seq._handle
        if handle is None or handle.cached_len != shared * size:  # it was cut, and has more locked than it uses
            handle = self._prefix.match_prefix(seq._ids.view[: shared * size], seq.namespace, record=False).handle
        own = rows.table[row, shared:count].copy()
        ids = seq._ids.view[shared * size : count * size]
        result = self._prefix.insert_prefix(ids, own, seq.namespace, behind=handle, priority=seq._priority)
        known, stored = max(result.cached_len // size - shared, 0), max(result.handle.cached_len // size - shared, 0)
        fresh = own[known:stored]
        self._publisher[fresh] = seq._serial
        self.relock(seq, result.handle)
        rows.shared[row], rows.published[row] = shared + stored, count
        if known:
            rows.table[row, shared : shared + known] = result.blocks[:known]
            rows.touch(np.array([row]))
            self._pool.allocator.release(own[:known])
        if fresh.size and self._pool.allocator.ref_counts(fresh).max() > 1:
            self._share_with_forks(seq, shared + known, shared + stored)

    def _share_with_forks(self, seq: CacheSequence, start: int, stop: int) -> None:
        """Let forks have through the cache what has just become cached and was their own too: blocks ``start`` to ``stop - 1``.

        A fork that has a block at the same place as the cache has the same tokens before it, and in it as far as it goes,
        since a block is copied before it is written; so it can go on with the cached ones before it too, where it had
        duplicates.
        """
        rows, cached = self._rows, self._rows.table[seq._row, :stop].copy()
        for index in range(stop - 1, start - 1, -1):
            equal = (rows.table[:, index] == cached[index]) & (rows.num_blocks > index) & (rows.shared <= index)
            for row in np.flatnonzero(equal).tolist():
                self._adopt(rows.sequence(row), seq._ids.view[: (index + 1) * rows.block_size], cached[: index + 1])

    def _adopt(self, seq: CacheSequence, ids: npt.NDArray[Any], cached: BlockIds) -> None:
        """Let a sequence go on with cached blocks in the place of its own first ones."""
        rows, row = self._rows, seq._row
        self.relock(seq, self._prefix.match_prefix(ids, seq.namespace, record=False).handle)
        self._pool.allocator.release(rows.table[row, rows.shared[row] : cached.size])
        rows.table[row, : cached.size] = cached
        rows.shared[row] = cached.size
        rows.published[row] = max(rows.published[row], cached.size)
        rows.touch(np.array([row]))

    def take_over(self, seq: CacheSequence, handle: PrefixHandle, blocks: BlockIds) -> None:
        """Let a sequence whose prompt was begun in chunks go on with what others have published of it, and lock that."""
        rows, row = self._rows, seq._row
        self.relock(seq, handle)
        self._pool.allocator.release(rows.blocks(row)[rows.shared[row] :])
        rows.reserve_width(blocks.size)
        rows.table[row, : blocks.size] = blocks
        rows.num_blocks[row] = rows.shared[row] = rows.published[row] = blocks.size
        rows.num_tokens[row] = rows.computed[row] = seq._cached_len = handle.cached_len
        rows.touch(np.array([row]))

    def forget(self) -> None:
        """Empty the prefix cache. What open sequences had of it they hold themselves now, and publish no more."""
        rows, forgotten = self._rows, self._prefix.reset()
        for seq in rows.open():
            row, seq._handle = seq._row, None
            self._pool.allocator.share(rows.blocks(row, 0, int(rows.shared[row])))
            self.relock(seq, self._prefix.match_prefix((), seq.namespace, record=False).handle)
            rows.shared[row], rows.published[row] = 0, NOTHING_MORE
            seq._left.clear()
        self._pool.allocator.release(forgotten)

    def relock(self, seq: CacheSequence, handle: PrefixHandle) -> None:
        """Hold another handle instead of the one before."""
        self._prefix.lock_handle(handle)
        if seq._handle is not None:
            self._prefix.lock_handle(seq._handle, unlock=True)
        seq._handle = handle

    def leave(self, seq: CacheSequence, keep: int) -> None:
        """Note that a sequence uses only its first ``keep`` blocks of those that it shares, and remember what it leaves behind."""
        rows, row = self._rows, seq._row
        shared = int(rows.shared[row])
        if keep >= shared:
            return
        if (self._publisher[rows.table[row, keep:shared]] == seq._serial).any():
            seq._left.append(seq._ids.view[: shared * rows.block_size].copy())
        rows.shared[row] = keep
        rows.published[row] = min(int(rows.published[row]), keep)

    def take_back(self, seq: CacheSequence, prefixes: list[npt.NDArray[Any]]) -> None:
        """Free what a sequence that is over has published of prefixes and nobody else uses."""
        for ids in prefixes:
            found = self._prefix.match_prefix(ids, seq.namespace, record=False)
            others = np.flatnonzero(self._publisher[found.blocks] != seq._serial)
            keep = int(others[-1]) + 1 if others.size else 0
            if keep < found.blocks.size:
                self._pool.allocator.release(self._prefix.discard_prefix(found.handle, keep))
