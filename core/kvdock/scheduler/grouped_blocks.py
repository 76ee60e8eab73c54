"""The blocks that a manager of several layer groups can have, and what each sequence needs of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.errors import IndexRangeError, IntegrityError
from kvdock.prefix.interface import BlockIds, Namespace, PrefixCache, PrefixMatch
from kvdock.scheduler.needs import Needs
from kvdock.scheduler.pool_blocks import PoolBlocks
from kvdock.scheduler.refusals import too_few
from kvdock.scheduler.rows import Index, Rows
from kvdock.scheduler.states import States
from kvdock.scheduler.tables import tables_of
from kvdock.scheduler.units import UnitBlocks
from kvdock.scheduler.units_integrity import check_units

__all__ = ["GroupedBlocks"]


class GroupedBlocks(PoolBlocks):
    """Takes units where others take blocks, and lets go of blocks that no later token reads.

    What a row needs follows from its units and from how much of it is computed: `settle` compares that with what it needed before.

    Args:
        units: which blocks units have.
        prefix: whose units can be evicted.
        rows: what is known of the sequences.
        state_interval: tokens between two checkpoints of states, at least.
    """

    uses_parts = False

    def __init__(self, units: UnitBlocks, prefix: PrefixCache, rows: Rows, state_interval: int) -> None:
        super().__init__(units.ids, prefix, rows)
        self.units, self.allocators = units, (units.ids, units.blocks)
        self.null_block = units.null_block
        self.states = States(units, rows, state_interval)
        self._rows = rows
        self._columns = units.table.shape[1]
        self.needs = Needs(units, rows, self.states)
        self._longest: tuple[PrefixMatch | None, PrefixMatch | None] = None, None  # what was found last, and what was there of it
        self.lets_go = bool(self.needs.passing)
        self.finest = math.gcd(rows.block_size, *(group.block_size for group in units.groups if not group.retention.is_state))
        self.tables = tables_of(units, rows, self.states, self.needs.passing)

    def hand_over(self) -> None:
        """Belong to the next thread."""
        super().hand_over()
        self.units.blocks.hand_over()

    @property
    def used(self) -> int:
        """Blocks of the pool that sequences or the prefix cache hold; spared ones are there only as long as nobody wants their room."""
        return self.units.blocks.num_used - int(np.count_nonzero(self.units.spared))

    @property
    def _room(self) -> int:
        """Blocks that are free or that the prefix cache can do without, promised ones too."""
        units = self.units
        return units.blocks.num_free + units.num_idle + self.evictable * units.num_lasting

    @property
    def available(self) -> int:
        """Units that can be had and were not promised."""
        ids = self.allocator.num_free + self.evictable
        return (min(ids, self._room // self.units.per_unit) if self.units.per_unit else ids) - self.promised

    def has(self, n: int, states: int = 0, behind: BlockIds | None = None) -> bool:
        """Whether ``n`` units that were not promised can be had, and states for so many sequences, if one goes on ``behind`` others."""
        ids, blocks = n + self.promised, (n + self.promised) * self.units.per_unit + states * self.states.per_sequence
        if ids <= self.allocator.num_free and blocks <= self.units.blocks.num_free:  # spares asking the prefix cache
            return True
        again = 0 if behind is None else self.units.idle_of(self.needs.of_units(behind))
        return ids <= self.allocator.num_free + self.evictable and blocks + again <= self._room

    @property
    def capacity(self) -> int:
        """Units that one sequence could have at once."""
        ids, per_unit = self.allocator.num_blocks, self.units.per_unit
        return min(ids, (self._total - self.states.per_sequence) // per_unit) if per_unit else ids

    @property
    def _total(self) -> int:
        return self.units.blocks.num_blocks - (self.null_block is not None)

    def could_hold(self, cached: int, new: int) -> bool:
        """Whether the pool is large enough for a sequence of so many cached units, and as many new ones at once."""
        blocks = cached * self.units.num_lasting + new * self.units.per_unit + self.states.per_sequence
        return blocks <= self._total and cached + new <= self.allocator.num_blocks

    def check(self, n: int, subject: str, *, states: int = 0) -> None:
        """Raise OutOfBlocksError unless `has`. Changes nothing."""
        if not self.has(n, states):
            blocks, per, each = self.units.blocks, self.units.per_unit, self.states.per_sequence
            room = f"{blocks.num_free} free and {self._room - blocks.num_free} evictable, {self.promised * per} of them promised"
            got = f"a request for {n * per + states * each}: {n} times {self.units.num_tokens} tokens in all groups"
            raise too_few(subject, self._room - self.promised * per, f"{room}, of {blocks.num_blocks} in the pool", got)

    def take(self, n: int, subject: str, *, promised: int = 0, states: int = 0) -> BlockIds:
        """Allocate ``n`` units, and see to it that states for so many sequences are free; all or none."""
        self.check(n - promised, subject, states=states)
        self._make_room(n, n * self.units.per_unit + states * self.states.per_sequence)
        fresh = self.allocator.allocate(n)
        self.units.add(fresh)
        self.promised -= promised
        return fresh

    def _make_room(self, ids: int, blocks: int) -> None:
        """Evict until so many units and blocks are free, of which there are enough.

        First goes what was let go within prefixes, then ends of prefixes with all their blocks, last what was let go where prompts
        ended: a prefix whose blocks are all there but for those is of no use.
        """
        units = self.units
        while (missing := blocks - units.blocks.num_free) > 0 or ids > self.allocator.num_free:
            before = units.blocks.num_free
            units.drop(missing, ends=False)
            if units.blocks.num_free > before:
                continue
            if evictable := self.evictable:
                few = max(missing // self.units.table.shape[1], ids - self.allocator.num_free, 1)
                self.evict(min(few, evictable))
            else:
                units.drop(missing, ends=True)
                if units.blocks.num_free == before:  # `has` has counted what is not there: better to say so than to look for ever
                    raise IntegrityError(
                        "GroupedBlocks",
                        expected=f"{missing} more blocks, as counted",
                        got="none that can be evicted",
                        fix="report it with the calls before",
                    )

    def unit_blocks(self, units: BlockIds) -> BlockIds:
        """Return the blocks of units."""
        return self.units.table[units]

    def longest(self, match: PrefixMatch) -> PrefixMatch:
        """Return what was found of the tokens, though not all groups can go on behind it."""
        return self._longest[1] if self._longest[0] is match and self._longest[1] is not None else match

    def give_back(self, blocks: BlockIds) -> None:
        """Release units that the prefix cache has no more."""
        self.units.uncache(blocks)
        super().give_back(blocks)

    def stored(self, blocks: BlockIds) -> None:
        """Note that units are cached from now on."""
        self.needs.stored(blocks)

    def replace(self, old: BlockIds, new: BlockIds) -> None:
        """Let cached units have what they lack and equal ones of a sequence have."""
        self.units.replace(old, new)

    def copies(self, pairs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the blocks to copy for units to copy."""
        return self.units.copies(pairs)

    def match(self, tokens: npt.NDArray[Any], namespace: Namespace) -> PrefixMatch:
        """Find the longest prefix behind which all groups can go on."""
        return self.usable(super().match(tokens, namespace), tokens, namespace)

    def usable(self, longest: PrefixMatch, tokens: npt.NDArray[Any], namespace: Namespace) -> PrefixMatch:
        """Return the longest prefix behind which all groups can go on, of what is cached."""
        match = longest
        if (count := self._usable(match.blocks)) < match.blocks.size:
            match = super().match(tokens[: count * self.units.num_tokens], namespace)
        self._longest = match, longest
        return match

    def use(self, match: PrefixMatch) -> None:
        """Note where prompts part: what is let go there, and where the tokens still were the same, is given up last."""
        self.units.mark_ends(self.needs.last_of(match.blocks))
        if self._longest[0] is match and self._longest[1] is not None:
            ends = self.needs.last_of(self._longest[1].blocks)
            self.units.mark_ends(ends[self.units.is_cached[ends]])  # others have been evicted since, to make room

    def _usable(self, units: BlockIds) -> int:
        """Return behind how many of cached units, at most, each group has what it needs."""
        can = self.needs.can_go_on(units, np.arange(1, units.size + 1) * self.units.num_tokens)
        if self.units.states.size:
            can &= (self.units.table[np.ix_(units, self.units.states)] >= 0).all(axis=1)
        return int((np.flatnonzero(can) + 1).max(initial=0))

    def ends(self, blocks: BlockIds, num_tokens: int) -> Any:
        """Return behind which numbers of tokens all groups can go on; within what was found, a state is of no use."""
        counts = np.arange(num_tokens + 1)
        return counts % max(num_tokens, 1) == 0 if self.states.per_sequence else self.needs.can_go_on(blocks, counts)

    def hold(self, blocks: BlockIds) -> Index:
        """Need what a sequence that goes on behind cached units needs of them; `unhold` takes what is returned."""
        places = self.needs.of_units(blocks)
        self.units.hold(places)
        return places

    def unhold(self, held: Any) -> None:
        """Need it no longer."""
        self.units.unhold(held)

    def settle(self, rows: Index) -> None:
        """Let rows need what follows from their units and from what is computed of them."""
        self.needs.settle(rows)

    def written(self, rows: Index, counts: Index, *, spare: bool = True) -> None:
        """Let rows need what follows from so many tokens; what they let go is spared, or given back."""
        self._rows.written[rows] = counts
        self.needs.settle(rows, spare=spare)

    def blocks_of(self, blocks: BlockIds) -> tuple[BlockIds, ...]:
        """Return the blocks of units in each group; -1 for what is not there."""
        units = self.units
        places = zip(units.starts, units.widths, strict=True)
        return tuple(units.table[blocks, start : start + width].reshape(-1) for start, width in places)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self.units.blocks.num_blocks

    @property
    def unused(self) -> int:
        """Units that a new sequence can have without evicting or giving up any block, and that were not promised."""
        ids, per_unit = self.allocator.num_free, self.units.per_unit
        blocks = self.units.blocks.num_free - self.states.per_sequence
        return (min(ids, blocks // per_unit) if per_unit else ids if blocks >= 0 else 0) - self.promised

    def leave(self, row: int) -> None:
        """Let a row need nothing, and release its states. A prompt that goes on with its tokens needs what it needed: that goes last."""
        self.units.mark_ends(self.needs.last_of(self._rows.blocks(row, 0, int(self._rows.shared[row]))))
        self.needs.leave(row)
        self.states.leave(row)

    def checkpoint(self, rows: Index) -> None:
        """Keep states of rows that have computed far enough behind a cached unit."""
        for row in self.states.checkpoint(rows):
            self.needs.renew(row)

    def states_due(self, rows: Index, new: int) -> int:
        """Return how many of rows need a state of their own before they go on beside ``new`` units.

        A checkpoint that only its row needs becomes that row's again where there is no room for a copy.
        """
        owed = self.states.owed(rows)
        if owed.size and not self.has(new, owed.size):
            mine = [row for row in owed.tolist() if self.states.is_alone(row)]
            if self.has(new, owed.size - len(mine)):
                for row in mine:
                    self.needs.take_back(row)
                    self.states.take_back(row)
                owed = self.states.owed(rows)
        return int(owed.size)

    def keeps(self, row: int, num_tokens: int) -> bool:
        """Whether a row can go on behind its first ``num_tokens`` tokens: what they need is there still."""
        if (is_behind := bool(num_tokens >= self._rows.reach(row))) or self.states.per_sequence:
            return is_behind
        if 0 < num_tokens < self._rows.least[row]:
            return False
        return bool(self.needs.can_go_on(self._rows.blocks(row), np.array([num_tokens]))[0])

    def shortest(self, row: int) -> int:
        """Return a number of tokens from which on a row `keeps` all: what is before was let go, or is in a state."""
        computed = int(self._rows.reach(row))
        if self.states.per_sequence:
            return computed
        lost = np.flatnonzero(~self.needs.can_go_on(self._rows.blocks(row), np.arange(computed)))
        return int((lost + 1).max(initial=int(self._rows.least[row])))

    def check_kept(self, subject: str, row: int, num_tokens: int) -> None:
        """Raise IndexRangeError unless a row `keeps` so many tokens, and OutOfBlocksError where promises need what it would need again."""
        if not self.keeps(row, num_tokens):
            expected = f"at least {self.shortest(row)}: what was before is let go, came in part, or is in a state"
            fix = "fork() before tokens are computed that may be undone, or begin() the prompt again, which finds what is cached"
            raise IndexRangeError(subject, expected=expected, got=num_tokens, fix=fix)
        if num_tokens < self._rows.reach(row):
            again = self.units.idle_of(self.needs.behind(row, num_tokens))
            if again and again > (spare := self._room - self.promised * self.units.per_unit):
                raise too_few(subject, spare, "evictable ones that are not promised", f"a need for {again} that were let go")

    def check_integrity(self, held: Sequence[Any]) -> None:
        """Prove that blocks of the pool are free, of one unit or of one sequence, and needed as often as is counted."""
        check_units(self.units, np.concatenate([self.needs.of_all(), *held]), self.states.own())
