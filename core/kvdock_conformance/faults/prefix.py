"""Faults of prefix caches: the radix tree, wrong in one way each."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np

from kvdock.errors import ArgumentTypeError, ArgumentValueError, OutOfBlocksError, StaleHandleError
from kvdock.prefix import EvictionPolicy, InsertResult, PrefixHandle, PrefixMatch, RadixPrefixCache, SizeInfo, Usage
from kvdock.prefix.inputs import slots_of
from kvdock.prefix.tree import RadixTree
from kvdock_conformance.faults.fault import Fault
from kvdock_conformance.faults.prefix_seed import FaultyTree, adding

__all__ = ["FAULTS"]

FAULTS: list[Fault] = []
_fault = adding(FAULTS)


# Matches


@_fault("last-block-not-matched", "A match that goes to the end of the tokens leaves their last block out.", "001")
class _LastBlock(RadixPrefixCache):
    def match_prefix(self, tokens: Any, namespace: Any = (), *, record: bool = True) -> PrefixMatch:
        found = super().match_prefix(tokens, namespace, record=record)
        whole = len(tokens) // self.block_size * self.block_size
        if 0 < whole == found.handle.cached_len:
            return super().match_prefix(tokens[: whole - self.block_size], namespace, record=False)
        return found


@_fault("blocks-of-64-bits", "Blocks come back as int64.", "001")
class _WideBlocks(RadixPrefixCache):
    def match_prefix(self, tokens: Any, namespace: Any = (), *, record: bool = True) -> PrefixMatch:
        handle, blocks = super().match_prefix(tokens, namespace, record=record)
        return PrefixMatch(handle, blocks.astype(np.int64))


class _NamesBlocks(PrefixMatch):
    """Takes slots for blocks."""

    @property
    def indices(self) -> Any:
        return self.blocks


@_fault("indices-in-blocks", "The indices of a match are its blocks.", "001")
class _IndicesOfMatches(RadixPrefixCache):
    def match_prefix(self, tokens: Any, namespace: Any = (), *, record: bool = True) -> PrefixMatch:
        return _NamesBlocks(*super().match_prefix(tokens, namespace, record=record))


@_fault("handle-of-the-root", "The handle of a match stands for no token.", "001", "005")
class _RootHandle(RadixPrefixCache):
    def match_prefix(self, tokens: Any, namespace: Any = (), *, record: bool = True) -> PrefixMatch:
        found = super().match_prefix(tokens, namespace, record=record)
        return PrefixMatch(super().match_prefix([], namespace, record=False).handle, found.blocks)


@_fault("answers-shared", "The same array is returned for equal matches, whatever a caller has done with it.", "003")
class _SharedAnswers(RadixPrefixCache):
    def match_prefix(self, tokens: Any, namespace: Any = (), *, record: bool = True) -> PrefixMatch:
        handle, blocks = super().match_prefix(tokens, namespace, record=record)
        kept: dict[int, Any] = self.__dict__.setdefault("kept", {})
        return PrefixMatch(handle, kept.setdefault(blocks.size, blocks))


@_fault("blocks-aliased", "Stored blocks are the caller's array.", "003")
class _AliasedBlocks(_SharedAnswers):
    def insert_prefix(self, tokens: Any, blocks: Any, namespace: Any = (), **how: Any) -> InsertResult:
        made = super().insert_prefix(tokens, blocks, namespace, **how)
        if isinstance(blocks, np.ndarray) and blocks.dtype == np.int32:
            self.__dict__.setdefault("kept", {})[blocks.size] = blocks
        return made


@_fault("blocks-passed-back", "An insertion of what is new returns the caller's array.", "003", "020")
class _PassedBack(RadixPrefixCache):
    def insert_prefix(self, tokens: Any, blocks: Any, namespace: Any = (), **how: Any) -> InsertResult:
        made = super().insert_prefix(tokens, blocks, namespace, **how)
        is_same = isinstance(blocks, np.ndarray) and blocks.dtype == np.int32 and np.array_equal(made.blocks, blocks)
        return made._replace(blocks=blocks) if is_same else made


@_fault("ids-cut-to-32-bits", "Of a token id the lower 32 bits count.", "003")
class _CutIds(RadixPrefixCache):
    def match_prefix(self, tokens: Any, namespace: Any = (), *, record: bool = True) -> PrefixMatch:
        return super().match_prefix([int(token) % 2**32 for token in tokens], namespace, record=record)

    def insert_prefix(self, tokens: Any, blocks: Any, namespace: Any = (), **how: Any) -> InsertResult:
        return super().insert_prefix([int(token) % 2**32 for token in tokens], blocks, namespace, **how)


@_fault("numpy-only", "Lists are refused.", "003")
class _NumpyOnly(RadixPrefixCache):
    def match_prefix(self, tokens: Any, namespace: Any = (), *, record: bool = True) -> PrefixMatch:
        if isinstance(tokens, list):
            raise ArgumentTypeError("match_prefix: tokens", expected="an array", got="a list")
        return super().match_prefix(tokens, namespace, record=record)


# Namespaces


class _OtherSpaces(RadixPrefixCache):
    """Changes namespaces before it looks at them."""

    def space(self, namespace: Any) -> Any:
        """Return another namespace."""
        raise NotImplementedError

    def match_prefix(self, tokens: Any, namespace: Any = (), *, record: bool = True) -> PrefixMatch:
        return super().match_prefix(tokens, self.space(namespace), record=record)

    def insert_prefix(self, tokens: Any, blocks: Any, namespace: Any = (), **how: Any) -> InsertResult:
        return super().insert_prefix(tokens, blocks, self.space(namespace), **how)


@_fault("types-of-parts-dropped", "Parts of a namespace that print alike are equal.", "004")
class _Printed(_OtherSpaces):
    def space(self, namespace: Any) -> Any:
        return tuple(str(part) for part in namespace)


@_fault("parts-joined", "The parts of a namespace are joined without a mark between them.", "004")
class _Joined(_OtherSpaces):
    def space(self, namespace: Any) -> Any:
        return ("".join(map(repr, namespace)).replace("''", ""),)


@_fault("true-is-one", "A part True is taken for 1.", "004")
class _TrueIsOne(_OtherSpaces):
    def space(self, namespace: Any) -> Any:
        return tuple(int(part) if isinstance(part, bool) else part for part in namespace)


@_fault("namespaces-by-hash", "Namespaces are compared by their hashes.", "004")
class _Hashed(_OtherSpaces):
    def space(self, namespace: Any) -> Any:
        return tuple(hash(part) for part in namespace)


# Insertions


@_fault("duplicates-not-canonical", "An insertion returns the blocks that the caller passed.", "002", "021")
class _NotCanonical(RadixPrefixCache):
    def insert_prefix(self, tokens: Any, blocks: Any, namespace: Any = (), **how: Any) -> InsertResult:
        passed = np.array(blocks, dtype=np.int32)
        return super().insert_prefix(tokens, blocks, namespace, **how)._replace(blocks=passed)


class _InsertsBlocks(InsertResult):
    """Takes slots for blocks."""

    @property
    def indices(self) -> Any:
        return self.blocks


@_fault("indices-of-insertions-in-blocks", "The indices of an insertion are its blocks.", "002")
class _IndicesOfInsertions(RadixPrefixCache):
    def insert_prefix(self, tokens: Any, blocks: Any, namespace: Any = (), **how: Any) -> InsertResult:
        return _InsertsBlocks(*super().insert_prefix(tokens, blocks, namespace, **how))


@_fault("what-was-there-miscounted", "cached_len of an insertion counts what is stored behind it.", "002")
class _Miscounted(RadixPrefixCache):
    def insert_prefix(self, tokens: Any, blocks: Any, namespace: Any = (), **how: Any) -> InsertResult:
        made = super().insert_prefix(tokens, blocks, namespace, **how)
        return made._replace(cached_len=made.handle.cached_len)


# Locks


class _UnlockedSplits(RadixTree):
    """Forgets what is held where a run is split."""

    def _split(self, node: Any, at: int) -> Any:
        upper = super()._split(node, at)
        self.protected -= upper.held
        upper.held = 0
        return upper


@_fault("split-loses-its-lock", "The upper part of a run that is split is not locked.", "005", "006")
class _UnlockedSplit(FaultyTree):
    tree = _UnlockedSplits


class _ShortLocks(RadixTree):
    """Locks one block too few."""

    def lock(self, node: Any, position: int) -> None:
        if node.start < position - 1 or node.parent.parent is not None:
            super().lock(node if node.start < position - 1 else node.parent, position - 1)

    def unlock(self, node: Any, position: int) -> None:
        if node.start < position - 1 or node.parent.parent is not None:
            super().unlock(node if node.start < position - 1 else node.parent, position - 1)


@_fault("end-not-locked", "A lock protects what is before the last block of its prefix, and not that.", "005", "006")
class _EndNotLocked(FaultyTree):
    tree = _ShortLocks


class _OneLockOnly(RadixTree):
    """Counts no locks."""

    def unlock(self, node: Any, position: int) -> None:
        if position in (node.locks or {}):
            node.locks[position] = 1
            super().unlock(node, position)


@_fault("one-lock-for-all", "The first unlock gives back all locks of a place.", "005")
class _OneLock(FaultyTree):
    tree = _OneLockOnly


@_fault("lock-of-a-whole-run", "A lock protects the rest of the run that its place is in.", "005", "023")
class _WholeRunLocked(RadixPrefixCache):
    def lock_handle(self, handle: PrefixHandle, unlock: bool = False) -> None:
        super().lock_handle(handle, unlock)
        own: Any = handle
        if not unlock and own.node is not None:
            self._tree.unlock(own.node, own.position)
            own.position = own.node.end
            self._tree.lock(own.node, own.position)


# Evictions


@_fault("eviction-in-tokens", "Evicting n blocks frees those of n tokens.", "006")
class _InTokens(RadixPrefixCache):
    def evict(self, num_blocks: int) -> Any:
        return super().evict(-(-num_blocks // self.block_size))


class _Runs(RadixTree):
    """Takes whole runs."""

    def evict(self, count: int) -> Any:
        runs: list[Any] = []
        while sum(run.size for run in runs) < count:
            node = self.queue.pop()
            runs.append(self.cut(node, node.tail_start))
        return runs


@_fault("eviction-in-whole-runs", "An eviction goes on to the end of a run of blocks.", "006")
class _WholeRuns(FaultyTree):
    tree = _Runs


@_fault("eviction-returns-slots", "An eviction returns the slots of what it frees.", "006")
class _Slots(RadixPrefixCache):
    def evict(self, num_blocks: int) -> Any:
        return slots_of(super().evict(num_blocks), self.block_size)


@_fault("eviction-returns-what-there-is", "Evicting more than there is frees what there is, and does not raise.", "009")
class _WhatThereIs(RadixPrefixCache):
    def evict(self, num_blocks: int) -> Any:
        try:
            return super().evict(num_blocks)
        except OutOfBlocksError:
            return super().evict(self.size_info.evictable_size // self.block_size)


class _Oldest(EvictionPolicy):
    """Says lru, and is fifo."""

    name = "lru"

    def key(self, usage: Usage) -> int:
        return usage.created


@_fault("a-use-does-not-count", "The cache declares lru, and evicts what was stored first.", "007")
class _WrongOrder(RadixPrefixCache):
    def __init__(self, block_size: int = 16, policy: Any = None) -> None:
        super().__init__(block_size, _Oldest())


@_fault("a-look-is-a-use", "A match that is not recorded counts as a use.", "007", "014")
class _LookIsUse(RadixPrefixCache):
    def match_prefix(self, tokens: Any, namespace: Any = (), *, record: bool = True) -> PrefixMatch:
        return super().match_prefix(tokens, namespace, record=True)


class _Clock(EvictionPolicy):
    """Asks the clock on the wall."""

    name = "by the clock"

    def __init__(self) -> None:
        self.stamps: dict[int, int] = {}

    def key(self, usage: Any) -> int:
        return self.stamps.setdefault(usage.created, time.time_ns())


@_fault("evicts-by-the-clock", "What is evicted first depends on the time of day.", "015")
class _ByTheClock(RadixPrefixCache):
    def __init__(self, block_size: int = 16, policy: Any = None) -> None:
        super().__init__(block_size, _Clock())


class _Chance(EvictionPolicy):
    """Throws a coin."""

    name = "by chance"

    def __init__(self) -> None:
        self.coins: dict[int, float] = {}

    def key(self, usage: Any) -> float:
        return self.coins.setdefault(usage.created, random.random())  # noqa: S311 - the fault


@_fault("evicts-by-chance", "What is evicted first is a matter of chance.", "015")
class _ByChance(RadixPrefixCache):
    def __init__(self, block_size: int = 16, policy: Any = None) -> None:
        super().__init__(block_size, _Chance())


@_fault("discard-forgets-one-more", "Discarding the end of a prefix keeps one block less than it is told.", "010")
class _OneMore(RadixPrefixCache):
    def discard_prefix(self, handle: PrefixHandle, keep_blocks: int) -> Any:
        return super().discard_prefix(handle, max(keep_blocks - 1, 0))


@_fault("discard-in-tokens", "Discarding the end of a prefix keeps so many tokens.", "010")
class _KeepsTokens(RadixPrefixCache):
    def discard_prefix(self, handle: PrefixHandle, keep_blocks: int) -> Any:
        return super().discard_prefix(handle, keep_blocks // self.block_size)


# Handles


@_fault("foreign-handles-taken", "Locking by a handle of another cache does nothing.", "008")
class _ForeignTaken(RadixPrefixCache):
    def lock_handle(self, handle: PrefixHandle, unlock: bool = False) -> None:
        if getattr(handle, "owner", self) is self:
            super().lock_handle(handle, unlock)


@_fault("second-unlock-taken", "An unlock without a lock does nothing.", "008")
class _SecondUnlock(RadixPrefixCache):
    def lock_handle(self, handle: PrefixHandle, unlock: bool = False) -> None:
        if not unlock or getattr(handle, "locks", True):
            super().lock_handle(handle, unlock)


@_fault("stale-handles-ignored", "Locking what was evicted does nothing.", "008")
class _StaleIgnored(RadixPrefixCache):
    def lock_handle(self, handle: PrefixHandle, unlock: bool = False) -> None:
        try:
            super().lock_handle(handle, unlock)
        except StaleHandleError as error:
            if "evicted" not in str(error):
                raise


@_fault("handles-outlive-a-reset", "A handle from before a reset is good after it.", "011", "008")
class _OutliveReset(RadixPrefixCache):
    def lock_handle(self, handle: PrefixHandle, unlock: bool = False) -> None:
        try:
            super().lock_handle(handle, unlock)
        except StaleHandleError as error:
            if "before a reset" not in str(error):
                raise


@_fault("reset-keeps-what-is-locked", "A reset leaves locked prefixes where they are.", "011")
class _KeepsLocked(RadixPrefixCache):
    def reset(self) -> Any:
        return self.evict(self.size_info.evictable_size // self.block_size)


# Arguments


@_fault("lengths-cut", "Of tokens and blocks of different number, those that both have are stored.", "009")
class _LengthsCut(RadixPrefixCache):
    def insert_prefix(self, tokens: Any, blocks: Any, namespace: Any = (), **how: Any) -> InsertResult:
        if isinstance(tokens, list) and isinstance(blocks, list):
            count = min(len(tokens) // self.block_size, len(blocks))
            tokens, blocks = tokens[: count * self.block_size], blocks[:count]
        return super().insert_prefix(tokens, blocks, namespace, **how)


@_fault("error-after-a-partial-insertion", "The first block is stored before the others are looked at.", "009")
class _PartialInsertion(RadixPrefixCache):
    def insert_prefix(self, tokens: Any, blocks: Any, namespace: Any = (), **how: Any) -> InsertResult:
        try:
            return super().insert_prefix(tokens, blocks, namespace, **how)
        except ArgumentValueError:
            if isinstance(blocks, list):
                super().insert_prefix(tokens[: self.block_size], blocks[:1], namespace, **how)
            raise


@_fault("floats-rounded", "Tokens that are floats are rounded.", "009")
class _FloatsRounded(RadixPrefixCache):
    def match_prefix(self, tokens: Any, namespace: Any = (), *, record: bool = True) -> PrefixMatch:
        if isinstance(tokens, np.ndarray) and tokens.dtype.kind == "f":
            tokens = tokens.astype(np.int64)
        return super().match_prefix(tokens, namespace, record=record)


@_fault("owned-blocks-taken", "Blocks that are stored for other tokens are stored again.", "009")
class _OwnedTaken(RadixPrefixCache):
    def insert_prefix(self, tokens: Any, blocks: Any, namespace: Any = (), **how: Any) -> InsertResult:
        try:
            return super().insert_prefix(tokens, blocks, namespace, **how)
        except ArgumentValueError as error:
            if "for other tokens" not in str(error):
                raise
            self._owned.clear()
            return super().insert_prefix(tokens, blocks, namespace, **how)


@_fault("any-block-size", "A block of no tokens is made one of one, and one of too many is made.", "018")
class _AnySize(RadixPrefixCache):
    def __init__(self, block_size: int = 16, policy: Any = "lru") -> None:
        super().__init__(max(1, min(block_size, 512)), policy)


# Books


@_fault("protected-counted-twice", "evictable_size counts what is locked too.", "012")
class _CountedTwice(RadixPrefixCache):
    @property
    def size_info(self) -> SizeInfo:
        sizes = super().size_info
        return SizeInfo(sizes.total_size, sizes.protected_size)


@_fault("blocks-unsorted", "stored_blocks is in no order.", "012")
class _Unsorted(RadixPrefixCache):
    def stored_blocks(self) -> Any:
        return super().stored_blocks()[::-1]


# Depth and threads


@_fault("walks-by-recursion", "Paths are walked by recursion.", "016")
class _Recursive(RadixPrefixCache):
    def lock_handle(self, handle: PrefixHandle, unlock: bool = False) -> None:
        super().lock_handle(handle, unlock)
        self._depth(getattr(handle, "node", None))

    def _depth(self, node: Any) -> int:
        """Return how deep a node is."""
        return 0 if node is None or node.parent is None else 1 + self._depth(node.parent)


@_fault("threads-unnoticed", "Any thread may call at any time.", "017")
class _AnyThread(RadixPrefixCache):
    def _enter(self) -> None:
        pass
