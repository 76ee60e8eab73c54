"""The pool and the table that all layers of a cache share.

A step is one forward pass. The first layer that writes grows the table for all; the last one ends the step. Whatever the
order of the layers, each has its own length, and the table's length is the longest::

    layer 0  ############----        # written    - this step
    layer 1  ############            the table already has room for this step
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy.typing as npt
import torch

from kvdock.cache.paged import PagedKVCache
from kvdock.errors import ArgumentValueError, IndexRangeError
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
        self._slots = SlotTensor(pool.device)
        self._start = 0  # of the current step
        self._behind = 0  # layers that have not written in it

    def fork(self) -> PagedState:
        """Return the same tokens in the same blocks, for another future."""
        self._check_whole("deepcopy")
        other = PagedState(self.pool, self.allocator)
        with self._change():
            other.table = self.table.fork()
        other.lengths = list(self.lengths)
        return other

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        """Write one layer's new keys and values, ``[batch, heads, tokens, dim]``, behind those it has.

        Returns:
            how many tokens the layer had before.

        Raises:
            OutOfBlocksError: the pool has too few free blocks. Nothing was changed.
            ArgumentValueError: another batch size than that of the tokens already there. Nothing was changed.
        """
        start, tokens = self.lengths[layer], keys.shape[2]
        stop = start + tokens
        if not tokens:
            return start
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
            self.allocator.hand_over()
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
        with self._change():
            self.table.truncate(length)
        self._slots.forget(length)
        self.lengths = [length] * len(self.lengths)
        self._behind = 0

    def select(self, rows: npt.ArrayLike) -> None:
        """Make row ``rows[i]`` the new row i; see `BlockTable.select`."""
        self._check_whole("changing the batch")
        with self._change():
            self.table.select(rows)
        self._slots.forget(0)

    def _begin(self, batch: int, tokens: int) -> None:
        """Start a step: make room in the table, and copy shared blocks that will be written, in all layers."""
        self._check_whole("a step")
        with self._change(keep=True):
            if batch != self.table.batch_size:
                self._rebatch(batch)
            self._start = self.table.length
            pairs = self.table.grow(tokens)
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

    def _rebatch(self, batch: int) -> None:
        """Change the number of rows of an empty table."""
        if self.table.length:
            raise ArgumentValueError(
                "PagedCacheForTransformers: batch size",
                expected=f"{self.table.batch_size}, as in the {self.table.length} tokens that the cache holds",
                got=batch,
                fix="reset() it first, or bring the rows in with batch_repeat_interleave() or batch_select_indices()",
            )
        self.table.clear(batch)

    def _undo(self) -> None:
        """Go back to before a step that failed."""
        self.lengths = [min(length, self._start) for length in self.lengths]
        if self.table.length > self._start:
            self.truncate(self._start)

    def _check_whole(self, what: str) -> None:
        """Raise unless all layers are equally long."""
        if self._behind:
            raise ArgumentValueError(
                f"PagedCacheForTransformers: {what}",
                expected="layers of one length",
                got=f"lengths from {min(self.lengths)} to {max(self.lengths)}: a forward pass was interrupted, or two run at once",
                fix=f"go back with truncate({min(self.lengths)}), or reset()",
            )

    @contextmanager
    def _change(self, *, keep: bool = False) -> Iterator[None]:
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
