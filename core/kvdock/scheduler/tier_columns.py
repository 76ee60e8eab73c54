"""Which blocks of the pool a unit has that goes to a tier or comes back: one, or some of several layer groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.prefix.interface import BlockIds
from kvdock.scheduler.grouped_blocks import GroupedBlocks
from kvdock.scheduler.pool_blocks import PoolBlocks

__all__ = ["Columns", "UnitColumns", "columns_of"]

_NONE = -1


class Columns:
    """Of a pool with one layer group that keeps all tokens, a unit is a block.

    Args:
        pool: the blocks.
    """

    def __init__(self, pool: PoolBlocks) -> None:
        self._pool = pool

    def reach(self, units: BlockIds, there: npt.NDArray[np.bool_]) -> int:
        """Return behind how many units a sequence could go on: cached ones, and others behind them of which these blocks are there."""
        lacking = np.flatnonzero(~there[:, 0])
        return units.size + (int(lacking[0]) if lacking.size else len(there))

    def hold(self, units: BlockIds, count: int) -> Any:
        """Keep what is needed of cached units to go on behind ``count`` units, beside their lock; `PoolBlocks.unhold` ends it."""

    def places(self, units: BlockIds) -> BlockIds:
        """Return the blocks of units that were just taken, int32 ``[units, columns]``."""
        return units[:, None]

    def keep(self, units: BlockIds, done: npt.NDArray[np.bool_]) -> None:
        """Note that units are cached from now on, which have these blocks and no others."""

    def give_back(self, units: BlockIds) -> None:
        """Release units that were taken."""
        if units.size:
            self._pool.allocator.release(units)


class UnitColumns(Columns):
    """Of several layer groups, or one that lets tokens go.

    What a group has let go in the pool does not come back to units that are there still: only what is behind them is loaded.

    Args:
        pool: the blocks.
    """

    def __init__(self, pool: GroupedBlocks) -> None:
        super().__init__(pool)
        self._units, self._needs = pool.units, pool.needs
        self._states = np.empty(0, dtype=np.int32)  # blocks for the checkpoint of the last unit that was taken

    def reach(self, units: BlockIds, there: npt.NDArray[np.bool_]) -> int:
        """Return behind how many units all groups have what they need."""
        lasting = there[:, ~self._units.passing].all(axis=1)
        there = there[: int(np.logical_and.accumulate(lasting).sum())]
        every = np.concatenate((self._units.table[units] != _NONE, there))
        can = self._needs.could_go_on(every, np.arange(1, len(every) + 1) * self._units.num_tokens)
        can &= every[:, self._units.states].all(axis=1)
        return int((np.flatnonzero(can) + 1).max(initial=0))

    def hold(self, units: BlockIds, count: int) -> Any:
        """Keep what the groups need of cached units; of their checkpoints none."""
        places = self._needs.of_first(units, count)
        self._units.hold(places)
        return places

    def places(self, units: BlockIds) -> BlockIds:
        """Return the blocks of units; the last one's are also those of a checkpoint."""
        found = self._units.table[units]
        if self._units.states.size:
            self._states = self._units.blocks.allocate(self._units.states.size)
            found[-1, self._units.states] = self._states
        return found

    def keep(self, units: BlockIds, done: npt.NDArray[np.bool_]) -> None:
        """Note that units are cached; blocks that hold nothing are given back."""
        row, column = (~done & (self._units.table[units] != _NONE)).nonzero()
        self._units.give_up(units[row].astype(np.intp) * self._units.table.shape[1] + column)
        self._units.cache(units)
        if self._states.size and done[-1, self._units.states].all() and self._units.attach(int(units[-1]), self._states):
            self._states = self._states[:0]

    def give_back(self, units: BlockIds) -> None:
        """Release units, and the checkpoint that no unit has got."""
        super().give_back(units)
        self._units.blocks.release(self._states)
        self._states = self._states[:0]


def columns_of(pool: PoolBlocks) -> Columns:
    """Return which blocks units of a pool have."""
    return UnitColumns(pool) if isinstance(pool, GroupedBlocks) else Columns(pool)
