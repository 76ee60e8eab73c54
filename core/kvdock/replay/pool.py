"""One request's way through a prefix cache and the blocks of a pool, as a scheduler goes it.

::

    begin    match, lock, evict what is missing, allocate     the request holds its prefix and blocks of its own
    store    insert, lock, unlock                             the whole blocks of its prompt belong to the cache
    finish   unlock, release                                  what the cache has not taken over is free again
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.errors import ArgumentValueError, IntegrityError
from kvdock.prefix import InsertResult, PrefixCache, PrefixHandle
from kvdock.replay.times import OperationTimes
from kvdock.replay.tokens import TokenIds
from kvdock.replay.trace import TraceRequest
from kvdock.scheduler import BlockAllocator, BlockIds

__all__ = ["OPERATIONS", "Begun", "ReplayPool"]

OPERATIONS = ("match", "record", "lock", "evict", "insert", "unlock")
"""The operations of a prefix cache that are timed. ``record`` counts a match as a use, once the request goes ahead."""


@attrs.define(eq=False)
class Begun:
    """A request that has its blocks.

    Args:
        request: the request.
        cached_len: tokens of its prompt that were there.
        handle: what it has locked.
        prefix: ids of the blocks of those tokens.
        own: ids of the blocks that it has allocated and still owns.
    """

    request: TraceRequest
    cached_len: int
    handle: PrefixHandle
    prefix: BlockIds
    own: BlockIds


class ReplayPool:
    """A pool of blocks, and a prefix cache over it.

    Args:
        prefix: an empty prefix cache.
        num_blocks: blocks in the pool.
        holds_output: whether a request also takes blocks for the tokens that it generates.
    """

    def __init__(self, prefix: PrefixCache, num_blocks: int, *, holds_output: bool = False) -> None:
        self.prefix = prefix
        self.allocator = BlockAllocator(num_blocks)
        self.times = OperationTimes(OPERATIONS)
        self._holds_output = holds_output

    def blocks_of(self, request: TraceRequest) -> int:
        """Return how many blocks a request needs when nothing is cached."""
        tokens = request.input_length + (request.output_length if self._holds_output else 0)
        return -(-tokens // self.prefix.block_size)

    def check_fits(self, request: TraceRequest) -> None:
        """Raise ArgumentValueError if a request needs more blocks than the pool has."""
        need, have = self.blocks_of(request), self.allocator.num_blocks
        if need > have:
            size = self.prefix.block_size
            output = f" and {request.output_length} output tokens" if self._holds_output else ""
            raise ArgumentValueError(
                f"trace: line {request.line}",
                expected=f"a request of at most the pool's {have * size} tokens ({have} blocks of {size})",
                got=f"{request.input_length} input tokens{output}, which need {need} blocks",
                fix=f"replay it with a pool of at least {need * size} tokens",
            )

    def begin(self, request: TraceRequest, tokens: TokenIds) -> Begun | None:
        """Let a request find its prefix, and take the blocks that it needs beside that.

        Returns:
            The request with its blocks; or None if others hold too many, and nothing has changed then.
        """
        call, prefix = self.times.call, self.prefix
        match = call("match", prefix.match_prefix, tokens, record=False)
        call("lock", prefix.lock_handle, match.handle)
        found = _blocks(match.indices, prefix.block_size)
        need = self.blocks_of(request) - found.size
        if not self._make_room(need):
            call("unlock", prefix.lock_handle, match.handle, unlock=True)
            return None
        call("record", prefix.record_match, match.handle, tokens.size)
        return Begun(request, match.handle.cached_len, match.handle, found, self.allocator.allocate(need))

    def store(self, begun: Begun, tokens: TokenIds) -> None:
        """Let the cache have the whole blocks of a prompt, now that all of it is computed."""
        call, prefix, size = self.times.call, self.prefix, self.prefix.block_size
        whole = tokens.size - tokens.size % size
        slots = _slots(np.concatenate((begun.prefix, begun.own))[: whole // size], size)
        result = call("insert", prefix.insert_prefix, tokens[:whole], slots)
        call("lock", prefix.lock_handle, result.handle)
        call("unlock", prefix.lock_handle, begun.handle, unlock=True)
        begun.handle = result.handle
        self._hand_over(begun, result)

    def finish(self, begun: Begun) -> None:
        """Let a request give back what it holds."""
        self.times.call("unlock", self.prefix.lock_handle, begun.handle, unlock=True)
        self.allocator.release(begun.own)

    def close(self) -> None:
        """Prove that nothing is held and that free and cached blocks are the pool, and empty the cache.

        Raises:
            IntegrityError: something is held still, lost or owned twice.
        """
        self.prefix.check_integrity()
        self.allocator.check_integrity()
        self.allocator.release(_blocks(self.prefix.reset(), self.prefix.block_size))
        if self.allocator.num_used:
            raise IntegrityError("replay", expected="an empty pool at the end", got=f"{self.allocator.num_used} blocks in use")

    def _make_room(self, need: int) -> bool:
        """Evict until ``need`` blocks are free, if that can be done."""
        missing = (need - self.allocator.num_free) * self.prefix.block_size
        if missing <= 0:
            return True
        if missing > self.prefix.size_info.evictable_size:
            return False
        slots = self.times.call("evict", self.prefix.evict, missing)
        self.allocator.release(_blocks(slots, self.prefix.block_size))
        return True

    def _hand_over(self, begun: Begun, result: InsertResult) -> None:
        """Leave to the cache what it has taken over; free the blocks of tokens that another request stored meanwhile."""
        size, before = self.prefix.block_size, begun.prefix.size
        duplicates = max(result.cached_len // size - before, 0)
        taken = max(result.handle.cached_len // size - before, 0)
        self.allocator.release(begun.own[:duplicates])
        begun.own = begun.own[taken:]


def _blocks(slots: npt.NDArray[Any], block_size: int) -> BlockIds:
    """Return the ids of the blocks whose slots these are."""
    blocks: BlockIds = (slots[::block_size] // block_size).astype(np.int64)
    return blocks


def _slots(blocks: BlockIds, block_size: int) -> npt.NDArray[np.int32]:
    """Return the slots of blocks."""
    return (blocks[:, None] * block_size + np.arange(block_size)).astype(np.int32).ravel()
