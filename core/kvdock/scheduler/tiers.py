"""What was given up by the pool and is kept in tiers: which tokens, under which number, and where.

::

    index:    token ids -> numbers of units, of all that is in the pool or in a tier, and of what is before it
    tiers[0]: number -> blocks      what it must give up goes to tiers[1], if there is one; the last forgets it
    tiers[1]: number -> blocks

A tier holds what the pool had to give up, and no more: of what is before that the index has numbers, and no tier blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.errors import IntegrityError
from kvdock.prefix.events import report
from kvdock.prefix.interface import BlockIds, Namespace
from kvdock.scheduler.rows import Index
from kvdock.scheduler.tier import Tier
from kvdock.scheduler.tier_blocks import TierBlocks, TierUsage
from kvdock.scheduler.tier_index import TierIndex

__all__ = ["Found", "Tiers"]

_NONE = -1

_PARTS = 64
"""What is full gives up at least one of so many parts: a few calls, each for many, instead of many for a few."""


@attrs.frozen(eq=False)
class Found:
    """What tiers have of a prompt, behind what the pool has.

    Args:
        units: numbers.
        there: which of their blocks there are, bool ``[units, columns]``.
    """

    units: Index
    there: npt.NDArray[np.bool_]


class Tiers:
    """Keeps what the pool gives up, and tells what there is of a prompt.

    Args:
        tiers: what moves the bytes, the first to be filled first.
        num_units: units that the pool may have; a block each where there is one layer group.
        per_unit: blocks that each unit has in any case.
        columns: blocks that it may have.
        block_size: tokens of a unit.

    Attributes:
        index: numbers by tokens.
        levels: what each tier holds.
    """

    def __init__(self, tiers: Sequence[Tier], num_units: int, *, per_unit: int, columns: int, block_size: int) -> None:
        # Each unit in a tier has one block there; and what is before it is in a tier or in the pool, but for what a tier has lost.
        count = min(num_units + sum(tier.num_blocks // max(per_unit, 1) for tier in tiers), 2**31 // block_size)
        self.levels = [TierBlocks(tier, count, columns) for tier in tiers]
        self.index = TierIndex(num_units, count, block_size, self._is_kept, self._make_numbers)
        self._held = np.zeros(count, dtype=np.bool_)
        self._warned = set[int]()
        # Most tiers have no use for what will be loaded soon, and it need not be looked up for them.
        self._prefetches = any(getattr(tier.prefetch, "__func__", None) is not Tier.prefetch for tier in tiers)

    def hand_over(self) -> None:
        """Belong to the next thread."""
        for level in self.levels:
            level.blocks.hand_over()

    def give_up(self, units: BlockIds, blocks_of: Callable[[Any], BlockIds]) -> None:
        """Keep what units hold that the pool is about to hand out; the index knows them as cached until it is told to forget them.

        Args:
            units: of the pool, evicted from its prefix cache.
            blocks_of: says which blocks units have, int32 ``[units, columns]``; -1 for none.
        """
        for part, numbers, priority in self.index.leaving(units.astype(np.intp)):
            self._keep(0, numbers, blocks_of(part), priority, None)

    def usage(self) -> tuple[TierUsage, ...]:
        """Return what is in each tier."""
        return tuple(each.usage for each in self.levels)

    def find(self, ids: npt.NDArray[Any], namespace: Namespace, cached: BlockIds) -> Found | None:
        """Return what there is of a prompt behind its ``cached`` units, if there is anything. Changes nothing."""
        units = self.index.find(ids, namespace, cached)
        if not units.size:
            return None
        there = self.levels[0].table[units] != _NONE
        for level in self.levels[1:]:
            there |= level.table[units] != _NONE
        return Found(units, there) if there.any() else None

    def prefetch(self, found: Found) -> None:
        """Tell tiers what will be loaded soon."""
        if not self._prefetches:
            return
        left = found.there.copy()
        for level in self.levels:
            mine = left & (level.table[found.units] != _NONE)
            left &= ~mine
            if mine.any():
                self._guarded(level, 0, level.tier.prefetch, level.table[found.units][mine])

    def hold(self, found: Found) -> None:
        """Let what was found stay where it is, until `release`."""
        self._held[found.units] = True

    def release(self, found: Found) -> None:
        """Let it go where it must, again."""
        self._held[found.units] = False

    def load(self, found: Found, places: BlockIds) -> npt.NDArray[np.bool_]:
        """Copy what was found into the pool.

        Args:
            found: what, which is held.
            places: blocks of the pool for its first units, int32 ``[n, columns]``; -1 for what is not wanted.

        Returns:
            Which of the blocks hold now what they should, bool ``[n, columns]``.
        """
        units, done = found.units[: len(places)], np.zeros(places.shape, dtype=np.bool_)
        for level in self.levels:
            blocks = level.table[units]
            mine = (places != _NONE) & (blocks != _NONE) & ~done
            if not (count := int(np.count_nonzero(mine))):
                continue
            pairs = np.empty((count, 2), dtype=np.int64)
            pairs[:, 0], pairs[:, 1] = blocks[mine], places[mine]
            these = units[mine.any(axis=1)]
            if self._guarded(level, count, level.tier.load, pairs):
                level.loaded += count
                done |= mine
                self._renew(level, these)
            else:
                self._drop(level, these)
        return done

    def priorities(self, units: Index) -> npt.NDArray[np.int64]:
        """Return the priority of units, the highest of those that tiers have noted."""
        if not self.index.has_priorities:
            return np.zeros(units.size, dtype=np.int64)
        noted = [np.where(each.counts[units] > 0, each.priority[units], np.iinfo(np.int64).min) for each in self.levels]
        found: npt.NDArray[np.int64] = np.maximum.reduce(noted)
        return found

    def _renew(self, level: TierBlocks, units: npt.NDArray[np.intp]) -> None:
        """Let units that are in use be as new; each stays among those of its priority."""
        if not self.index.has_priorities:
            level.turns.push(units[::-1], 0)
            return
        priorities = level.priority[units]
        for priority in np.unique(priorities).tolist():
            level.turns.push(units[priorities == priority][::-1], priority)

    def _keep(self, at: int, units: Index, blocks: BlockIds, priority: int, source: Tier | None) -> None:
        """Let a tier have what it lacks of units; what it has no room for goes to the next, or is lost."""
        level = self.levels[at]
        places, sources = level.places(units), blocks.reshape(-1)
        lacking = (level.flat[places] == _NONE) & (sources != _NONE)
        if (count := int(np.count_nonzero(lacking))) > level.blocks.num_free:
            was_held = self._held[units]
            self._held[units] = True  # what comes does not make room for itself
            try:
                self._make_room(at, count, priority)
            finally:
                self._held[units] = was_held
            if count > level.blocks.num_free:  # a prefix is of use from its beginning on: what does not fit is its end
                lacking &= lacking.cumsum() <= level.blocks.num_free
                count = int(np.count_nonzero(lacking))
        if count:
            if count < lacking.size:
                places, sources = places[lacking], sources[lacking]
            pairs = np.empty((count, 2), dtype=np.int64)
            pairs[:, 0], pairs[:, 1] = sources, (fresh := level.blocks.allocate(count))
            is_stored = False
            try:
                is_stored = self._guarded(level, count, level.tier.store, pairs, source)
            finally:  # it may be interrupted
                if is_stored:
                    level.put(places, fresh)
                else:
                    level.blocks.release(fresh)
        self._take_turns(level, units[level.counts[units] > 0], priority)

    def _is_kept(self, numbers: Index) -> npt.NDArray[np.bool_]:
        """Return which units have blocks in a tier."""
        kept: npt.NDArray[np.bool_] = self.levels[0].counts[numbers] > 0
        for level in self.levels[1:]:
            kept |= level.counts[numbers] > 0
        return kept

    def _make_numbers(self, count: int) -> None:
        """Let tiers give up what goes first, until there are so many more numbers, or nothing may go."""
        enough, highest = self.index.num_free + count, np.iinfo(np.int64).max
        while self.index.num_free < enough:
            gone = [(each, each.turns.pop(each.counts, each.blocks.num_blocks // _PARTS + 1, highest, self._held)) for each in self.levels]
            if not any(parts for _, parts in gone):
                return
            for level, parts in gone:
                for units, _ in parts:
                    self._drop(level, units)

    def _drop(self, level: TierBlocks, units: Index) -> None:
        """Let a tier have nothing of units."""
        level.drop(units)
        self.index.drop(units)

    def _take_turns(self, level: TierBlocks, units: npt.NDArray[np.intp], priority: int) -> None:
        """Let units go last of a priority, ends of prefixes before what is before them."""
        if units.size:
            if self.index.has_priorities:
                level.priority[units] = priority
            level.turns.push(units[::-1], priority)

    def _make_room(self, at: int, count: int, priority: int) -> None:
        """Let a tier have so many free blocks, as far as what may go has them."""
        level = self.levels[at]
        if count <= level.blocks.num_free:
            return
        missing = max(count, level.blocks.num_blocks // _PARTS) - level.blocks.num_free
        gone = level.turns.pop(level.counts, missing, priority, self._held)
        try:
            for units, value in gone if at + 1 < len(self.levels) else ():
                self._keep(at + 1, units[::-1], level.table[units[::-1]], value, level.tier)
        finally:  # even where the next is interrupted: they have no turn any more
            for units, _ in gone:
                self._drop(level, units)

    def _guarded(self, level: TierBlocks, count: int, call: Callable[..., None], *args: Any) -> bool:
        """Let a tier copy; what it raises is told once, and costs what it should have copied."""
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001 - a tier is somebody else's, and costs hits, nothing else
            level.lost += count
            if id(level) not in self._warned:
                self._warned.add(id(level))
                text = f"{level.tier!r} raised {type(error).__name__} in {call.__name__}: {error}. What it should have kept is computed"
                report(f"{text} again; this is said once. Fix: see to the cause, or make the manager without this tier")
            return False
        return True

    def clear(self) -> None:
        """Forget everything."""
        self.index.clear()
        for level in self.levels:
            level.clear()

    def check_integrity(self, cached: BlockIds) -> None:
        """Prove that what can be found is where it should be; ``cached`` are the units of the pool's prefix cache.

        Raises:
            IntegrityError: it is not.
        """
        known = self.index.check_integrity(cached)
        if self._held.any():
            raise IntegrityError(
                "Tiers", expected="nothing that is held", got=np.flatnonzero(self._held).tolist(), fix="report it with the calls before"
            )
        for level in self.levels:
            level.check_integrity(known)
