"""The step of a batch: room for what comes, and what became of it, for all sequences in a few operations of numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.errors import ArgumentValueError, IndexRangeError, OutOfBlocksError
from kvdock.prefix.inputs import count_of
from kvdock.prefix.interface import PrefixMatch
from kvdock.scheduler.batches import check_slots, counts_of
from kvdock.scheduler.ids import TokenIds
from kvdock.scheduler.pool_blocks import PoolBlocks
from kvdock.scheduler.publishing import Publisher
from kvdock.scheduler.rows import Index, Rows, steps

__all__ = ["Steps"]

_NO_ROWS: Index = np.empty(0, dtype=np.intp)

_NO_PAIRS: npt.NDArray[np.int64] = np.empty((0, 2), dtype=np.int64)


class Steps:
    """What `CacheManager.extend` and `CacheManager.commit` do.

    Args:
        pool: the blocks.
        rows: what is known of the sequences.
        ids: their token ids.
        publisher: makes computed blocks shared.
    """

    def __init__(self, pool: PoolBlocks, rows: Rows, ids: TokenIds, publisher: Publisher) -> None:
        self._pool = pool
        self._rows = rows
        self._ids = ids
        self._publisher = publisher

    def extend_one(self, rows: Index, n: Any, slots: Any, *, match: bool) -> tuple[Index, npt.NDArray[np.int64]]:
        """Make room in one row; return its slots and the pairs to copy."""
        if slots is not None:
            raise ArgumentValueError(
                "CacheManager.extend: slots", expected="None for one sequence", got="an array", fix="pass a list of sequences"
            )
        counts = counts_of("CacheManager.extend: n", count_of("CacheManager.extend: n", n), 1)
        starts, pairs = self._extend(rows, counts, match=match)
        return self._rows.slots(rows, starts, self._rows.num_tokens[rows] - starts), pairs

    def extend(self, rows: Index, n: Any, slots: Any, *, match: bool) -> npt.NDArray[np.int64]:
        """Make room in each row, and write the slots; return the pairs to copy."""
        counts = counts_of("CacheManager.extend: n", n, rows.size)
        if slots is not None:
            check_slots(slots, int(counts.sum()))
        starts, pairs = self._extend(rows, counts, match=match)
        if slots is not None:
            made = self._rows.num_tokens[rows] - starts
            if (made != counts).any():
                slots[:] = -1
                slots[(counts.cumsum() - counts).repeat(made) + steps(made)] = self._rows.slots(rows, starts, made)
            else:
                slots[:] = self._rows.slots(rows, starts, counts)
        return pairs

    def commit(self, rows: Index, ids: npt.NDArray[Any], counts: Index, computed: npt.NDArray[Any]) -> None:
        """Take new ids and what is computed; publish whole blocks."""
        r = self._rows
        if computed.size != rows.size:
            raise ArgumentValueError("CacheManager.commit: computed", expected=f"{rows.size}, one for each sequence", got=computed.size)
        before, known = r.computed[rows], r.num_known[rows]
        most = np.minimum(known + counts, r.num_tokens[rows])
        wrong = np.flatnonzero((computed < before) | (computed > most))
        # All rows are checked before any is changed: a call that raises has changed nothing.
        if wrong.size:
            raise self._cannot_be_computed(rows, int(wrong[0]), known + counts, computed)
        # A step of decoding: one operation for all rows, where anything else needs a loop over them.
        is_one_each = ids.size == rows.size and bool((counts == 1).all())
        self._ids.append(rows, ids, counts, is_one_each=is_one_each)
        r.computed[rows] = computed
        if self._pool.prefix.can_store:
            whole = computed // r.block_size
            due = np.flatnonzero(whole > r.published[rows])
            if due.size:
                self._publisher.publish(
                    rows[due], whole[due], just_completed=is_one_each & (r.num_known[rows[due]] == whole[due] * r.block_size)
                )
        # Behind publishing: what is let go stays cached, where it is.
        self._pool.settle(rows)
        self._pool.checkpoint(rows)

    def _extend(self, rows: Index, counts: Index, *, match: bool) -> tuple[Index, npt.NDArray[np.int64]]:
        """Make room for ``counts`` more tokens in each row; return where these start, and the pairs to copy."""
        r = self._rows
        # `num_chunked` is a plain number, and 0 in decoding: it spares looking at the rows in every step.
        if match and r.num_chunked and r.prompt_len[rows].any():
            found = self._found_since(rows)
            if found:
                return self._extend_behind(rows, counts, found)
        starts = r.num_tokens[rows]
        return starts, self._grow(rows, starts, self._stops(rows, starts, starts + counts))

    def _stops(self, rows: Index, starts: Index, stops: Index) -> Index:
        """Return where room ends, for rows that begin and are asked for so much."""
        return self._pool.states.chunk_ends(starts, stops, self._rows.prompt_len[rows]) if self._rows.num_chunked else stops

    def _grow(self, rows: Index, starts: Index, stops: Index) -> npt.NDArray[np.int64]:
        """Make room up to ``stops``; return the pairs to copy."""
        r = self._rows
        need = r.blocks_for(stops) - (have := r.num_blocks[rows])
        copied = self._to_copy(rows, starts, stops)
        asked, total = need, int(need.sum()) + copied.size
        if copied.size:
            asked = need.copy()
            asked[copied] += 1
        # A row uses up its own promise first; only what goes beyond that competes with the others.
        used = np.minimum(asked, r.promised[rows]) if self._pool.promised and total else 0
        promised = int(np.sum(used))
        states = self._pool.states_due(rows, total - promised)
        if total or states:
            # One request for the whole batch, before any row is changed: it is refused for all rows or for none.
            fresh = self._pool.take(total, "CacheManager.extend", promised=promised, states=states)
            r.promised[rows] -= used
            pairs = self._replace(rows[copied], starts[copied] // r.block_size, fresh[: copied.size]) if copied.size else _NO_PAIRS
            self._append_blocks(rows, have, need, fresh[copied.size :])
            r.touch(rows[np.flatnonzero(asked)], has_grown=True)
            if states:
                pairs = np.concatenate((pairs, self._pool.states.extend(rows)))
            if (again := rows[copied]).size:
                r.touch(again)
                self._pool.settle(again)  # what others hold may go; new blocks are settled when they are computed
        else:
            pairs = _NO_PAIRS
        if (finest := self._pool.finest) < r.block_size:  # blocks that are held already come into use, of groups with smaller ones
            r.touch(rows[-(-starts // finest) < -(-stops // finest)], has_grown=True)
        r.num_tokens[rows] = stops
        # A prompt that has all of its room is not matched again.
        if r.num_chunked:
            for row in rows[(r.prompt_len[rows] > 0) & (stops >= r.prompt_len[rows])].tolist():
                r.end_chunks(row)
        return pairs

    def _to_copy(self, rows: Index, starts: Index, stops: Index) -> Index:
        """Return which of the rows write next into a block that others hold too.

        Where all its holders are among them, the first keeps it.
        """
        r, allocator = self._rows, self._pool.allocator
        if not allocator.num_extra and not (r.shared[rows] * r.block_size > starts).any():
            return _NO_ROWS  # nobody forked, and nobody was cut within what is cached: mostly
        within = np.flatnonzero((starts % r.block_size != 0) & (stops > starts))
        index = starts[within] // r.block_size
        blocks = r.table[rows[within], index]
        cached = index < r.shared[rows[within]]
        holders = allocator.holders(blocks)
        shared = cached | (holders > 1)
        if shared.any():
            _, first, times = np.unique(blocks, return_index=True, return_counts=True)
            # All holders write in this step: the others get copies, so the first may keep the block. A cached one is kept by nobody.
            shared[first[(holders[first] == times) & ~cached[first]]] = False
        return within[shared]

    def _replace(self, rows: Index, index: Index, fresh: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Put blocks of their own in the place of shared ones, the last of each row; return the pairs (old, new)."""
        r = self._rows
        old = r.table[rows, index]
        own = index >= r.shared[rows]
        # Only own blocks have a holder to release: the others belong to the prefix cache.
        self._pool.allocator.release(old[own])
        for row, keep in zip(rows[~own].tolist(), index[~own].tolist(), strict=True):
            seq = r.sequence(row)
            self._publisher.leave(seq, keep)  # the handle stays, and with it what is copied from, until the next commit
        r.table[rows, index] = fresh
        return self._pool.copies(np.stack((old, fresh), axis=1).astype(np.int64))

    def _append_blocks(self, rows: Index, have: Index, need: Index, fresh: npt.NDArray[np.int32]) -> None:
        r = self._rows
        grown = np.flatnonzero(need)
        if not grown.size:
            return
        rows, have, need = rows[grown], have[grown], need[grown]
        r.reserve_width(int((have + need).max()))
        if fresh.size == grown.size:
            r.table[rows, have] = fresh
        else:
            r.table[rows.repeat(need), have.repeat(need) + steps(need)] = fresh
        r.num_blocks[rows] += need

    def _found_since(self, rows: Index) -> dict[int, PrefixMatch]:
        """Return, by place in ``rows``, what has been published behind the room of prompts begun in chunks that is computed."""
        r = self._rows
        found: dict[int, PrefixMatch] = {}
        for place in np.flatnonzero((r.prompt_len[rows] > 0) & (r.computed[rows] == r.num_tokens[rows])).tolist():
            row = int(rows[place])
            seq = r.sequence(row)
            # Without the last token, as in `Planner.look_up`: at least one is left to compute.
            most = (int(r.prompt_len[row]) - 1) // r.block_size * r.block_size
            match = self._pool.match(self._ids.get(row, 0, most), seq.namespace)
            if match.handle.cached_len > r.num_tokens[row]:
                found[place] = match
        return found

    def _extend_behind(self, rows: Index, counts: Index, found: dict[int, PrefixMatch]) -> tuple[Index, npt.NDArray[np.int64]]:
        """Extend rows of which others have published more; as if they had not, where there is no room to lock that."""
        r, pool = self._rows, self._pool
        starts, have = r.num_tokens[rows], r.num_blocks[rows]
        stops, locked = starts + counts, dict[int, Any]()
        for place, match in found.items():
            # Locked before room is counted: what was found must not be evicted to make that room.
            pool.prefix.lock_handle(match.handle)
            locked[place] = pool.hold(match.blocks)
            most = max(int(r.prompt_len[rows[place]]), int(stops[place]))
            starts[place], have[place] = match.handle.cached_len, match.blocks.size
            stops[place] = min(int(starts[place] + counts[place]), most)
        stops = self._stops(rows, starts, stops)
        try:
            asked = r.blocks_for(stops) - have
            asked[self._to_copy(rows, r.num_tokens[rows], stops)] += 1
            needed = int((asked - np.minimum(asked, r.promised[rows])).sum())
            pool.check(needed, "CacheManager.extend", states=len(found) + pool.states.owed(rows).size)
        except OutOfBlocksError:
            # The locks themselves may have taken the last evictable blocks: go on as if nothing had been found.
            old = r.num_tokens[rows]
            self._unlock(found, locked)
            return old, self._grow(rows, old, self._stops(rows, old, old + counts))
        for place, match in found.items():
            seq = r.sequence(rows[place])
            # Recorded only here, where nothing can be refused any more.
            pool.prefix.record_match(match.handle, match.handle.cached_len)
            pool.use(match)
            self._publisher.take_over(seq, match.handle, match.blocks)
        pairs = self._grow(rows, starts, stops)
        self._unlock(found, locked)
        return starts, pairs

    def _unlock(self, found: dict[int, PrefixMatch], locked: dict[int, Any]) -> None:
        for place, match in found.items():
            self._pool.unlock(match.handle, locked[place])

    def _cannot_be_computed(self, rows: Index, place: int, known: Index, computed: npt.NDArray[Any]) -> IndexRangeError:
        r, row = self._rows, int(rows[place])
        which = "" if rows.size == 1 else f" of sequence {place}"
        return IndexRangeError(
            f"CacheManager.commit: computed{which}",
            expected=f"{r.computed[row]} (as before) to {min(known[place], r.num_tokens[row])} "
            f"(ids known: {known[place]}, room: {r.num_tokens[row]})",
            got=int(computed[place]),
            fix="count all tokens of the sequence, cached ones too; pass the ids of new ones",
        )
