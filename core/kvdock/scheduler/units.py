"""The blocks of several layer groups, by unit: so many tokens that blocks of all groups end together.

::

    tokens of a sequence      | unit 4                    | unit 9                    |      what is found, shared and evicted
    group 0, 32 tokens        | 17                        | 20                        |      each a block of the one pool
    group 1, 16 tokens        | 18          | --          | 21          | 22          |      --: let go, no later token reads it
    group 2, states           |                           | 23                        |      a checkpoint: the state behind unit 9

A manager of several groups counts in units where one of a single group counts in blocks, so that prefixes, forks and promises are
the same code; which blocks a unit has is known here alone. A unit has all its blocks of tokens from the beginning. What a rule
lets go is given back when no sequence needs it any more; where the unit is cached it stays as long as there is room, since a
prompt that ends there can be gone on with then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.errors import ArgumentTypeError, ArgumentValueError, IntegrityError
from kvdock.layers.groups import LayerGroup
from kvdock.prefix.interface import BlockIds
from kvdock.scheduler.block_allocator import BlockAllocator, checked_num_blocks
from kvdock.scheduler.rows import Index

__all__ = ["UnitBlocks", "UnitIds", "checked_groups"]

_NONE = -1

_ONE = np.int32(1)  # of the counts' own type: with another, `ufunc.at` takes twenty times as long

_IDS_WITHOUT_BLOCKS = 64
"""Units for each block of the pool where no group keeps all: of a long sequence most have no block any more."""


_FEW = 4096
"""Entries of which it costs nothing that they wait no more."""


def checked_groups(subject: str, groups: object) -> tuple[LayerGroup, ...]:
    """Return layer groups, at least one, or raise."""
    found = tuple(groups) if isinstance(groups, Sequence) else ()
    if not found or not all(isinstance(group, LayerGroup) for group in found):
        fix = "pass cache.groups, or those of kvdock.plan_blocks(...)"
        raise ArgumentTypeError(f"{subject}: groups", expected="LayerGroups, at least one", got=repr(groups)[:80], fix=fix)
    return found


class UnitIds(BlockAllocator):
    """Numbers of units, which tells when one has no holder any more.

    Args:
        num_units: how many there are.
        on_free: called with those that are free from now on.
    """

    def __init__(self, num_units: int, on_free: Callable[[BlockIds], None]) -> None:
        super().__init__(num_units)
        self._on_free = on_free

    def release(self, blocks: npt.ArrayLike) -> BlockIds:
        """Take a holder from each, as any `BlockAllocator`."""
        free = super().release(blocks)
        if free.size:
            self._on_free(free)
        return free


class UnitBlocks:
    """Which blocks units have, who needs them, and which cached ones are needed by nobody.

    Args:
        groups: the layer groups.
        num_blocks: blocks of the pool.
        block_size: tokens of a unit where all groups keep states.
        null_block: whether block 0 is never handed out.

    Attributes:
        groups: the layer groups.
        blocks: the blocks of the pool; each has one holder: a unit, or a sequence whose state it is.
        ids: which units are held.
        num_tokens: of a unit.
        starts: the first column of each group in ``table``.
        widths: columns of each group.
        table: block ids, int32 ``[units, columns]``; -1 for none.
        states: columns of states.
        per_unit: blocks that each unit has from the beginning.
        num_lasting: of these, what is never let go while the unit is there.
        passing: which columns may go while the unit stays, bool ``[columns]``.
        needs: how many sequences and pins need each block of ``table``; only of such columns.
        is_cached: which units the prefix cache has.
        is_end: in or behind which units prompts ended: what is let go there is given up last.
        spared: which blocks of other units are there still, though nobody needs them: who let them go may go back, or publish them.
        num_idle: blocks that may go for themselves and that nobody needs, of cached units and spared ones.
    """

    def __init__(self, groups: Sequence[LayerGroup], num_blocks: int, block_size: int, *, null_block: bool) -> None:
        sizes = [group.block_size for group in groups if not group.retention.is_state]
        self.groups = tuple(groups)
        self.num_tokens = math.lcm(*sizes) if sizes else block_size
        self.widths = tuple(group.width(self.num_tokens) for group in groups)
        self.starts = tuple(accumulate(self.widths[:-1], initial=0))
        by_column = [group.retention for group, width in zip(groups, self.widths, strict=True) for _ in range(width)]
        self.states = np.array([at for at, rule in enumerate(by_column) if rule.is_state], dtype=np.intp)
        self._tokens = np.array([at for at, rule in enumerate(by_column) if not rule.is_state], dtype=np.intp)
        self.passing = np.array([not rule.keeps_all for rule in by_column])
        self.per_unit, self.num_lasting = self._tokens.size, int((~self.passing).sum())
        checked_num_blocks("CacheManager", num_blocks, max(sizes, default=1))
        self.blocks = BlockAllocator(num_blocks)
        self.null_block = int(self.blocks.allocate(1)[0]) if null_block else None
        ids = num_blocks // self.num_lasting if self.num_lasting else _IDS_WITHOUT_BLOCKS * num_blocks
        ids = min(ids, 2**31 // self.num_tokens)
        if not ids:
            expected = f"at least the {self.num_lasting} blocks of {self.num_tokens} tokens"
            raise ArgumentValueError("CacheManager: num_blocks", expected=expected, got=num_blocks, fix="make the pool larger")
        self.ids = UnitIds(ids, self._free)
        self.table: BlockIds = np.full((ids, len(by_column)), _NONE, dtype=np.int32)
        self.needs = np.zeros((ids, len(by_column)), dtype=np.int32)
        self.is_cached = np.zeros(ids, dtype=np.bool_)
        self.is_end = np.zeros(ids, dtype=np.bool_)
        self.spared = np.zeros((ids, len(by_column)), dtype=np.bool_)
        self.num_idle = 0
        # What nobody needs, first what was let go longest ago: within prefixes, and where prompts ended. A place of an entry counts
        # while its number is the one that the place was given last.
        self._idle: tuple[deque[tuple[Index, npt.NDArray[np.int64]]], ...] = (deque(), deque())
        self._serials = np.full((ids, len(by_column)), -1, dtype=np.int64)
        self._serial = self._entries = 0

    def add(self, units: BlockIds) -> None:
        """Give units their blocks, of which there are enough."""
        if self.per_unit:
            fresh = self.blocks.allocate(units.size * self.per_unit).reshape(units.size, self.per_unit)
            self.table[units[:, None], self._tokens] = fresh

    def _free(self, units: BlockIds) -> None:
        """Take the blocks of units back that nobody holds any more."""
        if self.needs[units].any():
            raise IntegrityError(
                "UnitBlocks",
                expected="no sequence that needs a unit without holders",
                got=units.tolist(),
                fix="report it with the calls before",
            )
        self._spare_no_more(units)
        self._give_back(units[:, None] * self.table.shape[1] + np.arange(self.table.shape[1]))
        self.is_end[units] = False

    def hold(self, places: Index) -> None:
        """Let somebody more need blocks, each once; places count through ``table``."""
        if places.size:
            needs = self.needs.reshape(-1)
            before = needs[places]
            needs[places] = before + _ONE
            if self.num_idle:
                first, spared = places[before == 0], self.spared.reshape(-1)
                self.num_idle -= int(np.count_nonzero(self.is_cached[first // self.table.shape[1]] | spared[first]))
                spared[first] = False

    def unhold(self, places: Index, *, spare: bool = False) -> None:
        """Let somebody need blocks no longer, as often as each is there. Nobody's are given back; cached ones are idle from now on.

        Args:
            places: of the blocks.
            spare: whether others are idle, too.
        """
        if places.size:
            needs = self.needs.reshape(-1)
            np.subtract.at(needs, places, _ONE)
            last = places[needs[places] == 0]
            if len(set(last.tolist())) < last.size:  # two rows have let go of one block: rarely
                last = np.unique(last)
            is_cached = self.is_cached[last // self.table.shape[1]]
            if np.count_nonzero(is_cached) == last.size:
                self._let_idle(last)
            else:
                self._let_idle(last[is_cached])
                self.let_go(last[~is_cached], spare=spare)

    def let_go(self, places: Index, *, spare: bool) -> None:
        """Give blocks back that nobody needs, of units that are not cached; or spare those that are there."""
        if spare:
            places = places[self.table.reshape(-1)[places] != _NONE]
            self.spared.reshape(-1)[places] = True
            self._let_idle(places)
        else:
            self._give_back(places)

    def let_go_of(self, units: BlockIds, *, spare: bool) -> None:
        """Let go what nobody needs of units that are not cached."""
        unneeded = self._unneeded(units[~self.is_cached[units]])
        self.let_go(unneeded[~self.spared.reshape(-1)[unneeded]], spare=spare)

    def _spare_no_more(self, units: BlockIds) -> None:
        """Count what is spared of units as idle no longer."""
        if self.num_idle:
            self.num_idle -= int(np.count_nonzero(self.spared[units]))
            self.spared[units] = False

    def cache(self, units: BlockIds) -> None:
        """Note that units are cached from now on."""
        self._spare_no_more(units)
        self.is_cached[units] = True
        # What lasts is never counted: mostly all the rest is needed, which this tells at a third of the time.
        if np.count_nonzero(self.needs[units]) < units.size * (self.per_unit - self.num_lasting) or self.states.size:
            self._let_idle(self._unneeded(units))

    def uncache(self, units: BlockIds) -> None:
        """Note that units are cached no longer. Sequences may hold them still."""
        unneeded = self._unneeded(units)
        self.num_idle -= unneeded.size
        self.is_cached[units] = False
        self._give_back(unneeded)

    def attach(self, unit: int, states: BlockIds) -> bool:
        """Keep states as the checkpoint behind a cached unit, unless it has one; return whether that was done. They are idle then."""
        places = unit * self.table.shape[1] + self.states
        there = self.table[unit, self.states] != _NONE
        if there.all():
            return False
        self.num_idle -= int(np.count_nonzero(there))  # what is left of one that was given up in part: nobody needs it
        self._give_back(places)
        self.table[unit, self.states] = states
        self._let_idle(places)
        return True

    def detach(self, places: Index) -> None:
        """Give up a checkpoint that one sequence needs and nobody else: its blocks are the caller's."""
        self.needs.reshape(-1)[places] = 0
        self.table.reshape(-1)[places] = _NONE

    def replace(self, old: BlockIds, new: BlockIds) -> None:
        """Give cached units what they lack of the blocks of others with equal tokens, that are about to be released."""
        lacking = (self.table[new] == _NONE) & (self.table[old] != _NONE)
        at, column = lacking.nonzero()
        moved = old[at].astype(np.intp) * self.table.shape[1] + column
        self.num_idle -= int(np.count_nonzero(self.spared.reshape(-1)[moved]))
        self.spared.reshape(-1)[moved] = False
        self.table[new[at], column] = self.table[old[at], column]
        self.table[old[at], column] = _NONE
        places = new[at].astype(np.intp) * self.table.shape[1] + column
        self.spared.reshape(-1)[places] = ~self.is_cached[new[at]]  # of what another row is just publishing
        self._let_idle(places)

    def copies(self, pairs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the blocks to copy for units to copy; what a source has not, its copy need not have."""
        old, new = (self.table[pairs[:, side]][:, self._tokens] for side in (0, 1))
        is_idle = self.passing[self._tokens] & self._is_idle(pairs[:, :1] * self.table.shape[1] + self._tokens)
        there = (old != _NONE) & ~is_idle
        at, column = (~there & (new != _NONE)).nonzero()
        self._give_back(pairs[at, 1] * self.table.shape[1] + self._tokens[column])
        return np.stack((old[there], new[there]), axis=1).astype(np.int64)

    def idle_of(self, places: Index) -> int:
        """Return how many of these blocks are idle."""
        return int(np.count_nonzero(self._is_idle(places)))

    def is_needed_once(self, places: Index) -> bool:
        """Whether one sequence needs blocks, and nobody else."""
        return bool((self.needs.reshape(-1)[places] == 1).all())

    def drop(self, count: int, *, ends: bool) -> None:
        """Give up to ``count`` idle blocks back, those that were let go longest ago; where prompts ended, or all others."""
        queue, taken = self._idle[ends], [np.empty(0, dtype=np.intp)]
        while queue and count > 0:
            places, serials = queue.popleft()
            places = places[self._is_waiting(places, serials)]
            if places.size > count:
                queue.appendleft((places[count:], self._serials.reshape(-1)[places[count:]]))
            taken.append(places[:count])
            count -= taken[-1].size
        gone = np.concatenate(taken)
        self.num_idle -= gone.size
        self._give_back(gone)

    def mark_ends(self, units: BlockIds) -> None:
        """Note that prompts ended in or behind units: what was let go there is given up last, whenever it was."""
        fresh = units[~self.is_end[units]]
        self.is_end[fresh] = True
        if self.num_idle and fresh.size:
            places = (fresh[:, None].astype(np.intp) * self.table.shape[1] + np.flatnonzero(self.passing)).reshape(-1)
            idle = places[self._is_idle(places)]
            self.num_idle -= idle.size
            self._let_idle(idle)

    def give_up(self, places: Index) -> None:
        """Free the blocks at places, of units that nobody needs yet and that are not cached."""
        self._give_back(places)

    def _unneeded(self, units: BlockIds) -> Index:
        """Return places of blocks of units that may go for themselves and that nobody needs."""
        at, column = (self.passing & (self.table[units] != _NONE) & (self.needs[units] == 0)).nonzero()
        places: Index = units[at].astype(np.intp) * self.table.shape[1] + column
        return places

    def waiting(self) -> set[int]:
        """Return the places that have a turn to be given up."""
        return {place for queue in self._idle for entry in queue for place in entry[0][self._is_waiting(*entry)].tolist()}

    def _is_waiting(self, places: Index, serials: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which of the blocks of an entry are idle, and have no later one."""
        found: npt.NDArray[np.bool_] = (self._serials.reshape(-1)[places] == serials) & self._is_idle(places)
        return found

    def _is_idle(self, places: Index) -> npt.NDArray[np.bool_]:
        """Return which blocks, of those that may go, are there, cached or spared, and needed by nobody."""
        may_go = self.is_cached[places // self.table.shape[1]] | self.spared.reshape(-1)[places]
        found: npt.NDArray[np.bool_] = may_go & (self.table.reshape(-1)[places] != _NONE) & (self.needs.reshape(-1)[places] == 0)
        return found

    def _let_idle(self, places: Index) -> None:
        """Let blocks that nobody needs wait for their turn."""
        if not places.size:
            return
        self.num_idle += places.size
        is_end = self.is_end[places // self.table.shape[1]]
        for which, mine in ((0, places[~is_end]), (1, places[is_end])) if np.count_nonzero(is_end) else ((0, places),):
            serials = np.arange(self._serial, self._serial + mine.size)
            self._serials.reshape(-1)[mine] = serials
            self._serial += mine.size
            self._idle[which].append((mine, serials))
            self._entries += mine.size
        if self._entries > 2 * self.num_idle + _FEW:  # mostly what does not wait any more
            self._entries = 0
            for queue in self._idle:
                live = [(places[is_live], serials[is_live]) for places, serials in queue for is_live in [self._is_waiting(places, serials)]]
                queue.clear()
                queue.extend(entry for entry in live if entry[0].size)
                self._entries += sum(entry[0].size for entry in queue)

    def _give_back(self, places: npt.NDArray[Any]) -> None:
        """Free the blocks at places, as far as there are any."""
        if places.size:
            table = self.table.reshape(-1)
            found = table[places]
            self.blocks.release(found[found != _NONE])
            table[places] = _NONE
            self.spared.reshape(-1)[places] = False
