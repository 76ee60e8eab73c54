"""The prefix cache of a pool: finding what is there, storing what was computed, giving up blocks when the pool is full.

::

    blocks of the pool:   | free | held by tables | held by tables and the prefix cache | held by the prefix cache |
                                                    locked: they cannot be evicted        evicted when blocks run out

Each stored block has one holder in the allocator for the prefix cache. A batch locks the prefixes that it found and those
that it stored, for as long as a table may hold their blocks; so what is evicted becomes free.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.errors import ArgumentValueError, StaleHandleError
from kvdock.integrations.transformers.prompts import Prompts
from kvdock.integrations.transformers.sharing import Sharing
from kvdock.prefix.inputs import slots_of
from kvdock.prefix.interface import Namespace, PrefixCache, PrefixHandle
from kvdock.scheduler import BlockAllocator, BlockIds

__all__ = ["Found", "Hold", "PrefixReuse"]


class Hold:
    """Locks that are given back when nobody has this object any more.

    Args:
        late: where to put the handles then. Garbage may be collected in the middle of a call of the prefix cache, or in
            another thread, so that they cannot be unlocked at once.
        epoch: how often everything was forgotten before.
    """

    def __init__(self, late: deque[PrefixHandle], epoch: int) -> None:
        self.epoch = epoch
        self._handles: list[PrefixHandle] = []
        weakref.finalize(self, late.extend, self._handles).atexit = False

    def lock(self, prefix: PrefixCache, handle: PrefixHandle) -> None:
        """Lock a handle until the end."""
        prefix.lock_handle(handle)
        self._handles.append(handle)


@attrs.frozen(eq=False)
class Found:
    """What of a batch is cached.

    Args:
        past: tokens of each row that need not be computed, padding included; a multiple of the block size.
        blocks: their blocks, int64 ``[rows, past / block_size]``; -1 for padding.
        hold: keeps them locked.
    """

    past: int
    blocks: BlockIds
    hold: Hold


class PrefixReuse:
    """A prefix cache and the allocator of the pool that its blocks are in.

    Like both of them it belongs to one thread at a time, and it hands the prefix cache over at the end of each call.

    Args:
        prefix: an empty prefix cache.
        num_blocks: blocks of the pool.
        generation: the model's ``GenerationConfig``, which names the token ids that end a sequence and that pad it; or None.
        sharing: what of a batch can be shared.

    Attributes:
        epoch: how often everything was forgotten.
    """

    def __init__(self, prefix: PrefixCache, num_blocks: int, generation: Any = None, sharing: Sharing | None = None) -> None:
        self.prefix = prefix
        self.generation = generation
        self.sharing = sharing or Sharing()
        self.epoch = self._stored = 0
        self.allocator = BlockAllocator(num_blocks, reclaim=self._reclaim)
        self._late: deque[PrefixHandle] = deque()

    def find(self, prompts: Prompts) -> Found:
        """Find and lock the longest past that all rows of a batch have. At least one token is left to compute.

        What lies in the middle of a block in one of the rows has its keys and values in other places of a block than where
        they are stored. So a row whose padding is no multiple of the block size has nothing but its padding for a past.
        """
        size, namespace = self.prefix.block_size, prompts.namespace
        with self._turn() as prefix:
            reach = [prompts.length - 1 if prompts.length <= self.sharing.limit else 0]
            for row, pad in enumerate(prompts.pads.tolist()):
                is_shared = pad % size == 0 and (self.sharing.padded or not pad)
                reach.append(pad + (prefix.match_prefix(prompts.row(row), namespace, record=False).handle.cached_len if is_shared else 0))
            past = min(reach) // size * size
            found = Found(past, np.full((len(prompts.pads), past // size), -1, dtype=np.int64), Hold(self._late, self.epoch))
            for row, pad in enumerate(prompts.pads.tolist()):
                used = prefix.match_prefix(prompts.row(row)[: max(past - pad, 0)], namespace, record=False)
                prefix.record_match(used.handle, prompts.length - pad)
                found.hold.lock(prefix, used.handle)
                found.blocks[row, min(pad // size, past // size) :] = used.indices[::size] // size
            return found

    def store(self, rows: Iterable[tuple[npt.NDArray[np.int64], BlockIds]], namespace: Namespace, hold: Hold) -> None:
        """Let prefixes be found from now on.

        Args:
            rows: for each prefix its token ids ``[n * block_size]`` and its blocks ``[n]``, which a table holds.
            namespace: with whom they are shared.
            hold: locks them for the table.
        """
        size = self.prefix.block_size
        with self._turn() as prefix:
            for ids, blocks in rows:
                stored = prefix.insert_prefix(ids, slots_of(blocks.astype(np.int32), size), namespace)
                fresh = blocks[stored.cached_len // size : stored.handle.cached_len // size]
                self.allocator.share(fresh)
                self._stored += fresh.size
                hold.lock(prefix, stored.handle)

    def forget(self) -> None:
        """Forget all prefixes; their blocks are free then, but for those that tables hold."""
        with self._turn() as prefix:
            self.allocator.release(prefix.reset()[:: prefix.block_size] // prefix.block_size)
            self.epoch, self._stored = self.epoch + 1, 0

    def settle(self) -> None:
        """Give back the locks that nobody needs any more; all other calls do so too."""
        with self._turn():
            pass

    def _reclaim(self, n: int) -> None:
        """Evict until ``n`` blocks more are free, or nothing if that cannot be."""
        with self._turn() as prefix:
            size = prefix.block_size
            while 0 < n <= prefix.size_info.evictable_size // size:
                blocks = prefix.evict(n * size)[::size] // size
                n -= int((self.allocator.ref_counts(blocks) == 1).sum())  # nobody else has them, unless somebody shared them by hand
                self.allocator.release(blocks)
                self._stored -= blocks.size

    @contextmanager
    def _turn(self) -> Iterator[PrefixCache]:
        """Use the prefix cache, and hand it over.

        Raises:
            WrongThreadError: another thread uses it.
            ArgumentValueError: somebody else stored, evicted or reset, so that it names blocks that hold something else.
        """
        self.prefix.hand_over()
        try:
            self._check_own()
            while self._late:
                with suppress(StaleHandleError):  # locked before everything was forgotten
                    self.prefix.lock_handle(self._late.popleft(), unlock=True)
            yield self.prefix
        finally:
            self.prefix.hand_over()

    def _check_own(self) -> None:
        """Raise unless the prefix cache holds as many blocks as were stored here and not evicted."""
        held = self.prefix.size_info.total_size // self.prefix.block_size
        if held != self._stored:
            raise ArgumentValueError(
                "PagedCacheForTransformers: prefix",
                expected=f"the {self._stored} blocks that this cache stored",
                got=f"{held}",
                fix="let nobody else store, evict or reset in it: forget_prefixes() empties it, and each cache has its own",
            )
