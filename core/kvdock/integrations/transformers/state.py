"""The pool and the table that all layers of a cache share.

A step is one forward pass. The first layer that writes grows the table for all; the last one ends the step. Whatever the
order of the layers, each has its own length, and the table's length is the longest::

    layer 0  ############----        # written    - this step
    layer 1  ############            the table already has room for this step
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt
import torch

from kvdock.cache import PagedKVCache
from kvdock.errors import ArgumentValueError, IndexRangeError, UnsupportedError
from kvdock.scheduler import BlockAllocator, BlockTable

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
        self._slots = _Slots(pool.device)
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
        start = self.lengths[layer]
        stop = start + keys.shape[2]
        if stop > self.table.length:
            self._begin(keys.shape[0], keys.shape[2])
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
            raise IndexRangeError("PagedCacheForTransformers: length", expected=f"at most the {min(self.lengths)} tokens that every layer has", got=length)
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
                self.pool.copy_blocks(torch.from_numpy(pairs).to(self.pool.device))

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
        self._slots.forget(0)

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


class _Slots:
    """The slots of a table's tokens on the device, built once and extended step by step."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty((0, 0), dtype=torch.int64, device=device)
        self._valid = 0

    def upto(self, table: BlockTable, stop: int) -> torch.Tensor:
        """Return the slots of the first ``stop`` tokens, int64 ``[batch, stop]``; a view that later steps leave as it is."""
        if stop > self._valid:
            self._extend(table, stop)
        return self._buffer[:, :stop]

    def forget(self, start: int) -> None:
        """Tokens from ``start`` on may have moved."""
        self._valid = min(self._valid, start)

    def _extend(self, table: BlockTable, stop: int) -> None:
        if self._buffer.shape[0] != table.batch_size or stop > self._buffer.shape[1]:
            with torch.inference_mode(mode=False):
                self._buffer = torch.empty((table.batch_size, 2 * stop), dtype=torch.int64, device=self._buffer.device)
            self._valid = 0
        self._buffer[:, self._valid : stop] = torch.from_numpy(table.slot_mapping(self._valid, stop))
        self._valid = stop


class _Detached(torch.autograd.Function):
    """Keys and values out of a pool: the forward pass works, and a backward pass is refused instead of being wrong."""

    @staticmethod
    def forward(ctx: Any, new: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        return read.view_as(read)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None]:
        raise UnsupportedError(
            "PagedCacheForTransformers", expected="no backward pass", got="one through cached keys and values", fix="train with use_cache=False"
        )


def refuse_backward(new: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """Return ``read``, such that a backward pass from it raises if one to ``new`` was asked for."""
    if not (torch.is_grad_enabled() and new.requires_grad):
        return read
    result: torch.Tensor = _Detached.apply(new, read)
    return result


def _token_major(states: torch.Tensor) -> torch.Tensor:
    """View ``[batch, heads, tokens, dim]`` as ``[batch, tokens, heads, dim]``, elements of a head side by side."""
    states = states.transpose(1, 2)
    return states if states.stride(-1) == 1 or states.shape[-1] == 1 else states.contiguous()


def _buffer(cache: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
    """Allocate ``[batch, heads, tokens, dim]`` for what lies in a pool's ``[blocks, block_size, heads, dim]``."""
    return torch.empty((batch, cache.shape[2], tokens, cache.shape[3]), dtype=cache.dtype, device=cache.device)
