"""What a prefix cache is: the contract that the scheduler relies on, and that a plugin's prefix cache keeps.

A prefix cache remembers which blocks of a pool hold the keys and values of which token ids. It knows integers only: the
blocks are somebody else's, and it says which of them are taken over, protected, and free to go.

The life of a prefix, in calls::

    m = prefix.match_prefix(tokens)          what is there already; m.indices are its slots
    prefix.lock_handle(m.handle)             ... and stays while the request runs
    r = prefix.insert_prefix(tokens, slots)  what was computed since; r.indices are the slots to go on with
    prefix.lock_handle(r.handle); prefix.lock_handle(m.handle, unlock=True)
    prefix.lock_handle(r.handle, unlock=True)
    slots = prefix.evict(n)                  the blocks of these slots are the caller's again
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.prefix.events import PrefixEvent
from kvdock.prefix.stats import PrefixStats

__all__ = ["InsertResult", "MatchResult", "Namespace", "PrefixCache", "PrefixHandle", "SizeInfo", "Slots"]

Slots = npt.NDArray[np.int32]
"""An array of slots, one per token: a pool has fewer than 2**31."""

Namespace = tuple[Hashable, ...]
"""Isolation key, such as ``("tenant", "a")`` or ``("adapter", 7)``: str, bytes and int, compared with their types."""


class PrefixHandle:
    """A place in a prefix cache: the end of a stored prefix. Made by the cache, and good for that cache only.

    It goes stale when what it stands for is evicted, which cannot happen while it is locked, and when the cache is reset.

    Attributes:
        cached_len: tokens from the root to this place; a multiple of the block size.
    """

    __slots__ = ("cached_len",)

    def __init__(self, cached_len: int) -> None:
        self.cached_len = cached_len

    def __repr__(self) -> str:
        return f"{type(self).__name__}(cached_len={self.cached_len})"


class MatchResult(NamedTuple):
    """What `PrefixCache.match_prefix` found.

    Args:
        handle: the place where the match ends; for a miss one with ``cached_len`` 0, which can be locked like any other.
        indices: slots of the matched tokens, int32 ``[handle.cached_len]``; the caller's own array.
    """

    handle: PrefixHandle
    indices: Slots


class InsertResult:
    """What `PrefixCache.insert_prefix` did.

    Args:
        cached_len: tokens that were stored before; the blocks that the caller passed for them are still the caller's, unless
            they are the stored ones.
        handle: the end of what is stored now: ``handle.cached_len`` tokens, whose blocks belong to the cache.
        indices: canonical slots of those tokens, int32 ``[handle.cached_len]``; the caller's own array. A request must go on
            with these, since duplicates may be freed. A function that returns them is called when they are first wanted.
    """

    __slots__ = ("_indices", "cached_len", "handle")

    def __init__(self, cached_len: int, handle: PrefixHandle, indices: Slots | Callable[[], Slots]) -> None:
        self.cached_len = cached_len
        self.handle = handle
        self._indices = indices

    def __repr__(self) -> str:
        return f"InsertResult(cached_len={self.cached_len}, handle={self.handle})"

    @property
    def indices(self) -> Slots:
        """Canonical slots, int32 ``[handle.cached_len]``."""
        if not isinstance(self._indices, np.ndarray):
            self._indices = self._indices()
        return self._indices


@attrs.frozen
class SizeInfo:
    """How much is stored, in tokens; multiples of the block size.

    Args:
        evictable_size: tokens that `PrefixCache.evict` can free now.
        protected_size: tokens on the paths of locked handles.
    """

    evictable_size: int
    protected_size: int

    @property
    def total_size(self) -> int:
        """All tokens that are stored."""
        return self.evictable_size + self.protected_size


class PrefixCache(ABC):
    """Blocks by the token ids whose keys and values they hold.

    Sizes and positions are tokens. A block is stored whole or not at all, so what is stored and matched is a multiple of
    ``block_size``; a remainder is ignored. Tokens and slots may be numpy or torch integers on the host, or lists; nothing
    that is stored aliases them. A slot is ``block_id * block_size + offset``, and the slots of a block are consecutive.

    What it decides follows from the calls alone, never from time, addresses or hashes, so that equal calls on all ranks give
    equal answers. A call that raises has changed nothing.

    Threads: it belongs to one thread at a time, that of the first call; `hand_over` lets another go on. A call by another
    thread raises `WrongThreadError`.

    Args:
        block_size: tokens in a block, 1 to 512.
    """

    block_size: int

    @abstractmethod
    def match_prefix(self, tokens: npt.ArrayLike, namespace: Namespace = (), *, record: bool = True) -> MatchResult:
        """Find the longest stored prefix of ``tokens``. Never changes what is stored.

        Args:
            tokens: token ids ``[n]``, n may be 0.
            namespace: where to look; others are not seen.
            record: whether it counts as a use, in the order of eviction and in the statistics. A scheduler that only looks
                says False, and calls `record_match` when it goes ahead.

        Raises:
            ArgumentTypeError: tokens that are no integers, a namespace that is no tuple.
            ArgumentValueError: tokens with more than one dimension, or on a device.
        """

    @abstractmethod
    def record_match(self, handle: PrefixHandle, num_tokens: int) -> None:
        """Count a match that was not recorded: its tokens were used now, of ``num_tokens`` that were looked up.

        Raises:
            StaleHandleError: as for `lock_handle`.
        """

    @abstractmethod
    def lock_handle(self, handle: PrefixHandle, unlock: bool = False) -> None:
        """Protect a prefix from eviction, once more; or give back one protection.

        Args:
            handle: from a match or an insertion of this cache.
            unlock: give back instead. A handle can be unlocked as often as it was locked.

        Raises:
            StaleHandleError: the handle is another cache's, was evicted, comes from before a reset, or is not locked.
        """

    @abstractmethod
    def insert_prefix(self, tokens: npt.ArrayLike, slots: npt.ArrayLike, namespace: Namespace = (), *, priority: int = 0) -> InsertResult:
        """Store the whole blocks of a prefix. The cache takes over the blocks of tokens that were not stored.

        Args:
            tokens: token ids ``[n]``.
            slots: their slots ``[n]``.
            namespace: where to store.
            priority: for the eviction policy ``priority``: lower ones go first. Of equal tokens the highest counts.

        Raises:
            ArgumentTypeError: tokens or slots that are no integers.
            ArgumentValueError: different lengths; slots that are negative, twice there, not whole blocks, at 2**31 or more, or stored for
                another token. A token's own slot again is fine.
        """

    @abstractmethod
    def evict(self, size: int) -> Slots:
        """Forget exactly ``ceil(size / block_size)`` blocks, those that the policy names, ends of prefixes first.

        Returns:
            Their slots, int32. The blocks are the caller's again.

        Raises:
            OutOfBlocksError: fewer are evictable. Nothing was evicted.
        """

    @abstractmethod
    def discard_prefix(self, handle: PrefixHandle, start: int) -> Slots:
        """Forget the end of a prefix, from token ``start`` on, as far as nobody has it locked and nothing is stored behind it.

        Args:
            handle: the end of the prefix.
            start: tokens to keep, a multiple of the block size.

        Returns:
            The slots that were freed, int32; none where all is in use. Their blocks are the caller's again.

        Raises:
            StaleHandleError: as for `lock_handle`.
            ArgumentValueError: ``start`` is no multiple of the block size.
        """

    @abstractmethod
    def reset(self) -> Slots:
        """Forget everything, locked or not, and return the slots; all handles are stale then."""

    @property
    @abstractmethod
    def size_info(self) -> SizeInfo:
        """How much is stored."""

    @property
    @abstractmethod
    def num_locks(self) -> int:
        """Locks that were taken and not given back, over all handles."""

    @property
    @abstractmethod
    def stats(self) -> PrefixStats:
        """What happened so far."""

    @abstractmethod
    def subscribe(self, observer: Callable[[PrefixEvent], None]) -> Callable[[], None]:
        """Call ``observer`` with each event from now on, after the call that caused it has done its work.

        Returns:
            A function that ends the subscription.
        """

    @abstractmethod
    def stored_blocks(self) -> npt.NDArray[np.int64]:
        """Return the ids of all blocks, int64, that belong to the cache, sorted. Costs time in their number."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Prove that the bookkeeping is whole. Costs time in the size of the cache.

        Raises:
            IntegrityError: it is not; the text says where.
        """

    @abstractmethod
    def hand_over(self) -> None:
        """Give the cache up: it belongs to the thread that uses it next. Raises `WrongThreadError` in another thread."""
