"""Which blocks each sequence of several layer groups needs: it follows from its units, and from how much of them is computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.prefix.interface import BlockIds
from kvdock.scheduler.passing import Passing
from kvdock.scheduler.rows import Index, Rows
from kvdock.scheduler.states import States
from kvdock.scheduler.units import UnitBlocks

__all__ = ["Needs"]


class Needs:
    """Compares what rows need with what they needed before, and tells the units.

    Args:
        units: which blocks units have.
        rows: what is known of the sequences.
        states: the states of sequences.

    Attributes:
        passing: what each group lets go, by the number of the group; without those that keep all, and states.
        held: what each row needs, by place in the table of units.
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
        self.held: list[Index] = []
        self._seen: Index = np.zeros(0, dtype=np.intp)  # the version of the row then
        self._first: Index = np.zeros((len(self._passing), 0), dtype=np.intp)  # and the first block that is kept

    def settle(self, rows: Index) -> None:
        """Let rows need what follows from their units and from what is computed of them."""
        if (more := len(self._rows.sequences) - len(self.held)) > 0:
            self.held += [np.empty(0, dtype=np.intp)] * more
            self._seen = np.concatenate((self._seen, np.zeros(more, dtype=np.intp)))
            self._first = np.concatenate((self._first, np.zeros((self._first.shape[0], more), dtype=np.intp)), axis=1)
            self._states.reserve(len(self.held))
        versions, computed = self._rows.version[rows], self._rows.computed[rows]
        changed = versions != self._seen[rows]
        for group, first in zip(self._passing, self._first, strict=True):
            now = group.first(computed)
            changed |= now != first[rows]
            first[rows] = now
        self._seen[rows] = versions
        for row in rows[np.flatnonzero(changed)].tolist():
            self.renew(row)

    def renew(self, row: int) -> None:
        """Let a row need what follows from its numbers, as they were looked at last."""
        self._need(row, self._places(row, self._first[:, row]))

    def leave(self, row: int) -> None:
        """Let a row need nothing: it is about to give its units up."""
        self._need(row, np.empty(0, dtype=np.intp))
        self._seen[row] = 0

    def without(self, row: int, places: Index) -> None:
        """Note that a row needs some blocks no longer, of which somebody else has told the units."""
        self.held[row] = np.setdiff1d(self.held[row], places)

    def of_row(self, row: int, num_tokens: int) -> Index:
        """Return the places of what a row needs behind so many tokens."""
        return self._places(row, [group.first(num_tokens) for group in self._passing])

    def of_units(self, units: BlockIds) -> Index:
        """Return the places of what a sequence needs that goes on behind units."""
        tokens, parts = units.size * self._units.num_tokens, [np.empty(0, dtype=np.intp)]
        for group in self._passing:
            parts.append(group.places(units, group.needed(int(group.first(tokens)), units.size * group.width), self._columns))
        if units.size:
            parts.append(int(units[-1]) * self._columns + self._units.states)
        return np.concatenate(parts)

    def last_of(self, units: BlockIds) -> BlockIds:
        """Return those of cached units that a prompt which ends behind them needs."""
        tokens, needed = units.size * self._units.num_tokens, [units[-1:]]
        for group in self._passing:
            needed.append(units[group.needed(int(group.first(tokens)), units.size * group.width) // group.width])
        return np.unique(np.concatenate(needed)) if units.size else units

    def can_go_on(self, units: BlockIds, num_tokens: Index) -> npt.NDArray[np.bool_]:
        """Return behind which numbers of tokens of units all that is kept of them is there."""
        can = np.ones(num_tokens.size, dtype=np.bool_)
        for group in self._passing:
            there = (self._units.table[units, group.start : group.start + group.width] >= 0).reshape(-1)
            places, stops = np.arange(there.size), -(-num_tokens // group.block_size)
            gaps = np.concatenate(([-1], np.where(there, -1, places)))
            missing = np.maximum.accumulate(gaps)[stops]  # the last that is not there
            can &= missing < group.first(num_tokens)
            is_led = there | (places >= -(-group.retention.leading // group.block_size))
            can &= np.logical_and.accumulate(np.concatenate(([True], is_led)))[stops]
        return can

    def _places(self, row: int, first: Iterable[Any]) -> Index:
        """Return what a row needs, where all is kept from these blocks of each group on."""
        blocks = self._rows.blocks(row)
        parts = [
            group.places(blocks, group.needed(min(int(begin), blocks.size * group.width), blocks.size * group.width), self._columns)
            for group, begin in zip(self._passing, first, strict=True)
        ]
        return np.concatenate([*parts, self._states.places(row)])

    def _need(self, row: int, places: Index) -> None:
        """Let a row need these and no others; what it needs still is never without need in between."""
        before, self.held[row] = self.held[row], places
        self._units.hold(places)
        self._units.unhold(before)
