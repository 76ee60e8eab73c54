"""The pool and the table that all layers of a cache share.

A step is one forward pass. The first layer that writes grows the table for all; the last one ends the step. Whatever the
order of the layers, each has its own length, and the table's length is the longest::

    layer 0  ############----        # written    - this step
    layer 1  ############            the table already has room for this step
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from kvdock.cache.paged import PagedKVCache
from kvdock.errors import ArgumentValueError, IndexRangeError
from kvdock.integrations.transformers.bound import Bound
from kvdock.integrations.transformers.slots import SlotTensor
from kvdock.scheduler import BlockAllocator, BlockIds, BlockTable

__all__ = ["PagedState"]


class PagedState:
    """One batch of sequences in a pool that other states may share.

    A pool and its states belong to one thread at a time: whoever starts a step, until the step ends.

    Args:
        pool: where keys and values are.
        allocator: which blocks of it are free; one for each pool.
    """

    def __init__(self, pool: PagedKVCache, allocator: BlockAllocator) -> None:
        self.pool = pool
        self.allocator = allocator
        self.table = BlockTable(allocator, pool.block_size)
        self.lengths = [0] * pool.num_layers
        self.bound: Bound | None = None
        self._slots = SlotTensor(pool.device)
        self._start = 0  # of the current step
        self._behind = 0  # layers that have not written in it

    def fork(self) -> PagedState:
        """Return the same tokens in the same blocks, for another future."""
        self.check_whole("deepcopy")
        other = PagedState(self.pool, self.allocator)
        with self.change():
            other.table = self.table.fork()
        other.lengths = list(self.lengths)
        other.bound = self.bound and self.bound.fork()
        return other

    def begin_with(self, bound: Bound, blocks: BlockIds) -> None:
        """Begin a batch, in an empty table, with blocks of a prefix cache.

        Args:
            bound: the batch.
            blocks: int64 ``[prompts, bound.past / block_size]``; -1 for padding, which is read as zeros.

        Raises:
            OutOfBlocksError: there is padding, and no free block for it. Nothing was changed.
        """
        with self.change():
            padding = self.allocator.allocate(int((blocks < 0).any()))
            try:
                for layer in range(len(self.lengths) if padding.size else 0):
                    self.pool.k_cache(layer)[int(padding[0])].zero_()
                    self.pool.v_cache(layer)[int(padding[0])].zero_()
                self.table.adopt(np.where(blocks < 0, padding, blocks) if padding.size else blocks)
            finally:
                self.allocator.release(padding)
        self._slots.forget(0)
        self.lengths = [bound.past] * len(self.lengths)
        self.bound = bound

    def forget_past(self) -> None:
        """Let a batch that just begins be computed from its first token."""
        self._truncate(0)
        if self.bound:
            self.bound.past = 0

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        """Write one layer's new keys and values, ``[batch, heads, tokens, dim]``, behind those it has.

        Returns:
            how many tokens the layer had before.

        Raises:
            OutOfBlocksError: the pool has too few free blocks. Nothing was changed.
            ArgumentValueError: another batch size than that of the tokens already there, or more tokens than are left of a
                prompt that was bound. Nothing was changed.
        """
        start, tokens = self.lengths[layer], keys.shape[2]
        if not tokens:
            return start
        stop = start + tokens
        if stop > self.table.length:
            self._begin(keys.shape[0], tokens)
        try:
            slots = self._slots.upto(self.table, stop)[:, start:]
            with torch.no_grad():
                self.pool.update(layer, _token_major(keys), _token_major(values), slots)
        except BaseException:
            self._undo()
            raise
        self.lengths[layer] = stop
        self._behind -= 1
        if not self._behind:
            self._end()
        return start

    def read(self, layer: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of tokens ``start`` to ``stop - 1`` as new ``[batch, heads, tokens, dim]``, contiguous."""
        slots = self._slots.upto(self.table, stop)[:, start:]
        keys, values = (_buffer(cache, *slots.shape) for cache in (self.pool.k_cache(layer), self.pool.v_cache(layer)))
        with torch.no_grad():
            self.pool.gather(layer, slots, out=(keys.transpose(1, 2), values.transpose(1, 2)))
        return keys, values

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens. Also the way on after a forward pass that failed in between.

        Raises:
            IndexRangeError: a layer has fewer. Nothing was changed.
        """
        if length > min(self.lengths):
            raise IndexRangeError(
                "PagedCacheForTransformers: length", expected=f"at most the {min(self.lengths)} tokens that every layer has", got=length
            )
        self._truncate(length)
        if self.bound and length < self.bound.prompts.length:
            self.bound.close(f"one whose prompts were cut to {length} tokens since")
            if self.bound.is_fresh:
                self.bound.past = min(self.bound.past, length)
        if not length:
            self.bound = None

    def select(self, rows: npt.ArrayLike) -> None:
        """Make row ``rows[i]`` the new row i; see `BlockTable.select`."""
        self.check_whole("changing the batch")
        with self.change():
            self.table.select(rows)
        self._slots.forget(0)
        if self.bound:
            self.bound.select(rows)

    def _begin(self, batch: int, tokens: int) -> None:
        """Start a step: make room in the table, and copy shared blocks that will be written, in all layers."""
        self.check_whole("a step")
        if self.bound:
            self.bound.check_first(tokens)
        with self.change(keep=True):
            if batch != self.table.batch_size:
                self._rebatch(batch)
            self._start = self.table.length
            pairs = self.table.grow(tokens)
            if self.bound:
                self.bound.begin(self._start, batch, tokens, self.table.length)
            self._behind = len(self.lengths)
            if len(pairs):
                self._slots.forget(self._start - self._start % self.table.block_size)
                self._copy_blocks(pairs)

    def _copy_blocks(self, pairs: BlockIds) -> None:
        """Copy blocks in all layers. If that fails the table names blocks without content, so it is emptied."""
        try:
            self.pool.copy_blocks(torch.from_numpy(pairs).to(self.pool.device))
        except BaseException:
            self.lengths = [0] * len(self.lengths)
            self.truncate(0)
            raise

    def _end(self) -> None:
        """End a step: every layer has written."""
        if self.bound:
            self.bound.is_fresh = False
        self.allocator.hand_over()

    def _rebatch(self, batch: int) -> None:
        """Change the number of rows: of an empty table, or by repeating the prompts of a batch that just begins."""
        bound = self.bound if self.bound and self.bound.is_fresh else None
        if bound:
            rows = bound.repeated(batch)
            if self.table.length:
                self.table.select(rows)
                self._slots.forget(0)
            bound.origin = bound.origin[rows]
        elif self.table.length:
            raise ArgumentValueError(
                "PagedCacheForTransformers: batch size",
                expected=f"{self.table.batch_size}, as in the {self.table.length} tokens that the cache holds",
                got=batch,
                fix="reset() it first, or bring the rows in with batch_repeat_interleave() or batch_select_indices()",
            )
        if not self.table.length:
            self.table.clear(batch)

    def _undo(self) -> None:
        """Go back to before a step that failed."""
        self.lengths = [min(length, self._start) for length in self.lengths]
        if self.table.length > self._start:
            self._truncate(self._start)

    def _truncate(self, length: int) -> None:
        """Cut table and layers."""
        with self.change():
            self.table.truncate(length)
        if self.bound:
            self.bound.seen.cut(length)
        self._slots.forget(length)
        self.lengths = [length] * len(self.lengths)
        self._behind = 0

    def check_whole(self, what: str) -> None:
        """Raise unless all layers are equally long."""
        if self._behind:
            raise ArgumentValueError(
                f"PagedCacheForTransformers: {what}",
                expected="layers of one length",
                got=f"lengths from {min(self.lengths)} to {max(self.lengths)}: a forward pass was interrupted, or two run at once",
                fix=f"go back with truncate({min(self.lengths)}), or reset()",
            )

    @contextmanager
    def change(self, *, keep: bool = False) -> Iterator[None]:
        """Own the allocator for a change; ``keep`` it afterwards unless the change failed."""
        self.allocator.claim()
        try:
            yield
        except BaseException:
            self.allocator.hand_over()
            raise
        if not keep:
            self.allocator.hand_over()


def _token_major(states: torch.Tensor) -> torch.Tensor:
    """View ``[batch, heads, tokens, dim]`` as ``[batch, tokens, heads, dim]``, elements of a head side by side."""
    states = states.transpose(1, 2)
    return states if states.stride(-1) == 1 or states.shape[-1] == 1 else states.contiguous()


def _buffer(cache: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
    """Allocate ``[batch, heads, tokens, dim]`` for what lies in a pool's ``[blocks, block_size, heads, dim]``."""
    return torch.empty((batch, cache.shape[2], tokens, cache.shape[3]), dtype=cache.dtype, device=cache.device)
