"""The blocks of a batch of sequences.

::

    tokens of a row:   0 .................... length
    blocks of a row:   | 7 | 3 | 12 | 5  |             ceil(length / block_size) ids; the last may be partly filled
    slot of token t:   blocks[t // block_size] * block_size + t % block_size
"""

from __future__ import annotations

import weakref

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.errors import ArgumentTypeError, ArgumentValueError, IndexRangeError
from kvdock.scheduler.block_allocator import BlockAllocator, BlockIds
from kvdock.spec import check_int

__all__ = ["BlockTable"]


@attrs.define
class _Rows:
    """What outlives a table until its blocks are released: ids with room to grow, ``used`` of them per row."""

    room: BlockIds
    used: int = 0

    @property
    def ids(self) -> BlockIds:
        """The part in use, ``[batch_size, used]``; a view."""
        return self.room[:, : self.used]


def _release_rows(allocator: BlockAllocator, rows: _Rows) -> None:
    """Give back the blocks of a table that was garbage collected."""
    allocator.release_later(rows.ids.ravel())


class BlockTable:
    """Block ids of ``batch_size`` sequences that have one common length.

    Blocks may be shared by rows and by tables; a shared block is copied before it is written. The table says which copies
    are due, and the caller makes them. A table that is garbage collected gives its blocks back.

    A table belongs to one thread, that of its allocator.

    Args:
        allocator: where blocks come from.
        block_size: tokens in a block, at least 1.
        batch_size: number of rows, at least 1.
    """

    def __init__(self, allocator: BlockAllocator, block_size: int, batch_size: int = 1) -> None:
        self._allocator = allocator
        self._block_size = check_int("BlockTable: block_size", block_size, 1)
        rows = check_int("BlockTable: batch_size", batch_size, 1)
        self._length = 0
        self._rows = _Rows(np.empty((rows, 4), dtype=np.int64))
        finalizer = weakref.finalize(self, _release_rows, allocator, self._rows)
        finalizer.atexit = False

    def __repr__(self) -> str:
        return f"BlockTable(batch_size={self.batch_size}, length={self.length}, block_size={self.block_size})"

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._block_size

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return len(self._rows.room)

    @property
    def length(self) -> int:
        """Tokens that each row has room for."""
        return self._length

    @property
    def block_ids(self) -> BlockIds:
        """The ids, int64 ``[batch_size, ceil(length / block_size)]``; a view that may not be written."""
        view = self._rows.ids.view()
        view.flags.writeable = False
        return view

    @property
    def num_blocks(self) -> int:
        """Distinct blocks in the table."""
        return int(np.unique(self._rows.ids).size)

    def grow(self, n: int) -> BlockIds:
        """Make room for ``n`` more tokens in each row, in all rows or in none.

        Returns:
            int64 ``[N, 2]``: pairs (source, destination) of blocks to copy before the new tokens are written. The table
            holds the destinations already. A source that nobody else holds any more may be handed out by the next
            `BlockAllocator.allocate`, so copy at once.

        Raises:
            OutOfBlocksError: the pool has too few free blocks. Nothing was changed.
        """
        length = self._length + check_int("BlockTable.grow: n", n, 0)
        shared = self._rows_to_copy() if n else np.empty(0, dtype=np.intp)
        more = self._blocks_for(length) - self._rows.used
        fresh = self._allocator.allocate(shared.size + more * self.batch_size)
        pairs = self._replace_last(shared, fresh[: shared.size])
        self._append(fresh[shared.size :].reshape(self.batch_size, more))
        self._length = length
        return pairs

    def adopt(self, blocks: npt.ArrayLike) -> None:
        """Begin with whole blocks that others hold too; the table becomes one more holder of each, as often as it is there.

        Args:
            blocks: ids of blocks in use, integers ``[rows, n]``; the table has so many rows then, of ``n * block_size`` tokens.

        Raises:
            ArgumentValueError: the table is not empty, not two dimensions, no rows, or a free block. Nothing was changed.
            IndexRangeError: an id is outside the pool. Nothing was changed.
        """
        ids = np.array(blocks)
        if self._length or ids.ndim != 2 or not len(ids):
            raise ArgumentValueError(
                "BlockTable.adopt",
                expected="an empty table, and ids of [rows, blocks], at least one row",
                got=f"{self._length} tokens, and ids of shape {ids.shape}",
                fix="clear() the table first, and pass equally many blocks for each row",
            )
        self._allocator.share(ids)
        self._rows.room, self._rows.used = ids.astype(np.int64, copy=False), ids.shape[1]
        self._length = ids.shape[1] * self._block_size

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens of each row, and release the blocks behind them.

        Raises:
            IndexRangeError: the rows are shorter than that. Nothing was changed.
        """
        check_int("BlockTable.truncate: length", length, 0)
        if length > self._length:
            raise IndexRangeError("BlockTable.truncate: length", expected=f"at most the {self._length} tokens there are", got=length)
        keep = self._blocks_for(length)
        self._allocator.release(self._rows.ids[:, keep:])
        self._rows.used, self._length = keep, length

    def select(self, rows: npt.ArrayLike) -> None:
        """Make row ``rows[i]`` the new row i. Rows may be repeated, left out and reordered; repeated rows share blocks.

        Args:
            rows: integers ``[new batch size]``, each from 0 to ``batch_size - 1``; at least one.

        Raises:
            IndexRangeError: a row that does not exist. Nothing was changed.
            ArgumentTypeError: not integers.
            ArgumentValueError: no rows, or more than one dimension.
        """
        chosen = self._checked_rows(rows)
        times = np.bincount(chosen, minlength=self.batch_size)
        ids = self._rows.ids
        self._allocator.share(ids[np.repeat(np.arange(self.batch_size), np.maximum(times - 1, 0))])
        self._allocator.release(ids[times == 0])
        self._rows.room = self._rows.room[chosen]

    def fork(self) -> BlockTable:
        """Return a table with the same tokens in the same blocks, shared until one of the two writes."""
        self._allocator.share(self._rows.ids)
        other = BlockTable(self._allocator, self._block_size, self.batch_size)
        other._rows.room, other._rows.used = self._rows.room.copy(), self._rows.used
        other._length = self._length
        return other

    def clear(self, batch_size: int | None = None) -> None:
        """Release all blocks; the rows are empty then. ``batch_size`` also changes their number."""
        rows = self.batch_size if batch_size is None else check_int("BlockTable.clear: batch_size", batch_size, 1)
        self.truncate(0)
        if rows != self.batch_size:
            self._rows.room = np.empty((rows, 4), dtype=np.int64)

    def slot_mapping(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the slots of tokens ``start`` to ``stop - 1``, int64 ``[batch_size, stop - start]``.

        Raises:
            IndexRangeError: not ``0 <= start <= stop <= length``.
        """
        if not 0 <= start <= stop <= self._length:
            raise IndexRangeError(
                "BlockTable.slot_mapping", expected=f"0 <= start <= stop <= {self._length}", got=f"start={start}, stop={stop}"
            )
        blocks, offsets = np.divmod(np.arange(start, stop), self._block_size)
        slots: npt.NDArray[np.int64] = self._rows.ids[:, blocks] * self._block_size + offsets
        return slots

    def _blocks_for(self, length: int) -> int:
        """Return the number of blocks that a row of ``length`` tokens needs."""
        return -(-length // self._block_size)

    def _rows_to_copy(self) -> npt.NDArray[np.intp]:
        """Return the rows whose last block is partly filled and held by others too.

        Where all holders are rows of this table, the first of them keeps the block.
        """
        if self._length % self._block_size == 0:
            return np.empty(0, dtype=np.intp)
        last = self._rows.ids[:, -1]
        holders = self._allocator.ref_counts(last)
        shared = holders > 1
        if shared.any():
            _, first, rows = np.unique(last, return_index=True, return_counts=True)
            shared[first[holders[first] == rows]] = False
        return np.flatnonzero(shared)

    def _replace_last(self, rows: npt.NDArray[np.intp], fresh: BlockIds) -> BlockIds:
        """Put ``fresh`` in the place of the last blocks of ``rows``; return the pairs (old, new)."""
        if not rows.size:
            return np.empty((0, 2), dtype=np.int64)
        pairs = np.stack((self._rows.ids[rows, -1], fresh), axis=1)
        self._rows.ids[rows, -1] = fresh
        self._allocator.release(pairs[:, 0])
        return pairs

    def _append(self, fresh: BlockIds) -> None:
        """Append ``fresh``, ``[batch_size, more]``, to the rows."""
        used = self._rows.used + fresh.shape[1]
        if used > self._rows.room.shape[1]:
            room = np.empty((self.batch_size, 2 * used), dtype=np.int64)
            room[:, : self._rows.used] = self._rows.ids
            self._rows.room = room
        self._rows.room[:, self._rows.used : used] = fresh
        self._rows.used = used

    def _checked_rows(self, rows: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return row numbers as an int64 array, or raise."""
        chosen = np.asarray(rows)
        if chosen.ndim != 1 or not chosen.size:
            raise ArgumentValueError("BlockTable.select: rows", expected="one dimension, at least one row", got=f"shape {chosen.shape}")
        if chosen.dtype.kind not in "iu":
            raise ArgumentTypeError("BlockTable.select: rows", expected="integers", got=chosen.dtype)
        if chosen.min() < 0 or chosen.max() >= self.batch_size:
            raise IndexRangeError("BlockTable.select: rows", expected=f"rows from 0 to {self.batch_size - 1}", got=chosen.tolist())
        return chosen.astype(np.int64, copy=False)
