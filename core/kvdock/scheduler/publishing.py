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

from kvdock.prefix.interface import BlockIds, Namespace, PrefixHandle
from kvdock.scheduler.ids import TokenIds
from kvdock.scheduler.pool_blocks import PoolBlocks
from kvdock.scheduler.rows import Index, Owner, Rows

__all__ = ["NOTHING_MORE", "Publisher"]

NOTHING_MORE = int(np.iinfo(np.intp).max)
"""A number of published blocks that no sequence reaches."""


class Publisher:
    """Moves blocks from sequences into the prefix cache, and back to the free ones.

    Args:
        pool: the blocks and the prefix cache.
        rows: what is known of the sequences.
        ids: their token ids.
    """

    def __init__(self, pool: PoolBlocks, rows: Rows, ids: TokenIds) -> None:
        self._pool = pool
        self._prefix = pool.prefix
        self._rows = rows
        self._ids = ids
        self._publisher = np.zeros(pool.allocator.num_blocks, dtype=np.int64)  # serial numbers; of free blocks anything

    def publish(self, rows: Index, counts: Index, *, just_completed: npt.NDArray[np.bool_]) -> None:
        """Insert the first ``counts`` blocks of rows, more than were published, and let them go on with what is cached of them.

        Args:
            rows: the rows.
            counts: how many blocks of each.
            just_completed: which rows have just completed the last of these blocks, id by id.
        """
        done = self._append(rows, counts, just_completed)
        for row, count in zip(rows[~done].tolist(), counts[~done].tolist(), strict=True):
            if count > self._rows.published[row]:  # one before it may have published for it, as for a fork
                self._insert(self._rows.sequence(row), count)

    def _append(self, rows: Index, counts: Index, just_completed: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Publish where one block is new and nobody else has it, all such rows in one call; return where that was done.

        This is what a step of decoding does, and takes a quarter of the time of `_insert` for each.
        """
        r, done = self._rows, np.zeros(rows.size, dtype=np.bool_)
        shared = r.shared[rows]
        blocks = r.table[rows, shared]
        # One new block, right behind what is locked, that no fork holds: nothing has to be matched, and no fork to be told.
        is_alone = just_completed & (counts - shared == 1) & (shared == r.locked[rows]) & (self._pool.allocator.holders(blocks) == 1)
        places = np.flatnonzero(is_alone)
        if places.size:
            chosen = rows[places]
            handles = [r.handle(row) for row in chosen.tolist()]
            tokens, priorities = self._ids.last_blocks(chosen), r.priority[chosen].tolist()
            done[places] = self._pool.change(self._prefix.append_blocks, handles, tokens, blocks[places], priorities)
            grown = rows[done]
            r.shared[grown] += 1
            r.published[grown] = r.locked[grown] = r.shared[grown]
            self._publisher[blocks[done]] = r.serial[grown]
            self._pool.stored(blocks[done])
            if self._pool.tiers is not None:
                self._note_appended(grown, tokens[done[places]])
        return done

    def _insert(self, seq: Owner, count: int) -> None:
        rows, row, size = self._rows, seq._row, self._rows.block_size
        shared, handle = int(rows.shared[row]), rows.handle(row)
        if rows.locked[row] != shared:  # it was cut, and has more locked than it uses
            handle = self._prefix.match_prefix(self._ids.get(row, 0, shared * size), seq.namespace, record=False).handle
        own = rows.table[row, shared:count].copy()
        ids = self._ids.get(row, shared * size, count * size)
        insert, priority = self._prefix.insert_prefix, int(rows.priority[row])
        result = self._pool.change(insert, ids, own, seq.namespace, behind=handle, priority=priority)
        known, stored = max(result.cached_len // size - shared, 0), max(result.handle.cached_len // size - shared, 0)
        fresh = own[known:stored]
        self._publisher[fresh.astype(np.intp)] = seq._serial  # indices of another width take twice the time
        self._pool.stored(fresh)
        if self._pool.tiers is not None:
            before = result.blocks[known - 1] if known else rows.table[row, shared - 1] if shared else None
            # All of them as they are, mostly: an array of its own is kept without a copy.
            self._note(seq.namespace, before, ids if fresh.size == own.size else ids[known * size : stored * size], fresh, priority)
            if priority or self._pool.tiers.index.has_priorities:  # what is before it is worth as much
                self._pool.tiers.index.raise_priority(np.concatenate((rows.table[row, :shared], result.blocks)), priority)
        self.relock(seq, result.handle)
        rows.shared[row], rows.published[row] = shared + stored, count
        if known:
            rows.table[row, shared : shared + known] = result.blocks[:known]
            rows.touch(np.array([row]))
            self._pool.replace(own[:known], result.blocks[:known])
            self._pool.settle(np.array([row]))
        if stored and self._pool.allocator.holders(own[:stored]).max() > 1:
            self._share_with_forks(seq, own[:stored])
        # Not before: the number of holders above, by which forks are noticed, still counts this sequence.
        self._pool.allocator.release(own[:known])

    def _note(self, namespace: Namespace, before: Any, ids: npt.NDArray[Any], blocks: BlockIds, priority: int) -> None:
        """Note for tiers what cached blocks hold, behind another or at the beginning of a prefix."""
        if self._pool.tiers is not None and blocks.size:
            self._pool.tiers.index.add(namespace, None if before is None else int(before), ids, blocks, priority)

    def _note_appended(self, rows: Index, tokens: npt.NDArray[Any]) -> None:
        """Note for tiers the last shared block of each of rows."""
        r = self._rows
        for row, ids in zip(rows.tolist(), tokens, strict=True):
            at = int(r.shared[row]) - 1
            before = r.table[row, at - 1] if at else None
            self._note(r.sequence(row).namespace, before, ids, r.table[row, at : at + 1], int(r.priority[row]))

    def adopt(self, handle: PrefixHandle, namespace: Namespace, ids: npt.NDArray[Any], blocks: BlockIds, priority: int) -> PrefixHandle:
        """Store blocks that came back from a tier, behind a locked handle, for nobody; return the handle of their end."""
        insert = self._prefix.insert_prefix
        result = self._pool.change(insert, ids, blocks, namespace, behind=handle, priority=priority)
        self._publisher[blocks.astype(np.intp)] = 0  # no sequence's
        return result.handle

    def _share_with_forks(self, seq: Owner, own: BlockIds) -> None:
        """Let forks have through the cache what is cached now and was their own too: the last shared blocks of ``seq``, once ``own``.

        A fork that has a block at the same place as the cache has the same tokens before it, and in it as far as it goes,
        since a block is copied before it is written; so it can go on with the cached ones before it too, where it had
        duplicates.
        """
        rows, stop = self._rows, int(self._rows.shared[seq._row])
        cached = rows.table[seq._row, :stop].copy()
        # From the last block back: a fork that shares a later one is moved once, with all the blocks before it.
        for index in range(stop - 1, stop - own.size - 1, -1):
            equal = (rows.table[:, index] == own[index - stop]) & (rows.num_blocks > index) & (rows.shared <= index)
            for row in np.flatnonzero(equal).tolist():
                self._adopt(rows.sequence(row), self._ids.get(seq._row, 0, (index + 1) * rows.block_size), cached[: index + 1])

    def _adopt(self, seq: Owner, ids: npt.NDArray[Any], cached: BlockIds) -> None:
        """Let a sequence go on with cached blocks in the place of its own first ones."""
        rows, row = self._rows, seq._row
        self.relock(seq, self._prefix.match_prefix(ids, seq.namespace, record=False).handle)
        if (rows.table[row, : cached.size] != cached).any():
            rows.touch(np.array([row]))
        shared = int(rows.shared[row])
        own = rows.table[row, shared : cached.size].copy()
        rows.table[row, : cached.size] = cached
        rows.shared[row] = cached.size
        rows.published[row] = max(rows.published[row], cached.size)
        self._pool.replace(own, cached[shared:])
        self._pool.settle(np.array([row]))
        self._pool.allocator.release(own)

    def take_over(self, seq: Owner, handle: PrefixHandle, blocks: BlockIds) -> None:
        """Let a sequence whose prompt was begun in chunks go on with what others have published of it, and lock that."""
        rows, row = self._rows, seq._row
        self.relock(seq, handle)
        own = rows.blocks(row)[rows.shared[row] :].copy()
        rows.cut(row, 0)
        rows.reserve_width(blocks.size)
        rows.table[row, : blocks.size] = blocks
        rows.num_blocks[row] = rows.shared[row] = rows.published[row] = blocks.size
        rows.num_tokens[row] = rows.computed[row] = seq._cached_len = handle.cached_len
        rows.touch(np.array([row]))
        self._pool.states.restart(row)
        self._pool.settle(np.array([row]))
        self._pool.allocator.release(own)

    def forget(self) -> None:
        """Empty the prefix cache. What open sequences had of it they hold themselves now, and publish no more."""
        rows, forgotten = self._rows, self._pool.change(self._prefix.reset)
        for seq in rows.open():
            row, handle = seq._row, self._prefix.match_prefix((), seq.namespace, record=False).handle
            self._prefix.lock_handle(handle)
            self._pool.allocator.share(rows.blocks(row, 0, int(rows.shared[row])))
            rows.shared[row], rows.locked[row], rows.published[row] = 0, 0, NOTHING_MORE
            seq._handle = handle
            seq._left.clear()
        self._pool.give_back(forgotten)
        if self._pool.tiers is not None:
            self._pool.tiers.clear()

    def relock(self, seq: Owner, handle: PrefixHandle) -> None:
        """Hold another handle instead of the one before."""
        # Lock before unlock: both handles may protect the same blocks, which must not become evictable in between.
        self._prefix.lock_handle(handle)
        self._prefix.lock_handle(self._rows.handle(seq._row), unlock=True)
        seq._handle, self._rows.locked[seq._row] = handle, handle.cached_len // self._rows.block_size

    def leave(self, seq: Owner, keep: int) -> None:
        """Note that a sequence uses only its first ``keep`` blocks of those that it shares."""
        rows, row = self._rows, seq._row
        if keep < rows.shared[row]:
            rows.shared[row] = keep
            rows.published[row] = min(int(rows.published[row]), keep)

    def remember(self, seq: Owner, n: int) -> None:
        """Note what a sequence has published and is about to be cut within, while its token ids are known: see `take_back`."""
        rows, row, size = self._rows, seq._row, self._rows.block_size
        shared = int(rows.shared[row])
        is_whole = n < shared * size <= rows.num_tokens[row]  # else nothing is cut, or it was before
        if is_whole and (self._publisher[rows.table[row, n // size : shared]] == seq._serial).any():
            seq._left.append(self.shared_ids(row))

    def shared_ids(self, row: int) -> npt.NDArray[Any]:
        """Return the token ids of the blocks that a row shares, as far as it knows them, in an array of its own.

        A fork that was made before its ids were known shares what another has published with them.
        """
        rows, size = self._rows, self._rows.block_size
        return self._ids.get(row, 0, min(int(rows.shared[row]), int(rows.num_known[row]) // size) * size).copy()

    def lock_less(self, seq: Owner, keep: int) -> None:
        """Hold the first ``keep`` blocks only. Where a sequence does not know their ids it goes on to hold more."""
        tokens = keep * self._rows.block_size
        if tokens <= self._rows.num_known[seq._row]:
            self.relock(seq, self._prefix.match_prefix(self._ids.get(seq._row, 0, tokens), seq.namespace, record=False).handle)

    def take_back(self, seq: Owner, prefixes: list[npt.NDArray[Any]]) -> None:
        """Free what a sequence that is over has published of prefixes and nobody else uses."""
        for ids in prefixes:
            found = self._prefix.match_prefix(ids, seq.namespace, record=False)
            # A prefix can only be discarded from its end, so all stays up to the last block that somebody else published.
            others = np.flatnonzero(self._publisher[found.blocks] != seq._serial)
            keep = int(others[-1]) + 1 if others.size else 0
            if keep < found.blocks.size:
                self._pool.give_back(self._pool.change(self._prefix.discard_prefix, found.handle, keep))
