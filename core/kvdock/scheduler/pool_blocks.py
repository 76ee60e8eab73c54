"""The blocks that a manager can have: free ones, those that the prefix cache can do without, and those that it has promised.

::

    pool:   free | cached, evictable | cached, locked | own blocks of sequences        num_free + evictable >= promised, always
            |<--- available + promised --->|
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kvdock.errors import ArgumentValueError, OutOfBlocksError, UnsupportedError
from kvdock.prefix.interface import BlockIds, PrefixCache, PrefixHandle
from kvdock.scheduler.block_allocator import BlockAllocator

__all__ = ["PoolBlocks", "in_the_middle"]

T = TypeVar("T")


class PoolBlocks:
    """Takes blocks, evicting what is missing, and keeps promises.

    Args:
        allocator: which blocks are free.
        prefix: whose blocks can be evicted.

    Attributes:
        promised: blocks that sequences were promised and have not taken.
        is_busy: whether the prefix cache works for the manager, and its observers must not call that.
    """

    def __init__(self, allocator: BlockAllocator, prefix: PrefixCache) -> None:
        self.allocator = allocator
        self.prefix = prefix
        self.promised = 0
        self.is_busy = False
        self._size = 0  # of the prefix cache, when the manager was handed over

    def note_size(self) -> None:
        """Note how much is stored, since the pool will be left alone."""
        self._size = self.prefix.size_info.total_size

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

    def check(self, n: int, subject: str) -> None:
        """Raise OutOfBlocksError unless ``n`` blocks that were not promised can be had. Changes nothing."""
        if n <= self.allocator.num_free - self.promised:  # spares asking the prefix cache
            return
        if n > self.available:
            raise OutOfBlocksError(
                subject,
                expected=f"at most {max(self.available, 0)} blocks: {self.allocator.num_free} free and {self.evictable} evictable, "
                f"{self.promised} of them promised, of {self.allocator.num_blocks} in the pool",
                got=f"a request for {n}",
                fix="finish sequences or release pins first, ask plan() whether a prompt fits, or make the pool larger",
            )

    def lock(self, handle: PrefixHandle, subject: str) -> None:
        """Lock what may have been evictable, unless a promise would be broken; OutOfBlocksError then."""
        self.prefix.lock_handle(handle)
        try:
            self.check(0, subject)
        except BaseException:
            self.prefix.lock_handle(handle, unlock=True)
            raise

    def take(self, n: int, subject: str, *, promised: int = 0) -> BlockIds:
        """Allocate ``n`` blocks, of which ``promised`` were promised to whoever asks; all or none. They are not promised any more.

        Raises:
            OutOfBlocksError: too few; nothing was changed.
        """
        self.check(n - promised, subject)
        # No more is evicted than is missing: a cached block that nobody needs yet may still be matched.
        missing = n - self.allocator.num_free
        if missing > 0:
            self.allocator.release(self.change(self.prefix.evict, missing))
        blocks = self.allocator.allocate(n)
        # Last: a request that was refused has used up no promise.
        self.promised -= promised
        return blocks


def in_the_middle() -> UnsupportedError:
    """Describe a call of the manager while another is not over."""
    return UnsupportedError(
        "CacheManager",
        expected="calls one after the other",
        got="one from an observer of its prefix cache, in the middle of another",
        fix="note the event, and call the manager when the call that caused it has returned",
    )
