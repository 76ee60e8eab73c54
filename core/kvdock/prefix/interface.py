"""What a prefix cache is: the contract that the scheduler relies on, and that a plugin's prefix cache keeps.

A prefix cache remembers which blocks of a pool hold the keys and values of which token ids. It knows integers only: the
blocks are somebody else's, and it says which of them are taken over, protected, and free to go.

The life of a prefix, in calls::

    m = prefix.match_prefix(tokens)             what is there already, in m.blocks
    prefix.lock_handle(m.handle)                ... and stays while the request runs
    r = prefix.insert_prefix(rest, blocks, behind=m.handle)    what was computed since; go on with r.blocks
    prefix.lock_handle(r.handle); prefix.lock_handle(m.handle, unlock=True)
    prefix.lock_handle(r.handle, unlock=True)
    blocks = prefix.evict(n)                    these blocks are the caller's again
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.errors import ArgumentValueError, UnsupportedError
from kvdock.prefix.events import PrefixEvent
from kvdock.prefix.inputs import slots_of
from kvdock.prefix.ownership import NotCopied
from kvdock.prefix.stats import PrefixStats

__all__ = [
    "BlockIds",
    "InsertResult",
    "Namespace",
    "PartialMatch",
    "PrefixCache",
    "PrefixHandle",
    "PrefixMatch",
    "SizeInfo",
    "Slots",
    "StoredPrefix",
    "other_namespace",
]

BlockIds = npt.NDArray[np.int32]
"""An array of block ids."""

Slots = npt.NDArray[np.int32]
"""An array of slots, one per token: a pool has fewer than 2**31."""

Namespace = tuple[Hashable, ...]
"""Isolation key, such as ``("tenant", "a")`` or ``("adapter", 7)``: str, bytes and int, compared with their types."""


class PrefixHandle(NotCopied):
    """A place in a prefix cache: the end of a stored prefix. Made by the cache, and good for that cache only.

    It goes stale when what it stands for is evicted, which cannot happen while it is locked, and when the cache is reset.
    What is stored behind it later does not change it. It cannot be copied or pickled: match the tokens again.

    Attributes:
        cached_len: tokens from the root to this place; a multiple of the block size.
    """

    __slots__ = ("cached_len",)

    instead_of_copies = "match the tokens again"

    def __init__(self, cached_len: int) -> None:
        self.cached_len = cached_len

    def __repr__(self) -> str:
        return f"{type(self).__name__}(cached_len={self.cached_len})"


class PrefixMatch(NamedTuple):
    """What `PrefixCache.match_prefix` found.

    Args:
        handle: the place where the match ends; for a miss one with ``cached_len`` 0, which can be locked like any other.
        blocks: ids of the blocks of the matched tokens, int32 ``[handle.cached_len / block_size]``; the caller's own array.
    """

    handle: PrefixHandle
    blocks: BlockIds

    @property
    def indices(self) -> Slots:
        """Slots of the matched tokens, int32 ``[handle.cached_len]``; made when asked for."""
        return slots_of(self.blocks, self.handle.cached_len // max(self.blocks.size, 1))


class InsertResult(NamedTuple):
    """What `PrefixCache.insert_prefix` did. Lengths count from the beginning of the prefix, blocks from ``behind``.

    Args:
        cached_len: tokens that were stored before, with those before ``behind``; the blocks that the caller passed for the others of
            them are still the caller's, unless they are the stored ones.
        handle: the end of what is stored now: ``handle.cached_len`` tokens, whose blocks belong to the cache.
        blocks: canonical blocks of those of the tokens passed that are stored now, int32; the caller's own array. A request must
            go on with these, since duplicates may be freed.
        block_size: tokens in a block.
    """

    cached_len: int
    handle: PrefixHandle
    blocks: BlockIds
    block_size: int

    @property
    def indices(self) -> Slots:
        """Slots of the tokens of ``blocks``, int32 ``[len(blocks) * block_size]``; made when asked for."""
        return slots_of(self.blocks, self.block_size)


class PartialMatch(NamedTuple):
    """A stored block that begins like the tokens that come next; see `PrefixCache.match_partial`.

    Args:
        handle: the end of that block.
        block: its id.
        num_tokens: how many of its first tokens are the same, fewer than a block.
    """

    handle: PrefixHandle
    block: int
    num_tokens: int


class StoredPrefix(NamedTuple):
    """A prefix that is stored.

    Args:
        tokens: its token ids, int64, whole blocks of them.
        namespace: where it is stored.
    """

    tokens: npt.NDArray[np.int64]
    namespace: Namespace


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


class PrefixCache(NotCopied, ABC):
    """Blocks by the token ids whose keys and values they hold.

    Sizes and ``cached_len`` are tokens; blocks are counted in blocks. A block is stored whole or not at all, so what is stored and
    matched is a multiple of ``block_size`` tokens; a remainder is ignored. Tokens and blocks may be numpy or torch integers
    on the host, or lists; nothing that is stored aliases them.

    What it decides follows from the calls alone, never from time, addresses or hashes, so that equal calls on all ranks give
    equal answers. A call that raises has changed nothing.

    Threads: it belongs to one thread at a time, that of the first call; `hand_over` lets another go on. A call by another
    thread raises `WrongThreadError`.

    Copies: none, not by `copy` and not by `pickle`, which raise `UnsupportedError`: its blocks exist once.

    Args:
        block_size: tokens in a block, 1 to 512.
    """

    block_size: int

    can_store: bool = True
    """Whether anything can ever be found. Without, a scheduler need neither match nor insert."""

    @abstractmethod
    def match_prefix(self, tokens: npt.ArrayLike, namespace: Namespace = (), *, record: bool = True) -> PrefixMatch:
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

    def match_partial(self, handle: PrefixHandle, tokens: npt.ArrayLike) -> PartialMatch | None:
        """Find a stored block behind a place that begins with at least half a block of ``tokens``, of several the most alike.

        Changes nothing, and is no use in the order of eviction. A prefix cache that does not offer it finds None.

        Args:
            handle: the place, as from a match.
            tokens: the token ids that come next ``[n]``; the first block of them is looked at.

        Raises:
            StaleHandleError: as for `lock_handle`.
        """
        return None

    @abstractmethod
    def record_match(self, handle: PrefixHandle, num_tokens: int) -> None:
        """Count a match that was not recorded: its tokens were used now, of ``num_tokens`` that were looked up.

        Raises:
            StaleHandleError: as for `lock_handle`.
        """

    @abstractmethod
    def lock_handle(self, handle: PrefixHandle, unlock: bool = False) -> None:
        """Protect a prefix from eviction, once more; or release one protection.

        Args:
            handle: from a match or an insertion of this cache.
            unlock: release one instead. A handle can be unlocked as often as it was locked.

        Raises:
            StaleHandleError: the handle is another cache's, was evicted, comes from before a reset, or is not locked.
        """

    @abstractmethod
    def insert_prefix(
        self,
        tokens: npt.ArrayLike,
        blocks: npt.ArrayLike,
        namespace: Namespace = (),
        *,
        behind: PrefixHandle | None = None,
        priority: int = 0,
    ) -> InsertResult:
        """Store the whole blocks of a prefix. The cache takes over the blocks of tokens that were not stored.

        Args:
            tokens: token ids ``[n]``, from the beginning of the prefix, or from ``behind`` on.
            blocks: ids of their blocks ``[n // block_size]``.
            namespace: where to store.
            behind: a place in the same namespace that the tokens follow. What is before it is not looked at again.
            priority: for the eviction policy ``priority``: lower ones go first. Of equal tokens the highest counts.

        Raises:
            ArgumentTypeError: tokens or blocks that are no integers.
            ArgumentValueError: another number of blocks; blocks that are negative, there twice, beyond 2**31 slots, or stored for
                other tokens (a block's own tokens again are fine); ``behind`` is in another namespace.
            StaleHandleError: ``behind``, as for `lock_handle`; it need not be locked.
        """

    def append_blocks(
        self, handles: Sequence[PrefixHandle], tokens: npt.NDArray[Any], blocks: BlockIds, priorities: Sequence[int]
    ) -> npt.NDArray[np.bool_]:
        """Store one block behind each of several prefixes, and move their handles, with their locks, behind it; where that is simple.

        This is the step of a batch that is decoded: what `insert_prefix` and two calls of `lock_handle` would do for each, in one
        call. A prefix cache does it for those that it likes to, or for none, as this one: the others are left as they were,
        and the caller makes these calls.

        Args:
            handles: of this cache, each locked.
            tokens: token ids ``[n, block_size]``.
            blocks: ids of blocks that are not stored, int32 ``[n]``.
            priorities: as for `insert_prefix`, one for each.

        Returns:
            which were stored, bool ``[n]``.

        Raises:
            StaleHandleError, ArgumentValueError: as for `insert_prefix`. Nothing was changed.
        """
        return np.zeros(len(handles), dtype=np.bool_)

    @abstractmethod
    def evict(self, num_blocks: int) -> BlockIds:
        """Forget exactly ``num_blocks`` blocks, those that the policy names, ends of prefixes first.

        Returns:
            Their ids, int32 ``[num_blocks]``. The blocks are the caller's again.

        Raises:
            OutOfBlocksError: fewer are evictable. Nothing was evicted.
        """

    @abstractmethod
    def discard_prefix(self, handle: PrefixHandle, keep_blocks: int) -> BlockIds:
        """Forget the end of a prefix, all but ``keep_blocks`` blocks, as far as nobody has it locked and nothing is stored behind it.

        Args:
            handle: the end of the prefix.
            keep_blocks: blocks to keep, from the beginning.

        Returns:
            Ids of the blocks that were freed, int32; none where all is in use. The blocks are the caller's again.

        Raises:
            StaleHandleError: as for `lock_handle`.
            ArgumentTypeError, ArgumentValueError: ``keep_blocks`` is no int of at least 0.
        """

    @abstractmethod
    def reset(self) -> BlockIds:
        """Forget everything, locked or not, and return the ids of all blocks, int32, sorted; all handles are stale then."""

    @property
    @abstractmethod
    def size_info(self) -> SizeInfo:
        """How much is stored."""

    @property
    @abstractmethod
    def num_locks(self) -> int:
        """Locks that were taken and not released, over all handles."""

    @property
    @abstractmethod
    def stats(self) -> PrefixStats:
        """What happened so far."""

    @abstractmethod
    def subscribe(self, observer: Callable[[PrefixEvent], None]) -> Callable[[], None]:
        """Call ``observer`` with each event from now on, after the call that caused it has done its work.

        It claims no thread: the constructor of an engine may subscribe, and the thread that it starts makes the first call.

        Returns:
            A function that ends the subscription.
        """

    @abstractmethod
    def stored_blocks(self) -> BlockIds:
        """Return the ids of all blocks, int32, that belong to the cache, sorted. Costs time in their number."""

    def stored_prefixes(self) -> Iterator[StoredPrefix]:
        """Yield the prefixes by which all that is stored can be found, each to where a use of it ended, those used last first.

        What only other prefixes begin with is not yielded again. Good until the next call that changes something; a prefix cache
        need not offer it.

        Raises:
            UnsupportedError: this one does not.
        """
        raise UnsupportedError(
            f"{type(self).__name__}.stored_prefixes",
            expected="a prefix cache that lists what it stores",
            got="one that does not",
            fix='use prefix="radix", or give this one a stored_prefixes of its own',
        )

    @abstractmethod
    def check_integrity(self) -> None:
        """Prove that the bookkeeping is whole. Costs time in the size of the cache.

        Raises:
            IntegrityError: it is not; the text says where.
        """

    @abstractmethod
    def hand_over(self) -> None:
        """Give the cache up: it belongs to the thread that uses it next. Raises `WrongThreadError` in another thread."""


def other_namespace(namespace: Namespace, behind: PrefixHandle) -> ArgumentValueError:
    """Describe an insertion behind a handle of another namespace."""
    return ArgumentValueError(
        "insert_prefix: behind",
        expected=f"a handle of the namespace that is named, {namespace!r}",
        got=f"{behind} of another",
        fix="pass the namespace that the handle was found in, and the tokens that follow it",
    )
