"""What one tier holds: of which units which blocks, and what goes first when it is full.

What the pool gave up first goes first, of the lowest priority; what came back to the pool, or was given up again, is as new. That is
the order in which the pool's policy let go of it, so that a tier has none of its own.
"""

from __future__ import annotations

from collections import deque

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.errors import IntegrityError
from kvdock.prefix.interface import BlockIds
from kvdock.scheduler.block_allocator import BlockAllocator
from kvdock.scheduler.rows import Index
from kvdock.scheduler.tier import Tier

__all__ = ["TierBlocks", "TierUsage", "Turns"]

_NONE = -1

_FEW = 4096
"""Entries of which it costs nothing that they wait no more."""


@attrs.frozen
class TierUsage:
    """What one tier holds, and what was copied so far, in blocks.

    Args:
        num_blocks: that it can hold.
        used: that it holds.
        stored: copied into it.
        loaded: copied from it into the pool.
        lost: that it should have copied, and raised.
    """

    num_blocks: int
    used: int
    stored: int
    loaded: int
    lost: int


class Turns:
    """Units in the order in which they go, by priority.

    Args:
        num_units: numbers that there may be.
    """

    def __init__(self, num_units: int) -> None:
        # Each entry of a queue has a serial number of its own. A unit counts in the entry whose number it was given last.
        self._serials = np.full(num_units, _NONE, dtype=np.int64)
        self._queues: dict[int, deque[tuple[Index, int]]] = {}
        self._serial = self._size = 0
        self._most = _FEW  # units in all entries, before those that do not count are dropped

    def push(self, units: Index, priority: int) -> None:
        """Let units go last of a priority, in this order, wherever they were; each is named once."""
        self._queues.setdefault(priority, deque()).append(self._entry(units))
        if self._size > self._most:
            self._compact()

    def remove(self, units: Index) -> None:
        """Let units have no turn."""
        self._serials[units] = _NONE

    def pop(self, counts: npt.NDArray[np.int32], missing: int, priority: int, held: npt.NDArray[np.bool_]) -> list[tuple[Index, int]]:
        """Take out units, those that go first, until they have as many blocks as are missing, or there are no more.

        Args:
            counts: blocks of each unit.
            missing: how many to have.
            priority: the highest that may go.
            held: which units may not go.

        Returns:
            The units, with their priority.
        """
        found = list[tuple[Index, int]]()
        for value in sorted(each for each in self._queues if each <= priority):
            queue, kept = self._queues[value], list[Index]()
            while queue and missing > 0:
                units = self._first(queue, missing)
                chosen = np.flatnonzero(~held[units])
                sums = counts[units[chosen]].cumsum()
                chosen = chosen[: int(np.searchsorted(sums, missing)) + 1]
                kept.append(np.delete(units, chosen))
                units = units[chosen]
                if units.size:
                    missing -= int(sums[units.size - 1])
                    self.remove(units)
                    found.append((units, value))
            queue.extendleft(self._entry(units) for units in reversed(kept) if units.size)
            if not queue:
                del self._queues[value]
        return found

    def _entry(self, units: Index) -> tuple[Index, int]:
        """Return an entry of units, which count in no other from now on."""
        self._serial += 1
        self._serials[units] = self._serial
        self._size += units.size
        return units, self._serial

    def _live(self, entry: tuple[Index, int]) -> Index:
        """Return the units of an entry that count."""
        units, serial = entry
        live: Index = units[self._serials[units] == serial]
        return live

    def _first(self, queue: deque[tuple[Index, int]], count: int) -> Index:
        """Take the first entries out of a queue, of so many units at least if there are; return those of them that count."""
        live, size = list[Index](), 0
        while queue and size < count:
            size += queue[0][0].size
            live.append(self._live(queue.popleft()))
        self._size -= size
        return np.concatenate(live)

    def _compact(self) -> None:
        """Drop units that do not count."""
        for value, queue in list(self._queues.items()):
            live = [(self._live(entry), entry[1]) for entry in queue]
            self._queues[value] = deque(entry for entry in live if entry[0].size)
        self._size = sum(units.size for queue in self._queues.values() for units, _ in queue)
        self._most = 2 * self._size + _FEW

    def waiting(self) -> Index:
        """Return the units that have a turn, sorted, each as often as it has one."""
        entries = [self._live(entry) for queue in self._queues.values() for entry in queue]
        return np.sort(np.concatenate([np.empty(0, dtype=np.intp), *entries]))

    def clear(self) -> None:
        """Forget all."""
        self._serials[:] = _NONE
        self._queues.clear()
        self._size, self._most = 0, _FEW


class TierBlocks:
    """The blocks of a tier.

    Args:
        tier: what moves the bytes.
        num_units: numbers of units that there may be.
        columns: blocks of a unit.

    Attributes:
        tier: what moves the bytes.
        table: block ids, int32 ``[units, columns]``; -1 for none.
        flat: the same, in one dimension.
        counts: blocks of each unit.
        priority: of each unit that has blocks.
        turns: what goes first.
        stored: blocks that were copied into it.
        loaded: blocks that were copied from it into the pool.
        lost: blocks that it should have copied, and raised.
    """

    def __init__(self, tier: Tier, num_units: int, columns: int) -> None:
        self.tier = tier
        self.blocks = BlockAllocator(tier.num_blocks)
        self.table: BlockIds = np.full((num_units, columns), _NONE, dtype=np.int32)
        self.flat = self.table.reshape(-1)
        self.counts = np.zeros(num_units, dtype=np.int32)
        self.priority = np.zeros(num_units, dtype=np.int64)
        self.turns = Turns(num_units)
        self.stored = self.loaded = self.lost = 0

    @property
    def usage(self) -> TierUsage:
        """What it holds, and what was copied."""
        return TierUsage(self.blocks.num_blocks, self.blocks.num_used, self.stored, self.loaded, self.lost)

    def places(self, units: Index) -> Index:
        """Return the places of all blocks of units in the flat table."""
        columns = self.table.shape[1]
        return units if columns == 1 else (units[:, None] * columns + np.arange(columns)).reshape(-1)

    def put(self, places: Index, blocks: BlockIds) -> None:
        """Note that blocks were copied here, each to a place that had none."""
        self.flat[places] = blocks
        self.stored += places.size
        if self.table.shape[1] == 1:
            self.counts[places] = 1
        else:
            np.add.at(self.counts, places // self.table.shape[1], 1)

    def drop(self, units: Index) -> None:
        """Free what units have here."""
        self.turns.remove(units)
        places = self.places(units)
        blocks = self.flat[places]
        self.blocks.release(blocks[blocks != _NONE])
        self.flat[places] = _NONE
        self.counts[units] = 0

    def clear(self) -> None:
        """Free everything."""
        self.blocks.release(self.table[self.table != _NONE])
        self.table[:] = _NONE
        self.counts[:] = 0
        self.turns.clear()

    def check_integrity(self, known: Index) -> None:
        """Compare what is counted with what there is; ``known`` are the units that can be found. Raises IntegrityError."""
        self.blocks.check_integrity()
        is_there = self.table != _NONE
        blocks, units = self.table[is_there], np.flatnonzero(is_there.any(axis=1))
        facts = {
            "each block free, or of one unit": np.unique(blocks).size == blocks.size == self.blocks.num_used,
            "blocks of units that can be found": bool(np.isin(units, known).all()),
            "one turn for each unit with blocks": np.array_equal(self.turns.waiting(), units),
            "as many blocks of each unit as are counted": bool((is_there.sum(axis=1) == self.counts).all()),
        }
        wrong = ", ".join(what for what, holds in facts.items() if not holds)
        if wrong:
            raise IntegrityError(repr(self.tier), expected=wrong, got="something else", fix="report it with the calls before")
