"""Which blocks each sequence of several layer groups needs: it follows from its units, and from how much of them is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.prefix.interface import BlockIds
from kvdock.scheduler.passing import Passing
from kvdock.scheduler.rows import Index, Rows, positions_of
from kvdock.scheduler.states import States
from kvdock.scheduler.units import UnitBlocks

__all__ = ["Needs"]

_NOTHING: Index = np.empty(0, dtype=np.intp)


class Needs:
    """Compares what rows need with what they needed before, and tells the units.

    Most rows have only got more units, or computed more of them: what these need is told for all in a few operations of numpy.

    Args:
        units: which blocks units have.
        rows: what is known of the sequences.
        states: the states of sequences.

    Attributes:
        passing: what each group lets go, by the number of the group; without those that keep all, and states.
    """

    def __init__(self, units: UnitBlocks, rows: Rows, states: States) -> None:
        self._units = units
        self._rows = rows
        self._states = states
        self._columns = units.table.shape[1]
        found = enumerate(zip(units.groups, units.starts, units.widths, strict=True))
        self.passing = {
            place: Passing(start, width, group.block_size, group.retention)
            for place, (group, start, width) in found
            if not (group.retention.keeps_all or group.retention.is_state)
        }
        self._passing = list(self.passing.values())
        # What the units were told: of each row its units, their number, the first block that each group keeps, and the place of a
        # checkpoint that is its state.
        self._table: BlockIds = np.zeros((0, 8), dtype=np.int32)
        self._stop: Index = np.zeros(0, dtype=np.intp)
        self._first: Index = np.zeros((len(self._passing), 0), dtype=np.intp)
        self._checkpoint: list[Index] = []
        self._stored: list[BlockIds] = []  # units that the prefix cache has got, of which the units are to be told
        self._seen: Index = np.zeros(0, dtype=np.intp)  # the version of the row then
        self._replaced: Index = np.zeros(0, dtype=np.intp)  # and since when it had only got more units

    def settle(self, rows: Index, *, spare: bool = False) -> None:
        """Let rows need what follows from their units and from what is written of them.

        Args:
            rows: which.
            spare: whether what they let go stays as long as nobody wants its room, though it is not cached.
        """
        if self._passing or self._states.per_sequence:
            self._reserve()
            is_new, written = self._rows.version[rows] != self._seen[rows], self._rows.reach(rows)
            first, changed = list[Index](), is_new
            for group, before in zip(self._passing, self._first, strict=True):
                first.append(group.first(written))
                changed = changed | (first[-1] != before[rows])
            if (at := changed.nonzero()[0]).size:
                self._settle(rows[at], [each[at] for each in first], is_new[at], spare=spare)
        self._tell_stored()

    def stored(self, units: BlockIds) -> None:
        """Note that units are cached: from the next `settle` on, for what rows still need of them is known then."""
        self._stored.append(units)

    def _tell_stored(self) -> None:
        while self._stored:
            self._units.cache(self._stored.pop())

    def _settle(self, rows: Index, first: list[Index], is_new: npt.NDArray[np.bool_], *, spare: bool) -> None:
        """Settle rows whose units, as ``is_new`` says, or first blocks have changed.

        A row whose checkpoint is another is replaced, too; or `renew` and `take_back` have told.
        """
        before, kept = self._stop[rows], [each[rows] for each in self._first]
        has_grown = self._rows.replaced[rows] == self._replaced[rows]
        for old, new in zip(kept, first, strict=True):
            has_grown &= new >= old
        if np.count_nonzero(has_grown) < rows.size:
            self._tell_stored()  # first: what is let go of these stays there
            for one in np.flatnonzero(~has_grown).tolist():
                self._need(int(rows[one]), np.array([each[one] for each in first], dtype=np.intp), spare=spare)
            rows, before, is_new = rows[has_grown], before[has_grown], is_new[has_grown]
            first, kept = ([each[has_grown] for each in both] for both in (first, kept))
        gained, lost = list[Index](), list[Index]()
        stops = self._rows.num_blocks[rows]
        for at, (group, old, new) in enumerate(zip(self._passing, kept, first, strict=True)):
            had, have = (before, stops) if group.width == 1 else (before * group.width, stops * group.width)
            # What comes and passes in one step is needed in between, so that it is let go as the rest.
            gained.append(self._ranges(group, rows, had, have))
            lost.append(self._ranges(group, rows, np.maximum(old, group.leading) if group.leading else old, np.minimum(new, have)))
            self._first[at, rows] = new
        if (more := is_new.nonzero()[0]).size:
            self._note_units(rows[more], before[more], stops[more])
        self._units.hold(_joined(gained))
        self._tell_stored()
        self._units.unhold(_joined(lost), spare=spare)

    def _ranges(self, group: Passing, rows: Index, starts: Index, stops: Index) -> Index:
        """Return the places of a group's blocks ``starts`` to ``stops - 1`` of rows."""
        counts = stops - starts
        some = (counts > 0).nonzero()[0]
        if not some.size:
            return _NOTHING
        rows, starts, counts = rows[some], starts[some], counts[some]
        blocks = positions_of(starts, counts)
        if blocks is not starts:
            rows = rows.repeat(counts)
        if group.width == 1:  # mostly: half of the operations
            units: Index = self._rows.table[rows, blocks].astype(np.intp)
            places: Index = units * self._columns + group.start
            return places
        return group.places_of(self._rows.table[rows, blocks // group.width], blocks, self._columns)

    def renew(self, row: int) -> None:
        """Let a row need what follows from its numbers, as they were looked at last."""
        self._need(row, self._first[:, row].copy(), spare=False)

    def leave(self, row: int) -> None:
        """Let a row need nothing: it is about to give its units up."""
        held = self.of_row(row)
        self._stop[row], self._seen[row], self._replaced[row], self._checkpoint[row] = 0, 0, 0, _NOTHING
        self._units.unhold(held)

    def take_back(self, row: int) -> None:
        """Note that a row needs the checkpoint no longer that is its state; somebody else has told the units."""
        self._checkpoint[row] = _NOTHING

    def of_row(self, row: int) -> Index:
        """Return the places of what a row needs, as the units were told."""
        return self._places(self._table[row, : self._stop[row]], self._first[:, row], self._checkpoint[row])

    def of_all(self) -> Index:
        """Return that of all rows, each place as often as it is needed."""
        return np.concatenate([_NOTHING, *map(self.of_row, range(len(self._seen)))])

    def behind(self, row: int, num_tokens: int) -> Index:
        """Return the places of what a row would need behind so many of its tokens."""
        return self._places(
            self._rows.blocks(row, 0, self._rows.blocks_for(num_tokens)),
            [int(group.first(num_tokens)) for group in self._passing],
            _NOTHING,
        )

    def of_units(self, units: BlockIds) -> Index:
        """Return the places of what a sequence needs that goes on behind cached units."""
        first = [int(group.first(units.size * self._units.num_tokens)) for group in self._passing]
        checkpoint = int(units[-1]) * self._columns + self._units.states if units.size else _NOTHING
        return self._places(units, first, checkpoint)

    def last_of(self, units: BlockIds) -> BlockIds:
        """Return those of cached units that a prompt which ends behind them needs."""
        tokens, needed = units.size * self._units.num_tokens, [units[-1:]]
        for group in self._passing:
            needed.append(units[group.needed(int(group.first(tokens)), units.size * group.width) // group.width])
        return np.unique(np.concatenate(needed)) if units.size else units

    def of_first(self, units: BlockIds, count: int) -> Index:
        """Return the places of what a sequence needs of cached units that goes on behind ``count`` units, of which these are the first."""
        first = [int(group.first(count * self._units.num_tokens)) for group in self._passing]
        return self._places(units, first, _NOTHING)

    def can_go_on(self, units: BlockIds, num_tokens: Index) -> npt.NDArray[np.bool_]:
        """Return behind which numbers of tokens of units all that is kept of them is there, and what the rest of a unit is written to."""
        return self.could_go_on(self._units.table[units] >= 0, num_tokens)

    def could_go_on(self, has: npt.NDArray[np.bool_], num_tokens: Index) -> npt.NDArray[np.bool_]:
        """Return the same for units of which it is said which blocks are there, ``[units, columns]``."""
        can = np.ones(num_tokens.size, dtype=np.bool_)
        for group in self._passing:
            there = has[:, group.start : group.start + group.width].reshape(-1)
            places, stops = np.arange(there.size), -(-num_tokens // self._units.num_tokens) * group.width
            gaps = np.concatenate(([-1], np.where(there, -1, places)))
            missing = np.maximum.accumulate(gaps)[stops]  # the last that is not there
            can &= missing < group.first(num_tokens)
            is_led = there | (places >= group.leading)
            can &= np.logical_and.accumulate(np.concatenate(([True], is_led)))[stops]
        return can

    def _places(self, units: BlockIds, first: Any, checkpoint: Index) -> Index:
        """Return the places of what is needed of units, where each group keeps all from a block on."""
        parts = [checkpoint]
        for group, begin in zip(self._passing, first, strict=True):
            blocks = group.needed(int(begin), units.size * group.width)
            parts.append(group.places_of(units[blocks // group.width], blocks, self._columns))
        return np.concatenate(parts)

    def _need(self, row: int, first: Index, *, spare: bool) -> None:
        """Let a row need what its numbers say and nothing else; what it needs still is never without need in between."""
        before = self.of_row(row)
        self._first[:, row] = first
        self._note_units(np.array([row]), np.zeros(1, dtype=np.intp), self._rows.num_blocks[[row]])
        if self._states.per_sequence:
            self._checkpoint[row] = self._states.places(row)
        self._units.hold(self.of_row(row))
        self._units.unhold(before, spare=spare)
        self._units.let_go_of(self._table[row, : self._stop[row]], spare=spare)

    def _note_units(self, rows: Index, before: Index, stops: Index) -> None:
        """Note the units of rows behind the first ``before``, of which the units are about to be told."""
        of = self._rows
        if self._table.shape[1] < of.table.shape[1]:
            self._table = np.pad(self._table, ((0, 0), (0, of.table.shape[1] - self._table.shape[1])))
        if np.count_nonzero(stops - before == 1) == rows.size:  # a step of decoding
            self._table[rows, before] = of.table[rows, before]
        else:
            self._table[rows] = of.table[rows]
        self._stop[rows], self._seen[rows], self._replaced[rows] = stops, of.version[rows], of.replaced[rows]

    def _reserve(self) -> None:
        """Have room for all rows."""
        more = len(self._rows.sequences) - len(self._seen)
        if more > 0:
            arrays = (self._seen, self._replaced, self._stop)
            self._seen, self._replaced, self._stop = (np.concatenate((each, np.zeros(more, dtype=np.intp))) for each in arrays)
            self._first = np.pad(self._first, ((0, 0), (0, more)))
            self._table = np.pad(self._table, ((0, more), (0, 0)))
            self._checkpoint += [_NOTHING] * more
            self._states.reserve(len(self._seen))


def _joined(parts: list[Index]) -> Index:
    return parts[0] if len(parts) == 1 else np.concatenate([_NOTHING, *parts])
