"""Free blocks of one pool, and how many tables hold each of the others.

::

    stack:   | free blocks .................. | unused |        every block is either below the top of the stack with
             0                               top                count 0, or off the stack with count >= 1
    counts:  holders of each block

`BlockAllocator.check_integrity` proves that picture and prints the numbers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvdock.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    IndexRangeError,
    IntegrityError,
    OutOfBlocksError,
    WrongThreadError,
)
from kvdock.spec import check_int

__all__ = ["BlockAllocator", "BlockIds"]

BlockIds: TypeAlias = npt.NDArray[np.int64]
"""An array of block ids."""

_ONE = np.int32(1)  # of the counts' own type: with another, `ufunc.at` takes twenty times as long


class BlockAllocator:
    """Hands out the blocks of one pool and counts who holds them.

    The order is a function of the calls alone, so that equal calls on two ranks give equal blocks. Blocks released last
    are handed out first. Every call costs time in the blocks it touches, never in the size of the pool.

    An allocator belongs to one thread: to the one that changes it first, until that one calls `hand_over` or ends. A change
    by another thread is refused with `WrongThreadError`. Reading (`num_free`, `num_used`, `ref_count`) is open to every
    thread, and `release_later` also to finalizers.

    Args:
        num_blocks: blocks in the pool, at least 1. Their ids are 0 to ``num_blocks - 1``.
        reclaim: called with n when `allocate` lacks n free blocks, before it gives up, in the thread that allocates. It
            releases at least n blocks that can be done without, such as those of a prefix cache, or leaves everything as it
            is. It may use this allocator; what it allocates itself reclaims nothing. What it raises, `allocate` raises.
    """

    def __init__(self, num_blocks: int, reclaim: Callable[[int], None] | None = None) -> None:
        check_int("BlockAllocator: num_blocks", num_blocks, 1)
        self._counts = np.zeros(num_blocks, dtype=np.int32)
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int64)
        self._top = num_blocks
        self._place = np.empty(num_blocks, dtype=np.int64)  # scratch of `_distinct`
        self._late: deque[BlockIds] = deque()
        self._lock = threading.Lock()
        self._owner: threading.Thread | None = None
        self._reclaim = reclaim

    def __repr__(self) -> str:
        return f"BlockAllocator(num_blocks={self.num_blocks}, num_free={self.num_free})"

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return len(self._counts)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now."""
        with self._lock:
            self._settle()
            return self._top

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_free

    def ref_count(self, block: int) -> int:
        """Return how many hold ``block``; 0 when it is free. Raises `IndexRangeError` for an id outside the pool."""
        return int(self.ref_counts([block])[0])

    def ref_counts(self, blocks: npt.ArrayLike) -> npt.NDArray[np.int32]:
        """Return how many hold each of ``blocks``, in their order. Raises `IndexRangeError` for ids outside the pool."""
        with self._lock:
            self._settle()
            return self._counts[self._checked("ref_counts", blocks)]

    def allocate(self, n: int) -> BlockIds:
        """Take ``n`` free blocks, all or none; each has one holder then.

        Returns:
            int64 ``[n]``, the caller's own array.

        Raises:
            OutOfBlocksError: fewer are free, also after ``reclaim``. Nothing was taken.
        """
        check_int("BlockAllocator.allocate: n", n, 0)
        with self._lock:
            lacking = self._lacking(n)
            if lacking <= 0:
                return self._take(n)
        self._ask_for(lacking)
        with self._lock:
            if self._lacking(n) > 0:
                raise self._out_of_blocks(n)
            return self._take(n)

    def share(self, blocks: npt.ArrayLike) -> None:
        """Add a holder to each of ``blocks``; to one that is named twice, two.

        Raises:
            ArgumentValueError: a block is free. Nothing was changed.
            IndexRangeError: an id is outside the pool. Nothing was changed.
        """
        with self._lock:
            self._claim()
            ids = self._checked("share", blocks)
            free = ids[self._counts[ids] == 0]
            if free.size:
                raise ArgumentValueError(
                    "BlockAllocator.share: blocks", expected="blocks in use", got=f"free blocks {_some(free)}", fix="allocate them first"
                )
            np.add.at(self._counts, ids, _ONE)

    def release(self, blocks: npt.ArrayLike) -> None:
        """Take a holder from each of ``blocks``; from one that is named twice, two. Without holders a block is free.

        Raises:
            ArgumentValueError: a block has fewer holders than that: somebody frees it twice. Nothing was changed.
            IndexRangeError: an id is outside the pool. Nothing was changed.
        """
        with self._lock:
            self._claim()
            self._settle()
            self._release(self._checked("release", blocks))

    def release_later(self, blocks: BlockIds) -> None:
        """Release ``blocks`` before the next call that looks at the free ones.

        Changes nothing now, takes no lock, and asks for no thread: this is the call for finalizers, which the garbage
        collector runs anywhere, even in the middle of another method of this allocator. ``blocks`` must not change any more.
        """
        self._late.append(blocks)

    def claim(self) -> None:
        """Make the allocator the calling thread's own, as every change does. Raises `WrongThreadError` if it is another's."""
        with self._lock:
            self._claim()

    def hand_over(self) -> None:
        """Give the allocator up: it belongs to the thread that changes it next. Raises `WrongThreadError` in another thread."""
        with self._lock:
            self._claim()
            self._owner = None

    def check_integrity(self) -> None:
        """Prove that free and used blocks partition the pool. Costs time in its size.

        Raises:
            IntegrityError: they do not; the text has the numbers.
        """
        with self._lock:
            self._settle()
            free = self._stack[: self._top]
            numbers = {
                "blocks": self.num_blocks,
                "on the free stack": self._top,
                "distinct there": np.unique(free).size,
                "with no holder": int((self._counts == 0).sum()),
                "on the stack with a holder": int((self._counts[free] != 0).sum()),
                "with fewer than no holder": int((self._counts < 0).sum()),
            }
        expected = {"blocks": self.num_blocks, "on the free stack": self._top, "distinct there": self._top, "with no holder": self._top}
        if any(count != expected.get(what, 0) for what, count in numbers.items()):
            got = ", ".join(f"{count} {what}" for what, count in numbers.items())
            raise IntegrityError("BlockAllocator", expected="every block free or held", got=got, fix="report it with the calls before")

    def _claim(self) -> None:
        """Make the calling thread the owner, or raise."""
        me, owner = threading.current_thread(), self._owner
        if owner is me:
            return
        if owner is not None and owner.is_alive():
            raise WrongThreadError(
                "BlockAllocator",
                expected=f"to be changed by its own thread {owner.name!r}",
                got=f"a call from thread {me.name!r}",
                fix="give each thread its own, or call hand_over() in the first thread when it is done",
            )
        self._owner = me

    def _lacking(self, n: int) -> int:
        """Return how many blocks are missing for a request of the calling thread; at most 0 when it can be served."""
        self._claim()
        self._settle()
        return n - self._top

    def _take(self, n: int) -> BlockIds:
        """Pop ``n`` blocks off the stack."""
        bottom = self._top - n
        blocks = self._stack[bottom : self._top][::-1].copy()
        self._counts[blocks] = 1
        self._top = bottom
        return blocks

    def _ask_for(self, n: int) -> None:
        """Let ``reclaim`` free blocks. The lock is open meanwhile, since it calls `release`."""
        reclaim, self._reclaim = self._reclaim, None
        try:
            if reclaim is not None:
                reclaim(n)
        finally:
            self._reclaim = reclaim

    def _settle(self) -> None:
        """Release what `release_later` put off."""
        while self._late:
            self._release(self._checked("release_later", self._late.popleft()))

    def _release(self, ids: BlockIds) -> None:
        """Take one holder from each id, and push those without any on the stack."""
        np.subtract.at(self._counts, ids, _ONE)
        left = self._counts[ids]
        if left.size and left.min() < 0:
            np.add.at(self._counts, ids, _ONE)
            raise ArgumentValueError(
                "BlockAllocator.release: blocks",
                expected="blocks with as many holders as they are named",
                got=f"a double free of blocks {_some(ids[left < 0])}",
                fix="release each block once for each allocate or share",
            )
        free = self._distinct(ids[left == 0])
        self._stack[self._top : self._top + free.size] = free[::-1]
        self._top += free.size

    def _distinct(self, ids: BlockIds) -> BlockIds:
        """Drop repeated ids without sorting: of equal ones, the last to write its place stays."""
        places = np.arange(ids.size)
        self._place[ids] = places
        distinct: BlockIds = ids[self._place[ids] == places]
        return distinct

    def _checked(self, method: str, blocks: npt.ArrayLike) -> BlockIds:
        """Return ids as a flat int64 array, all of them inside the pool."""
        ids = np.asarray(blocks)
        if ids.dtype.kind not in "iu" and ids.size:
            raise ArgumentTypeError(f"BlockAllocator.{method}: blocks", expected="integers", got=f"{ids.dtype} {_some(ids)}")
        ids = ids.astype(np.int64, copy=False).ravel()
        if ids.size and (ids.min() < 0 or ids.max() >= self.num_blocks):
            foreign = ids[(ids < 0) | (ids >= self.num_blocks)]
            raise IndexRangeError(
                f"BlockAllocator.{method}: blocks",
                expected=f"ids from 0 to {self.num_blocks - 1}",
                got=_some(foreign),
                fix="pass only ids that this allocator handed out",
            )
        return ids

    def _out_of_blocks(self, n: int) -> OutOfBlocksError:
        """Describe a request that does not fit."""
        return OutOfBlocksError(
            "BlockAllocator.allocate",
            expected=f"at most {self._top} blocks (free now, of {self.num_blocks} in the pool)",
            got=f"a request for {n}",
            fix="release sequences that are done, or make the pool larger: num_blocks or max_kv_memory_bytes in the cache's config",
        )


def _some(values: npt.NDArray[np.generic], limit: int = 8) -> str:
    """Print the first few values of an array."""
    shown: Sequence[object] = values.ravel()[:limit].tolist()
    return f"{shown} and {values.size - limit} more" if values.size > limit else f"{shown}"
