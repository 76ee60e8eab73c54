"""Numbers for what is in tiers, by token ids: of all that is there, and of what is before it.

A prefix whose first blocks are in the pool still has numbers for them: nothing is where these numbers are. The index compares token ids,
whole runs at once, so that no two prefixes are ever taken for one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.errors import IntegrityError
from kvdock.prefix.interface import BlockIds, Namespace, PrefixHandle, PrefixMatch
from kvdock.prefix.radix import RadixPrefixCache
from kvdock.scheduler.block_allocator import BlockAllocator
from kvdock.scheduler.published import GivenUp

__all__ = ["PARTS", "TierIndex"]

PARTS = 64
"""What is full gives up at least one of so many parts: a few calls, each for many, instead of many for a few."""


class TierIndex:
    """Numbers of units by their token ids. What was used longest ago is forgotten when numbers run out, lowest priorities first.

    Args:
        num_units: numbers that there are.
        block_size: tokens of a unit.
        on_forget: called with numbers that stand for nothing from now on.
    """

    def __init__(self, num_units: int, block_size: int, on_forget: Callable[[BlockIds], None]) -> None:
        self._size, self._on_forget = block_size, on_forget
        self._prefixes = RadixPrefixCache(block_size, "priority")
        self._numbers = BlockAllocator(num_units)

    def hand_over(self) -> None:
        """Belong to the next thread."""
        self._prefixes.hand_over()
        self._numbers.hand_over()

    def find(self, ids: npt.NDArray[Any], namespace: Namespace) -> PrefixMatch:
        """Return the numbers of a prefix, as far as it has any. Changes nothing."""
        return self._prefixes.match_prefix(ids, namespace, record=False)

    def use(self, handle: PrefixHandle) -> None:
        """Note that a prefix is in use now."""
        self._prefixes.record_match(handle, handle.cached_len)

    def lock(self, handle: PrefixHandle, *, unlock: bool = False) -> None:
        """Let a prefix keep its numbers, once more; or once less."""
        self._prefixes.lock_handle(handle, unlock)

    def numbers_of(self, part: GivenUp) -> BlockIds | None:
        """Return the numbers of all units of a prefix, new ones where it has none; None where there are too few."""
        match = self.find(part.ids, part.namespace)
        more = part.ids.size // self._size - match.blocks.size
        if not more:
            self.use(match.handle)
            return match.blocks
        if more > self._numbers.num_free and not self._free(more - self._numbers.num_free, match.handle):
            return None
        fresh = self._numbers.allocate(more)
        ids = part.ids[match.handle.cached_len :]
        self._prefixes.insert_prefix(ids, fresh, part.namespace, behind=match.handle, priority=part.priority)
        return np.concatenate((match.blocks, fresh))

    def _free(self, count: int, but: PrefixHandle) -> bool:
        """Forget what was used longest ago, but for a prefix; return whether there was enough."""
        self.lock(but)
        evictable = self._prefixes.size_info.evictable_size // self._size
        if is_enough := count <= evictable:
            gone = self._prefixes.evict(min(max(count, self._numbers.num_blocks // PARTS), evictable))
            self._on_forget(gone)
            self._numbers.release(gone)
        self.lock(but, unlock=True)
        return is_enough

    def clear(self) -> None:
        """Forget everything."""
        self._numbers.release(self._prefixes.reset())

    def check_integrity(self) -> BlockIds:
        """Return the numbers that can be found, and prove that no others are in use, and that nothing is locked. Raises IntegrityError."""
        self._prefixes.check_integrity()
        self._numbers.check_integrity()
        known, locks = self._prefixes.stored_blocks(), self._prefixes.num_locks
        if locks or known.size != self._numbers.num_used:
            got = f"{locks} locks, {self._numbers.num_used} numbers in use"
            raise IntegrityError("TierIndex", expected=f"no locks, and {known.size} numbers in use", got=got)
        return known
