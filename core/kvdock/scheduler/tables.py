"""The block table of each layer group: what sequences, exporters and batches read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np

from kvdock.errors import ArgumentValueError
from kvdock.prefix.interface import BlockIds
from kvdock.scheduler.passing import Passing
from kvdock.scheduler.rows import Index, Rows, positions_of
from kvdock.scheduler.states import States
from kvdock.scheduler.units import UnitBlocks

__all__ = ["GroupTable", "OnlyTable", "StateTable", "TokenTable", "tables_of"]


class GroupTable(ABC):
    """The blocks of rows in one layer group.

    Attributes:
        block_size: tokens in a block; 1 where a block holds a state.
        is_state: whether it does.
    """

    block_size: int
    is_state = False

    @abstractmethod
    def blocks(self, row: int) -> BlockIds:
        """Return the blocks of a row, an array of its own; 0 for what was let go."""

    def held(self, row: int) -> BlockIds:
        """Return the blocks of a row that are there for it."""
        return self.blocks(row)

    @abstractmethod
    def widths(self, rows: Index) -> Index:
        """Return how many blocks each row has, those that were let go included."""

    def slots(self, rows: Index, starts: Index, counts: Index) -> Index:
        """Return the slots of ``counts`` tokens of each row from ``starts`` on, one row behind the other; -1 for what was let go."""
        positions = positions_of(starts, counts)
        return self.slots_at(rows if positions is starts else rows.repeat(counts), positions)

    @abstractmethod
    def slots_at(self, rows: Index, positions: Index) -> Index:
        """Return the slot of one token of each row; a row may be there more than once."""

    @abstractmethod
    def dense(self, rows: Index, columns: int) -> BlockIds:
        """Return the first blocks of rows, one line each, at most so many columns; 0 behind the blocks of a row, and for what is gone."""

    @abstractmethod
    def at(self, rows: Index, columns: Index) -> BlockIds:
        """Return one block of each row, at a place in its table; 0 for what is gone."""


class OnlyTable(GroupTable):
    """The table of a manager of one group that keeps all tokens.

    Args:
        rows: what is known of the sequences.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.block_size = rows.block_size

    def blocks(self, row: int) -> BlockIds:
        """Return the blocks of a row."""
        return self._rows.blocks(row).copy()

    def widths(self, rows: Index) -> Index:
        """Return how many blocks each row has."""
        return self._rows.num_blocks[rows]

    def slots_at(self, rows: Index, positions: Index) -> Index:
        """Return slots; see `Rows.slots_at`."""
        return self._rows.slots_at(rows, positions)

    def dense(self, rows: Index, columns: int) -> BlockIds:
        """Return the first blocks of rows, and 0 behind them."""
        return self._rows.table[rows, :columns]

    def at(self, rows: Index, columns: Index) -> BlockIds:
        """Return one block of each row."""
        return self._rows.table[rows, columns]


class TokenTable(GroupTable):
    """The table of one of several groups, whose blocks are those of units.

    Args:
        units: which blocks units have.
        rows: which units rows have.
        group: the number of the group.
        passing: what the group lets go; None if nothing.
    """

    def __init__(self, units: UnitBlocks, rows: Rows, group: int, passing: Passing | None) -> None:
        self._units = units
        self._rows = rows
        self._start, self._width = units.starts[group], units.widths[group]
        self._passing = passing
        self.block_size = units.groups[group].block_size

    def blocks(self, row: int) -> BlockIds:
        """Return the blocks of a row."""
        count = -(-int(self._rows.num_tokens[row]) // self.block_size)
        found, needed = self._needed(row, count)
        kept = np.zeros_like(found)
        kept[needed] = found[needed]
        return kept

    def held(self, row: int) -> BlockIds:
        """Return the blocks that a row needs, and those at the end of its last unit that it has not come to."""
        found, needed = self._needed(row, int(self._rows.num_blocks[row]) * self._width)
        return found[needed]

    def _needed(self, row: int, count: int) -> tuple[BlockIds, Index]:
        """Return the first blocks of a row, and which it needs: what is let go may be there yet, as long as nobody wants its room."""
        units = self._rows.blocks(row)
        found = self._units.table[units, self._start : self._start + self._width].reshape(-1)[:count]
        if self._passing is None:
            return found, np.arange(count)
        return found, self._passing.needed(int(self._passing.first(self._rows.reach(row))), count)

    def widths(self, rows: Index) -> Index:
        """Return how many blocks each row has."""
        return -(-self._rows.num_tokens[rows] // self.block_size)

    def slots_at(self, rows: Index, positions: Index) -> Index:
        """Return slots of the group's blocks."""
        blocks = positions // self.block_size
        if self._width == 1:  # mostly; a column that is looked up by one number takes half the time of two
            found = self._units.table[:, self._start][self._rows.table[rows, blocks]]
        else:
            found = self._units.table[self._rows.table[rows, blocks // self._width], self._start + blocks % self._width]
        # As in `Rows.slots`; -1 where there is no block.
        slots: Index = (found - blocks) * self.block_size + positions
        if self._passing is not None and found.size and found.item(found.argmin()) < 0:  # in a quarter of the time of min()
            slots[found < 0] = -1
        return slots

    def dense(self, rows: Index, columns: int) -> BlockIds:
        """Return the first blocks of rows; 0 for what was let go."""
        units = self._rows.table[rows, : -(-columns // self._width)]
        if self._width == 1:  # mostly: at half the time
            found = self._units.table[units, self._start]
        else:
            found = self._units.table[units, self._start : self._start + self._width].reshape(rows.size, units.shape[1] * self._width)[
                :, :columns
            ]
        is_there = (np.arange(found.shape[1]) < self.widths(rows)[:, None]) & (found > 0)
        return np.where(is_there, found, np.int32(0))

    def at(self, rows: Index, columns: Index) -> BlockIds:
        """Return one block of each row."""
        if self._width == 1:
            found = self._units.table[:, self._start][self._rows.table[rows, columns]]
        else:
            found = self._units.table[self._rows.table[rows, columns // self._width], self._start + columns % self._width]
        there: BlockIds = np.maximum(found, 0)
        return there


class StateTable(GroupTable):
    """The table of a group of states: one block for each row.

    Args:
        states: which they are.
        at: which of a row's states.
    """

    block_size = 1
    is_state = True

    def __init__(self, states: States, at: int) -> None:
        self._states = states
        self._at = at

    def blocks(self, row: int) -> BlockIds:
        """Return the block of a row's state."""
        return self._states.blocks[row, self._at : self._at + 1].copy()

    def widths(self, rows: Index) -> Index:
        """Return 1 for each row."""
        return np.ones(rows.size, dtype=np.intp)

    def slots_at(self, rows: Index, positions: Index) -> Index:
        """Refuse: a state is of all tokens."""
        fix = "read block_table(group=...): its one block is the state's place in the buffers of cache.state(layer)"
        raise ArgumentValueError("slot_mapping: group", expected="a group that keeps tokens", got="one that keeps a state", fix=fix)

    def dense(self, rows: Index, columns: int) -> BlockIds:
        """Return the block of each row."""
        return self._states.blocks[rows, self._at : self._at + 1]

    def at(self, rows: Index, columns: Index) -> BlockIds:
        """Return the block of each row."""
        found: BlockIds = self._states.blocks[rows, self._at]
        return found


def tables_of(units: UnitBlocks, rows: Rows, states: States, passing: Mapping[int, Passing]) -> tuple[GroupTable, ...]:
    """Return the block table of each group."""
    of_states = iter(range(states.per_sequence))
    return tuple(
        StateTable(states, next(of_states)) if group.retention.is_state else TokenTable(units, rows, place, passing.get(place))
        for place, group in enumerate(units.groups)
    )
