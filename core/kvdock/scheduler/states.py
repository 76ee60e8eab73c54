"""The states of sequences: one block for each group of states, and checkpoints of them behind cached units.

::

    commit     at the end of a unit, every so often: the state becomes that unit's checkpoint      no copy, no block
    extend     the sequence gets another block, and a pair says to copy the checkpoint into it     copy on write
    begin      the same, behind what was found; without, the state begins as the null block has it
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvdock.prefix.interface import BlockIds
from kvdock.scheduler.rows import Index, Rows
from kvdock.scheduler.units import UnitBlocks

__all__ = ["States"]

_NO_PAIRS: npt.NDArray[np.int64] = np.empty((0, 2), dtype=np.int64)


class States:
    """Which blocks hold the state of each row.

    Args:
        units: whose checkpoints there are; None without states.
        rows: what is known of the sequences.
        interval: tokens between two checkpoints of a row, at least.

    Attributes:
        per_sequence: blocks of each; 0 without states.
        blocks: of each row, int32 ``[rows, per_sequence]``; -1 of rows of nobody.
    """

    def __init__(self, units: UnitBlocks | None, rows: Rows, interval: int = 0) -> None:
        self._given = units
        self._rows = rows
        self._interval = interval
        self.per_sequence = 0 if units is None else int(units.states.size)
        self.blocks: BlockIds = np.full((0, self.per_sequence), -1, dtype=np.int32)
        self._of: Index = np.zeros(0, dtype=np.intp)  # the unit whose checkpoint a row has for its state; -1 for one of its own
        self._last: Index = np.zeros(0, dtype=np.intp)  # tokens before its last checkpoint
        self._end: Index = np.zeros(0, dtype=np.intp)  # tokens before the last one of its prompt

    @property
    def _units(self) -> UnitBlocks:
        assert self._given is not None  # noqa: S101 - there are states
        return self._given

    def reserve(self, rows: int) -> None:
        """Have room for so many rows."""
        more = rows - len(self._of)
        if self.per_sequence and more > 0:
            self.blocks = np.concatenate((self.blocks, np.full((more, self.per_sequence), -1, dtype=np.int32)))
            self._of = np.concatenate((self._of, np.full(more, -1)))
            self._last, self._end = (np.concatenate((each, np.zeros(more, dtype=np.intp))) for each in (self._last, self._end))

    def chunk_ends(self, starts: Index, stops: Index, prompts: Index) -> Index:
        """Return where chunks of prompts end, so that the state there can be kept: at the end of a unit, if there is one in them."""
        if not self.per_sequence:
            return stops
        size = self._units.num_tokens
        ends = np.where(stops < prompts, stops, prompts - 1) // size * size
        return np.where((prompts > 0) & (ends > starts), ends, stops)

    def begin(self, row: int, prompt_len: int) -> npt.NDArray[np.int64]:
        """Give a row states of its own, of which there are enough free; return what to copy into them."""
        if not self.per_sequence:
            return _NO_PAIRS
        computed, size = int(self._rows.computed[row]), self._units.num_tokens
        self._last[row], self._end[row] = computed, max(prompt_len - 1, 0) // size * size
        fresh = self._units.blocks.allocate(self.per_sequence)
        self.blocks[row] = fresh
        if computed:
            return _pairs(self._units.table[self._rows.table[row, computed // size - 1], self._units.states], fresh)
        return _NO_PAIRS if self._units.null_block is None else _pairs(np.full_like(fresh, self._units.null_block), fresh)

    def fork(self, row: int, other: int) -> npt.NDArray[np.int64]:
        """Give another row states like those of one; return what to copy."""
        if not self.per_sequence:
            return _NO_PAIRS
        self._last[other], self._end[other] = self._last[row], self._end[row]
        self.blocks[other] = self._units.blocks.allocate(self.per_sequence)
        return _pairs(self.blocks[row], self.blocks[other])

    def extend(self, rows: Index) -> npt.NDArray[np.int64]:
        """Give rows that have a checkpoint for their state one of their own; return what to copy."""
        owed = self.owed(rows)
        if not owed.size:
            return _NO_PAIRS
        fresh = self._units.blocks.allocate(owed.size * self.per_sequence).reshape(owed.size, -1)
        pairs = _pairs(self.blocks[owed].reshape(-1), fresh.reshape(-1))
        self.blocks[owed], self._of[owed] = fresh, -1
        self._rows.touch(owed)
        return pairs

    def restart(self, row: int) -> None:
        """Let a row go on behind a cached unit, with the checkpoint there for its state."""
        if self.per_sequence:
            if self._of[row] < 0:
                self._units.blocks.release(self.blocks[row])
            computed = int(self._rows.computed[row])
            unit = int(self._rows.table[row, computed // self._units.num_tokens - 1])
            self.blocks[row], self._of[row], self._last[row] = self._units.table[unit, self._units.states], unit, computed

    def owed(self, rows: Index) -> Index:
        """Return those of rows that have a checkpoint for their state: it must not be written."""
        return rows[self._of[rows] >= 0] if self.per_sequence else rows[:0]

    def is_alone(self, row: int) -> bool:
        """Whether nobody but a row needs the checkpoint that it has for its state."""
        return self._units.is_needed_once(self.places(row))

    def take_back(self, row: int) -> None:
        """Let the checkpoint that a row has for its state, and nobody else needs, be its own again."""
        self._units.detach(self.places(row))
        self._of[row] = -1

    def places(self, row: int) -> Index:
        """Return the places of the checkpoint that a row has for its state."""
        if not self.per_sequence or self._of[row] < 0:
            return np.empty(0, dtype=np.intp)
        found: Index = int(self._of[row]) * self._units.table.shape[1] + self._units.states
        return found

    def checkpoint(self, rows: Index) -> list[int]:
        """Let the states of rows that are at the end of a cached unit, and far enough, be its checkpoint; return those rows."""
        if not self.per_sequence:
            return []
        r, size = self._rows, self._units.num_tokens
        computed = r.computed[rows]
        far = (computed - self._last[rows] >= self._interval) | ((computed == self._end[rows]) & (computed > self._last[rows]))
        done = list[int]()
        # With room left it is written before `extend` could say what to copy.
        due = far & (computed % size == 0) & (r.shared[rows] * size >= computed) & (r.num_tokens[rows] == computed)
        for row in rows[due.nonzero()[0]].tolist():
            self._last[row] = r.computed[row]
            unit = int(r.table[row, int(r.computed[row]) // size - 1])
            if self._units.attach(unit, self.blocks[row]):
                self._of[row] = unit
                done.append(row)
        return done

    def leave(self, row: int) -> None:
        """Release the states of a row."""
        if self.per_sequence:
            if self._of[row] < 0:
                self._units.blocks.release(self.blocks[row])
            self.blocks[row], self._of[row] = -1, -1

    def own(self) -> BlockIds:
        """Return the blocks that are states of sequences and no checkpoints."""
        return self.blocks[(self._of < 0) & (self.blocks[:, 0] >= 0)].reshape(-1) if self.per_sequence else self.blocks.reshape(-1)


def _pairs(sources: BlockIds, destinations: BlockIds) -> npt.NDArray[np.int64]:
    return np.stack((sources, destinations), axis=1).astype(np.int64)
