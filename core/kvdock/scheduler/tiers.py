"""What was given up by the pool and is kept in tiers: which tokens, under which number, and where.

::

    index:    token ids -> numbers of units, of all that is in a tier, and of what is before it
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
from kvdock.prefix.interface import BlockIds, Namespace, PrefixHandle
from kvdock.scheduler.published import Published
from kvdock.scheduler.tier import Tier
from kvdock.scheduler.tier_blocks import TierBlocks, TierUsage
from kvdock.scheduler.tier_index import PARTS, TierIndex

__all__ = ["Found", "Tiers"]

_NONE = -1


@attrs.frozen(eq=False)
class Found:
    """What tiers have of a prompt, behind what the pool has.

    Args:
        handle: the end of it in the index.
        units: numbers.
        there: which of their blocks there are, bool ``[units, columns]``.
    """

    handle: PrefixHandle
    units: BlockIds
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
        published: what the pool's cached units hold.
        levels: what each tier holds.
    """

    def __init__(self, tiers: Sequence[Tier], num_units: int, *, per_unit: int, columns: int, block_size: int) -> None:
        self.published = Published(num_units, block_size)
        # Each unit in a tier has one block there; and what is before it is in a tier or in the pool, but for what a tier has lost.
        count = min(num_units + sum(tier.num_blocks // max(per_unit, 1) for tier in tiers), 2**31 // block_size)
        self.levels = [TierBlocks(tier, count, columns) for tier in tiers]
        self._index = TierIndex(count, block_size, self._drop)
        self._held = np.zeros(count, dtype=np.bool_)
        self._warned = set[int]()

    def hand_over(self) -> None:
        """Belong to the next thread."""
        self._index.hand_over()
        for level in self.levels:
            level.blocks.hand_over()

    def give_up(self, units: BlockIds, blocks_of: Callable[[BlockIds], BlockIds]) -> None:
        """Keep what units hold that the pool is about to hand out.

        Args:
            units: of the pool, evicted from its prefix cache.
            blocks_of: says which blocks units have, int32 ``[units, columns]``; -1 for none.
        """
        for part in self.published.give_up(units):
            numbers = self._index.numbers_of(part)
            if numbers is not None:
                self._keep(0, numbers[numbers.size - part.blocks.size :], blocks_of(part.blocks), part.priority, None)

    def usage(self) -> tuple[TierUsage, ...]:
        """Return what is in each tier."""
        return tuple(each.usage for each in self.levels)

    def find(self, ids: npt.NDArray[Any], namespace: Namespace, have: int) -> Found | None:
        """Return what there is of a prompt behind its first ``have`` units, if there is anything. Changes nothing."""
        match = self._index.find(ids, namespace)
        units = match.blocks[have:]
        if not units.size:
            return None
        there, at = np.zeros((units.size, self.levels[0].table.shape[1]), dtype=np.bool_), units.astype(np.intp)
        for level in self.levels:
            there |= level.table[at] != _NONE
        return Found(match.handle, units, there) if there.any() else None

    def prefetch(self, found: Found) -> None:
        """Tell tiers what will be loaded soon."""
        left = found.there.copy()
        for level in self.levels:
            mine = left & (level.table[found.units] != _NONE)
            left &= ~mine
            if mine.any():
                self._guarded(level, 0, level.tier.prefetch, level.table[found.units][mine])

    def hold(self, found: Found) -> None:
        """Let what was found stay where it is, until `release`."""
        self._index.lock(found.handle)
        self._held[found.units] = True

    def release(self, found: Found) -> None:
        """Let it go where it must, again."""
        self._held[found.units] = False
        self._index.lock(found.handle, unlock=True)

    def load(self, found: Found, places: BlockIds) -> npt.NDArray[np.bool_]:
        """Copy what was found into the pool.

        Args:
            found: what, which is held.
            places: blocks of the pool for its first units, int32 ``[n, columns]``; -1 for what is not wanted.

        Returns:
            Which of the blocks hold now what they should, bool ``[n, columns]``.
        """
        units, done = found.units[: len(places)].astype(np.intp), np.zeros(places.shape, dtype=np.bool_)
        for level in self.levels:
            mine = (places != _NONE) & ~done & (level.table[units] != _NONE)
            pairs = np.stack((level.table[units][mine], places[mine]), axis=1).astype(np.int64)
            if not pairs.size:
                continue
            if self._guarded(level, len(pairs), level.tier.load, pairs):
                level.loaded += len(pairs)
                done |= mine
                self._renew(level, units[mine.any(axis=1)])
            else:
                level.drop(units[mine.any(axis=1)])
        self._index.use(found.handle)
        return done

    def priorities(self, units: BlockIds) -> npt.NDArray[np.int64]:
        """Return the priority of units, the highest of those that tiers have noted."""
        noted = [np.where(each.counts[units] > 0, each.priority[units], np.iinfo(np.int64).min) for each in self.levels]
        found: npt.NDArray[np.int64] = np.maximum.reduce(noted)
        return found

    def _renew(self, level: TierBlocks, units: npt.NDArray[np.intp]) -> None:
        """Let units that are in use be as new; each stays among those of its priority."""
        priorities = level.priority[units]
        for priority in sorted(set(priorities.tolist())):
            level.turns.push(units[priorities == priority][::-1], priority)

    def _keep(self, at: int, numbers: npt.NDArray[Any], blocks: BlockIds, priority: int, source: Tier | None) -> None:
        """Let a tier have what it lacks of units; what it has no room for goes to the next, or is lost."""
        level, units = self.levels[at], numbers.astype(np.intp)
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

    def _drop(self, units: BlockIds) -> None:
        """Free what tiers have of units that nobody can find any more."""
        for level in self.levels:
            level.drop(units.astype(np.intp))

    def _take_turns(self, level: TierBlocks, units: npt.NDArray[np.intp], priority: int) -> None:
        """Let units go last of a priority, ends of prefixes before what is before them."""
        if units.size:
            level.priority[units] = priority
            level.turns.push(units[::-1], priority)

    def _make_room(self, at: int, count: int, priority: int) -> None:
        """Let a tier have so many free blocks, as far as what may go has them."""
        level = self.levels[at]
        if count <= level.blocks.num_free:
            return
        missing = max(count, level.blocks.num_blocks // PARTS) - level.blocks.num_free
        gone = level.turns.pop(level.counts, missing, priority, self._held)
        try:
            for units, value in gone if at + 1 < len(self.levels) else ():
                self._keep(at + 1, units[::-1], level.table[units[::-1]], value, level.tier)
        finally:  # even where the next is interrupted: they have no turn any more
            for units, _ in gone:
                level.drop(units)

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
        self.published.clear()
        self._index.clear()
        for level in self.levels:
            level.clear()

    def check_integrity(self, cached: BlockIds) -> None:
        """Prove that what can be found is where it should be; ``cached`` are the units of the pool's prefix cache.

        Raises:
            IntegrityError: it is not.
        """
        self.published.check_integrity(cached)
        known = self._index.check_integrity()
        if self._held.any():
            raise IntegrityError("Tiers", expected="nothing that is held", got=np.flatnonzero(self._held).tolist())
        for level in self.levels:
            level.check_integrity(known)
