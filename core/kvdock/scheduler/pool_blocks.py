"""The blocks that a manager can have: free ones, those that the prefix cache can do without, and those that it has promised.

::

    pool:   free | cached, evictable | cached, locked | own blocks of sequences        num_free + evictable >= promised, always
            |<--- available + promised --->|
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvdock.errors import ArgumentValueError, IndexRangeError
from kvdock.prefix.interface import BlockIds, Namespace, PrefixCache, PrefixHandle, PrefixMatch
from kvdock.scheduler.block_allocator import BlockAllocator
from kvdock.scheduler.refusals import too_few
from kvdock.scheduler.rows import Index, Rows
from kvdock.scheduler.states import States
from kvdock.scheduler.tables import GroupTable, OnlyTable
from kvdock.scheduler.tiers import Tiers

__all__ = ["PoolBlocks"]

T = TypeVar("T")

_PARTS = 64
"""A pool is given up to tiers in so many parts at most, of which one is free then."""


class PoolBlocks:
    """Takes blocks, evicting what is missing, and keeps promises.

    These are the blocks of one layer group that keeps all tokens: whoever holds a block needs it, and what several groups have to
    note beyond that is nothing here. `kvdock.scheduler.grouped_blocks.GroupedBlocks` says what it is.

    Args:
        allocator: which blocks are free.
        prefix: whose blocks can be evicted.
        rows: what is known of the sequences.

    Attributes:
        allocators: all that hand out blocks, or units.
        promised: blocks that sequences were promised and have not taken.
        is_busy: whether the prefix cache works for the manager, and its observers must not call that.
        states: the states of sequences; there are none here.
        tables: the block table of each layer group.
        finest: tokens in which every block of any layer group begins.
        lets_go: whether a layer group lets tokens go.
        uses_parts: whether a sequence may go on within a cached block.
        null_block: what is never handed out, if there is such a block.
        reserved: that block, where ``allocator`` counts it.
        tiers: where what is evicted goes, if there are any.
    """

    uses_parts = True
    lets_go = False

    def __init__(self, allocator: BlockAllocator, prefix: PrefixCache, rows: Rows, *, null_block: bool = False) -> None:
        self.allocator = allocator
        self.allocators: tuple[BlockAllocator, ...] = (allocator,)
        self.prefix = prefix
        self.states = States(None, rows)
        self.tables: tuple[GroupTable, ...] = (OnlyTable(rows),)
        self.finest, self.promised = rows.block_size, 0
        self.is_busy = False
        self.null_block = self.reserved = int(allocator.allocate(1)[0]) if null_block else None
        self.tiers: Tiers | None = None
        self._size = 0  # of the prefix cache, when the manager was handed over

    def hand_over(self) -> None:
        """Belong to the next thread, and note how much is stored, since the pool will be left alone."""
        self._size = self.prefix.size_info.total_size
        self.allocator.hand_over()
        if self.tiers is not None:
            self.tiers.hand_over()

    def check_unchanged(self) -> None:
        """Raise if somebody else has stored, evicted or reset since: then the prefix cache names blocks that hold something else."""
        size = self.prefix.size_info.total_size
        if size != self._size:
            raise ArgumentValueError(
                "CacheManager: prefix",
                expected=f"the {self._size} tokens that were stored here",
                got=size,
                fix="let nobody else store, evict or reset in it: each manager has its own, and reset() empties it",
            )

    def table(self, subject: str, group: object) -> GroupTable:
        """Return the block table of a group, or raise."""
        if type(group) is not int or not 0 <= group < len(self.tables):
            expected = f"0 to {len(self.tables) - 1}, a layer group of the manager"
            raise IndexRangeError(subject, expected=expected, got=repr(group), fix="pass the index of a group in cache.groups")
        return self.tables[group]

    def match(self, tokens: npt.NDArray[Any], namespace: Namespace) -> PrefixMatch:
        """Find the longest prefix behind which a sequence can go on; it counts as no use."""
        return self.prefix.match_prefix(tokens, namespace, record=False)

    def longest(self, match: PrefixMatch) -> PrefixMatch:
        """Return the longest prefix that is cached, behind which a sequence may not be able to go on, for what was found just now."""
        return match

    def usable(self, longest: PrefixMatch, tokens: npt.NDArray[Any], namespace: Namespace) -> PrefixMatch:
        """Return what `match` would find of tokens of which this is the longest prefix that is cached."""
        return longest

    def use(self, match: PrefixMatch) -> None:
        """Note that a sequence goes on behind what was found, which is in use now."""

    def ends(self, blocks: BlockIds, num_tokens: int) -> Any:
        """Return behind which numbers of tokens a sequence can go on, from 0 to the ``num_tokens`` that cached blocks have."""
        return True

    def hold(self, blocks: BlockIds) -> Any:
        """Keep what a sequence that goes on behind cached blocks needs beside their lock; return what `unhold` takes."""

    def unhold(self, held: Any) -> None:
        """Keep it no longer."""

    def settle(self, rows: Index) -> None:
        """Note that rows may need other blocks than before: they have grown, were cut, or more of them is computed."""

    def written(self, rows: Index, counts: Index, *, spare: bool = True) -> None:
        """Note how many tokens of rows are written, whose ids may not be known; ``spare``: what they let go may be wanted again."""

    def leave(self, row: int) -> None:
        """Note that a row is about to give all its blocks up."""

    def stored(self, blocks: BlockIds) -> None:
        """Note that blocks belong to the prefix cache from now on."""

    def replace(self, old: BlockIds, new: BlockIds) -> None:
        """Note that a sequence goes on with cached blocks in the place of its own, which are about to be released."""

    def unit_blocks(self, units: BlockIds) -> BlockIds:
        """Return the blocks of the pool that units have, int32 ``[units, columns]``; -1 for none. Here a unit is a block."""
        return units[:, None]

    def evict(self, n: int) -> None:
        """Let the prefix cache give ``n`` blocks up, or somewhat more where tiers get them first; it can do without so many."""
        if self.tiers is None:
            gone = self.change(self.prefix.evict, n)
        else:
            # Copies are cheaper together, and so is looking up where they go: whole prompts at once, not the piece that is missing now.
            gone = self.change(self.prefix.evict, max(n, min(self.allocator.num_blocks // _PARTS, self.evictable)))
            try:
                self.change(self.tiers.give_up, gone, self.unit_blocks)
            except BaseException:  # a tier was interrupted: they are cached no more, and nobody else's
                self.give_back(gone)
                raise
        self.give_back(gone)

    def give_back(self, blocks: BlockIds) -> None:
        """Release blocks that the prefix cache has no more."""
        if self.tiers is not None:
            self.tiers.index.forget(blocks)
        self.allocator.release(blocks)

    def copies(self, pairs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the blocks of the pool to copy, for pairs of a sequence's."""
        return pairs

    def shortest(self, row: int) -> int:
        """Return a number of tokens from which on a row can be cut."""
        return 0

    def check_kept(self, subject: str, row: int, num_tokens: int) -> None:
        """Raise IndexRangeError unless a row can go on behind its first ``num_tokens`` tokens."""

    def check_integrity(self, held: Sequence[Any]) -> None:
        """Prove what is counted beside holders; ``held`` is what pins hold. Raises IntegrityError."""

    def blocks_of(self, blocks: BlockIds) -> tuple[BlockIds, ...]:
        """Return which blocks of the pool cached blocks are, for each layer group; -1 for what is not there."""
        return (blocks,)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self.allocator.num_blocks

    @property
    def unused(self) -> int:
        """Blocks that can be had without evicting any, and were not promised."""
        return self.allocator.num_free - self.promised

    @property
    def capacity(self) -> int:
        """Blocks that one sequence could have at once."""
        return self.allocator.num_blocks - (self.null_block is not None)

    def could_hold(self, cached: int, new: int) -> bool:
        """Whether the pool is large enough for a sequence of so many cached blocks, and as many new ones at once."""
        return cached + new <= self.capacity

    @property
    def used(self) -> int:
        """Blocks of the pool that sequences or the prefix cache hold."""
        return self.allocator.num_used

    @property
    def evictable(self) -> int:
        """Blocks that the prefix cache can do without."""
        return self.prefix.size_info.evictable_size // self.prefix.block_size

    @property
    def available(self) -> int:
        """Blocks that can be had and were not promised; below 0 where a lock has just broken a promise."""
        return self.allocator.num_free + self.evictable - self.promised

    def change(self, call: Callable[..., T], *args: Any, **how: Any) -> T:
        """Let the prefix cache change what it holds; what its observers hear of is not locked, released or noted yet."""
        self.is_busy = True
        try:
            return call(*args, **how)
        finally:
            self.is_busy = False

    def has(self, n: int, states: int = 0, behind: BlockIds | None = None) -> bool:
        """Whether ``n`` blocks that were not promised can be had, and states for so many sequences, if one goes on ``behind`` others."""
        return n <= self.allocator.num_free - self.promised or n <= self.available  # the first spares asking the prefix cache

    def check(self, n: int, subject: str, *, states: int = 0) -> None:
        """Raise OutOfBlocksError unless `has`. Changes nothing."""
        if not self.has(n):
            room = f"{self.allocator.num_free} free and {self.evictable} evictable, {self.promised} of them promised"
            raise too_few(subject, self.available, f"{room}, of {self.allocator.num_blocks} in the pool", f"a request for {n}")

    def lock(self, match: PrefixMatch, subject: str) -> Any:
        """Lock and hold what may have been evictable; OutOfBlocksError where a promise would be broken. `unlock` takes the result."""
        self.prefix.lock_handle(match.handle)
        held = self.hold(match.blocks)
        try:
            self.check(0, subject)
        except BaseException:
            self.unlock(match.handle, held)
            raise
        return held

    def unlock(self, handle: PrefixHandle, held: Any) -> None:
        """Undo `lock`."""
        self.unhold(held)
        self.prefix.lock_handle(handle, unlock=True)

    def states_due(self, rows: Index, new: int) -> int:
        """Return how many of rows need a state of their own before they go on beside ``new`` blocks."""
        return 0

    def checkpoint(self, rows: Index) -> None:
        """Keep states of rows that have computed far enough."""

    def take(self, n: int, subject: str, *, promised: int = 0, states: int = 0) -> BlockIds:
        """Allocate ``n`` blocks, of which ``promised`` were promised to whoever asks; all or none. They are not promised any more.

        Raises:
            OutOfBlocksError: too few; nothing was changed.
        """
        self.check(n - promised, subject, states=states)
        # No more is evicted than is missing: a cached block that nobody needs yet may still be matched.
        missing = n - self.allocator.num_free
        if missing > 0:
            self.evict(missing)
        blocks = self.allocator.allocate(n)
        # Last: a request that was refused has used up no promise.
        self.promised -= promised
        return blocks
