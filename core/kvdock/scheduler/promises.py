"""Blocks that sequences were promised: room for tokens to come, whoever else asks."""

from __future__ import annotations

from kvdock.scheduler.pool_blocks import PoolBlocks
from kvdock.scheduler.rows import Rows

__all__ = ["Promises"]


class Promises:
    """Keeps ``promised`` of rows and of the pool alike.

    Args:
        pool: the blocks.
        rows: what is known of the sequences.
    """

    def __init__(self, pool: PoolBlocks, rows: Rows) -> None:
        self._pool = pool
        self._rows = rows

    def add(self, row: int, blocks: int) -> None:
        """Promise blocks to a row, or less of them."""
        self._rows.promised[row] += blocks
        self._pool.promised += blocks

    def before_fork(self, row: int, blocks: int) -> None:
        """Promise a row the copy of its last block that it needs once its first ``blocks`` blocks are shared; see to a state's room.

        Raises:
            OutOfBlocksError: it has a promise, and there is no block for the copy; or none for the fork's states.
        """
        rows = self._rows
        room = int(rows.num_tokens[row])
        # Only a promise makes the copy due now: without one, `extend` asks for the block when it needs it, and may be refused.
        copies = rows.limit[row] > room and blocks == rows.num_blocks[row] and room % rows.block_size and not self._must_copy(row)
        self._pool.check(int(bool(copies)), "CacheManager.fork", states=1)
        if copies:
            self.add(row, 1)
        self._pool.take(0, "CacheManager.fork", states=1)

    def renew(self, row: int) -> None:
        """Promise a row again what it gave up when it was cut, as far as blocks became free."""
        rows = self._rows
        lacking = rows.blocks_for(int(rows.limit[row])) - int(rows.num_blocks[row]) + self._must_copy(row) - int(rows.promised[row])
        if lacking > 0:
            self.add(row, min(lacking, max(self._pool.available, 0)))

    def _must_copy(self, row: int) -> bool:
        """Whether the last block of a row must be copied before the next token is written."""
        rows = self._rows
        index, offset = divmod(int(rows.num_tokens[row]), rows.block_size)
        if not offset:
            return False
        return bool(index < rows.shared[row] or self._pool.allocator.ref_counts(rows.table[row, index : index + 1])[0] > 1)
