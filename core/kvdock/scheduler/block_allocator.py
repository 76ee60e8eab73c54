"""Free blocks of one pool, and how many hold each of the others.

::

    stack:   | free blocks .................. | unused |        every block is either below the top of the stack with
             0                               top                count 0, or off the stack with count >= 1
    counts:  holders of each block

`BlockAllocator.check_integrity` proves that picture and prints the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.errors import ArgumentTypeError, ArgumentValueError, IndexRangeError, IntegrityError, OutOfBlocksError
from kvdock.prefix.inputs import MAX_SLOTS, as_array, count_of
from kvdock.prefix.interface import BlockIds
from kvdock.prefix.ownership import NotCopied, OneThread
from kvdock.scheduler.decisions import Decisions

__all__ = ["BlockAllocator", "checked_num_blocks"]

_ONE = np.int32(1)  # of the counts' own type: with another, `ufunc.at` takes twenty times as long


def checked_num_blocks(subject: str, num_blocks: object, block_size: int = 1) -> int:
    """Return a number of blocks whose slots an int32 can name, or raise before any memory is taken."""
    count = count_of(f"{subject}: num_blocks", num_blocks, 1)
    if count > MAX_SLOTS // block_size:
        raise ArgumentValueError(
            f"{subject}: num_blocks",
            expected=f"at most {MAX_SLOTS // block_size}, since a pool has at most 2**31 slots",
            got=count,
            fix="use several pools, each with a manager of its own",
        )
    return count


class BlockAllocator(NotCopied, OneThread):
    """Hands out the blocks of one pool and counts who holds them. `CacheManager` has one; an engine needs none beside it.

    The order is a function of the calls alone, so that equal calls on two ranks give equal blocks. Blocks released last
    are handed out first. Every call costs time in the blocks it touches, never in the size of the pool.

    It belongs to one thread at a time, that of the first call; see `hand_over`. It cannot be copied or pickled.

    Args:
        num_blocks: blocks in the pool, 1 to 2**31. Their ids are 0 to ``num_blocks - 1``.

    Attributes:
        num_extra: holders beyond one of each block in use: 0 where nothing is shared.
        decisions: where it notes what it hands out, if anywhere.
    """

    decisions: Decisions | None = None

    def __init__(self, num_blocks: int) -> None:
        checked_num_blocks("BlockAllocator", num_blocks)
        self._counts = np.zeros(num_blocks, dtype=np.int32)
        self._stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._top = num_blocks
        self._place = np.empty(num_blocks, dtype=np.int32)  # scratch of `_distinct`
        self.num_extra = 0

    def __repr__(self) -> str:
        return f"BlockAllocator(num_blocks={self.num_blocks}, num_free={self.num_free})"

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return len(self._counts)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return self._top

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self._top

    def ref_counts(self, blocks: npt.ArrayLike) -> npt.NDArray[np.int32]:
        """Return how many hold each of ``blocks``, in their order; 0 for free ones. `IndexRangeError` for ids outside the pool."""
        return self._counts[self._checked("ref_counts", blocks)]

    def holders(self, blocks: BlockIds) -> npt.NDArray[np.int32]:
        """Return how many hold each of ``blocks``, ids of this pool, which are not checked."""
        return self._counts[blocks]

    def allocate(self, n: int) -> BlockIds:
        """Take ``n`` free blocks, all or none; each has one holder then.

        Returns:
            int32 ``[n]``, the caller's own array.

        Raises:
            OutOfBlocksError: fewer are free. Nothing was taken.
        """
        self._enter()
        if count_of("BlockAllocator.allocate: n", n) > self._top:
            raise OutOfBlocksError(
                "BlockAllocator.allocate",
                expected=f"at most {self._top} blocks (free now, of {self.num_blocks} in the pool)",
                got=f"a request for {n}",
                fix="release blocks first, or make the pool larger: num_blocks or max_kv_memory_bytes in the cache's config",
            )
        bottom = self._top - n
        # From the top: what was released last is used first, and a new pool is used from block 0 on.
        blocks = self._stack[bottom : self._top][::-1].copy()
        self._counts[blocks.astype(np.intp)] = 1  # indices of another width take twice the time
        self._top = bottom
        if self.decisions is not None:
            self.decisions.note(b"allocate", blocks)
        return blocks

    def share(self, blocks: npt.ArrayLike) -> None:
        """Add a holder to each of ``blocks``; to one that is named twice, two.

        Raises:
            ArgumentValueError: a block is free. Nothing was changed.
            IndexRangeError: an id is outside the pool. Nothing was changed.
        """
        self._enter()
        ids = self._checked("share", blocks)
        free = ids[self._counts[ids] == 0]
        if free.size:
            raise ArgumentValueError(
                "BlockAllocator.share: blocks", expected="blocks in use", got=f"free blocks {_some(free)}", fix="allocate them first"
            )
        np.add.at(self._counts, ids, _ONE)
        self.num_extra += ids.size

    def release(self, blocks: npt.ArrayLike) -> BlockIds:
        """Take a holder from each of ``blocks``; from one that is named twice, two. Without holders a block is free.

        Returns:
            those that are free now, int32.

        Raises:
            ArgumentValueError: a block has fewer holders than that: somebody frees it twice. Nothing was changed.
            IndexRangeError: an id is outside the pool. Nothing was changed.
        """
        self._enter()
        ids = self._checked("release", blocks)
        # `at`, since an id may be named twice, which `counts[ids] -= 1` would count once.
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
        # Backwards, so that `allocate` returns them in the order in which they were named.
        self._stack[self._top : self._top + free.size] = free[::-1]
        self._top += free.size
        self.num_extra -= ids.size - free.size
        if self.decisions is not None:
            self.decisions.note(b"release", ids)
        return free

    def check_integrity(self) -> None:
        """Prove that free and used blocks partition the pool. Costs time in its size.

        Raises:
            IntegrityError: they do not; the text has the numbers.
        """
        free = self._stack[: self._top]
        numbers = {
            "blocks": self.num_blocks,
            "on the free stack": self._top,
            "distinct there": np.unique(free).size,
            "with no holder": int((self._counts == 0).sum()),
            "on the stack with a holder": int((self._counts[free] != 0).sum()),
            "with fewer than no holder": int((self._counts < 0).sum()),
            "extra holders uncounted": int(self._counts.sum()) - self.num_used - self.num_extra,
        }
        expected = {"blocks": self.num_blocks, "on the free stack": self._top, "distinct there": self._top, "with no holder": self._top}
        if any(count != expected.get(what, 0) for what, count in numbers.items()):
            got = ", ".join(f"{count} {what}" for what, count in numbers.items())
            raise IntegrityError("BlockAllocator", expected="every block free or held", got=got, fix="report it with the calls before")

    def _distinct(self, ids: npt.NDArray[np.intp]) -> BlockIds:
        """Drop repeated ids without sorting: of equal ones, the last to write its place stays."""
        places = np.arange(ids.size, dtype=np.int32)
        self._place[ids] = places
        distinct: BlockIds = ids[self._place[ids] == places].astype(np.int32)
        return distinct

    def _checked(self, method: str, blocks: npt.ArrayLike) -> npt.NDArray[np.intp]:
        """Return ids as a flat array of indices, all of them inside the pool."""
        ids = as_array(f"BlockAllocator.{method}: blocks", blocks)
        # numpy takes an empty list for floats.
        if ids.dtype.kind not in "iu" and ids.size:
            raise ArgumentTypeError(f"BlockAllocator.{method}: blocks", expected="integers", got=f"{ids.dtype} {_some(ids)}")
        ids = ids.astype(np.intp, copy=False).ravel()
        if ids.size and (ids.min() < 0 or ids.max() >= self.num_blocks):
            foreign = ids[(ids < 0) | (ids >= self.num_blocks)]
            raise IndexRangeError(
                f"BlockAllocator.{method}: blocks",
                expected=f"ids from 0 to {self.num_blocks - 1}",
                got=_some(foreign),
                fix="pass only ids that this allocator handed out",
            )
        return ids


def _some(values: npt.NDArray[Any]) -> str:
    shown: Sequence[object] = values.ravel()[:8].tolist()
    return f"{shown} and {values.size - 8} more" if values.size > 8 else f"{shown}"
