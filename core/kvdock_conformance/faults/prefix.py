"""Faults of prefix caches: the radix tree, wrong in one way each."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from typing import Any

import numpy as np

from kvdock.errors import ArgumentTypeError, ArgumentValueError, OutOfBlocksError, StaleHandleError
from kvdock.prefix import EvictionPolicy, InsertResult, MatchResult, PrefixHandle, RadixPrefixCache, Removed, SizeInfo, Usage
from kvdock_conformance.faults.fault import Fault
from kvdock_conformance.faults.prefix_seed import adding

__all__ = ["FAULTS"]

FAULTS: list[Fault] = []
_fault = adding(FAULTS)


# Matches


@_fault("last-block-not-matched", "A match that goes to the end of the tokens leaves their last block out.", "001")
class _LastBlock(RadixPrefixCache):
    def match_prefix(self, tokens: Any, namespace: Any = (), *, record: bool = True) -> MatchResult:
        found = super().match_prefix(tokens, namespace, record=record)
        whole = len(tokens) // self.block_size * self.block_size
        if 0 < whole == found.handle.cached_len:
            return super().match_prefix(tokens[: whole - self.block_size], namespace, record=False)
        return found


@_fault("slots-of-64-bits", "Slots come back as int64.", "001")
class _WideSlots(RadixPrefixCache):
    def match_prefix(self, tokens: Any, namespace: Any = (), *, record: bool = True) -> MatchResult:
        handle, indices = super().match_prefix(tokens, namespace, record=record)
        return MatchResult(handle, indices.astype(np.int64))


@_fault("handle-of-the-root", "The handle of a match stands for no token.", "001", "005")
class _RootHandle(RadixPrefixCache):
    def match_prefix(self, tokens: Any, namespace: Any = (), *, record: bool = True) -> MatchResult:
        found = super().match_prefix(tokens, namespace, record=record)
        return MatchResult(super().match_prefix([], namespace, record=False).handle, found.indices)


@_fault("answers-shared", "The same array is returned for equal matches, whatever a caller has done with it.", "003")
class _SharedAnswers(RadixPrefixCache):
    def match_prefix(self, tokens: Any, namespace: Any = (), *, record: bool = True) -> MatchResult:
        handle, indices = super().match_prefix(tokens, namespace, record=record)
        kept: dict[int, Any] = self.__dict__.setdefault("kept", {})
        return MatchResult(handle, kept.setdefault(indices.size, indices))


@_fault("slots-aliased", "Stored slots are a view of the caller's array.", "003")
class _AliasedSlots(RadixPrefixCache):
    def insert_prefix(self, tokens: Any, slots: Any, namespace: Any = (), *, priority: int = 0) -> InsertResult:
        made = super().insert_prefix(tokens, slots, namespace, priority=priority)
        node: Any = getattr(made.handle, "node", None)
        if node is not None and self.block_size == 1 and isinstance(slots, np.ndarray) and slots.dtype == np.int32 and not made.cached_len:
            node.blocks = slots
        return made


@_fault("ids-cut-to-32-bits", "Of a token id the lower 32 bits count.", "003")
class _CutIds(RadixPrefixCache):
    def _data(self, ids: Any) -> memoryview:
        return super()._data(ids.astype(np.int32))


@_fault("numpy-only", "Lists are refused.", "003")
class _NumpyOnly(RadixPrefixCache):
    def match_prefix(self, tokens: Any, namespace: Any = (), *, record: bool = True) -> MatchResult:
        if isinstance(tokens, list):
            raise ArgumentTypeError("match_prefix: tokens", expected="an array", got="a list")
        return super().match_prefix(tokens, namespace, record=record)


# Namespaces


class _OtherSpaces(RadixPrefixCache):
    """Changes namespaces before it looks at them."""

    def space(self, namespace: Any) -> Any:
        """Return another namespace."""
        raise NotImplementedError

    def match_prefix(self, tokens: Any, namespace: Any = (), *, record: bool = True) -> MatchResult:
        return super().match_prefix(tokens, self.space(namespace), record=record)

    def insert_prefix(self, tokens: Any, slots: Any, namespace: Any = (), *, priority: int = 0) -> InsertResult:
        return super().insert_prefix(tokens, slots, self.space(namespace), priority=priority)


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


@_fault("duplicates-not-canonical", "An insertion returns the slots that the caller passed.", "002")
class _NotCanonical(RadixPrefixCache):
    def insert_prefix(self, tokens: Any, slots: Any, namespace: Any = (), *, priority: int = 0) -> InsertResult:
        passed = np.array(slots, dtype=np.int32)
        made = super().insert_prefix(tokens, slots, namespace, priority=priority)
        return InsertResult(made.cached_len, made.handle, passed[: made.handle.cached_len])


@_fault("what-was-there-miscounted", "cached_len of an insertion counts what is stored behind it.", "002")
class _Miscounted(RadixPrefixCache):
    def insert_prefix(self, tokens: Any, slots: Any, namespace: Any = (), *, priority: int = 0) -> InsertResult:
        made = super().insert_prefix(tokens, slots, namespace, priority=priority)
        return InsertResult(made.handle.cached_len, made.handle, made.indices)


# Locks


@_fault("split-loses-its-lock", "The upper part of a node that is split is not locked.", "006")
class _UnlockedSplit(RadixPrefixCache):
    def _split(self, node: Any, count: int) -> Any:
        upper = super()._split(node, count)
        if upper.users:
            upper.users = 0
            self._protected -= len(upper.blocks)
        return upper


@_fault("end-not-locked", "A lock protects what is before the node that it is about, and not that.", "005", "006")
class _EndNotLocked(RadixPrefixCache):
    def _hold(self, node: Any) -> None:
        if node.parent is not None:
            super()._hold(node.parent)

    def _let_go(self, node: Any) -> None:
        if node.parent is not None:
            super()._let_go(node.parent)


@_fault("one-lock-for-all", "The first unlock gives back all locks of a place.", "005")
class _OneLock(RadixPrefixCache):
    def _let_go(self, node: Any) -> None:
        if node.parent is not None and not node.children and node.users > 1:
            node.users = 1
        super()._let_go(node)

    def lock_handle(self, handle: PrefixHandle, unlock: bool = False) -> None:
        node: Any = getattr(handle, "node", None)
        was_free = unlock and node is not None and node.parent is not None and not node.users
        held: Any = handle
        if was_free and held.locks:
            node.users = 1
            self._protected += len(node.blocks)
        super().lock_handle(handle, unlock)


# Evictions


@_fault("eviction-rounds-down", "Evicting n tokens frees as many blocks as n holds.", "006")
class _RoundsDown(RadixPrefixCache):
    def evict(self, size: int) -> Any:
        return super().evict(size // self.block_size * self.block_size if isinstance(size, int) and size > 0 else size)


@_fault("eviction-in-whole-runs", "An eviction goes on to the end of a run of blocks.", "006")
class _WholeRuns(RadixPrefixCache):
    def _trim(self, node: Any, count: int) -> Any:
        return self._remove(node)

    def evict(self, size: int) -> Any:
        with contextlib.suppress(ValueError):
            return super().evict(size)
        return np.empty(0, dtype=np.int32)


@_fault("eviction-returns-blocks", "An eviction returns numbers of blocks.", "006")
class _Blocks(RadixPrefixCache):
    def evict(self, size: int) -> Any:
        return super().evict(size)[:: self.block_size] // self.block_size


@_fault("eviction-returns-what-there-is", "Evicting more than there is frees what there is, and does not raise.", "009")
class _WhatThereIs(RadixPrefixCache):
    def evict(self, size: int) -> Any:
        try:
            return super().evict(size)
        except OutOfBlocksError:
            return super().evict(self.size_info.evictable_size)


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
    def match_prefix(self, tokens: Any, namespace: Any = (), *, record: bool = True) -> MatchResult:
        return super().match_prefix(tokens, namespace, record=True)


class _Clock(EvictionPolicy):
    """Asks the clock on the wall."""

    name = "by the clock"

    def __init__(self) -> None:
        self.stamps: dict[int, int] = {}

    def key(self, usage: Any) -> int:
        return self.stamps.setdefault(usage.number, time.time_ns())


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
        return self.coins.setdefault(usage.number, random.random())  # noqa: S311 - the fault


@_fault("evicts-by-chance", "What is evicted first is a matter of chance.", "015")
class _ByChance(RadixPrefixCache):
    def __init__(self, block_size: int = 16, policy: Any = None) -> None:
        super().__init__(block_size, _Chance())


@_fault("discard-forgets-all", "Discarding the end of a prefix does not stop where it is told to.", "010")
class _ForgetsAll(RadixPrefixCache):
    def discard_prefix(self, handle: PrefixHandle, start: int) -> Any:
        super().discard_prefix(handle, start)
        return super().discard_prefix(handle, 0) if handle.cached_len == 0 else self._rest(handle, start)

    def _rest(self, handle: PrefixHandle, start: int) -> Any:
        """Free one block more than was asked for."""
        return super().discard_prefix(handle, max(start - self.block_size, 0)) if start else np.empty(0, dtype=np.int32)


# Handles


@_fault("foreign-handles-taken", "A handle of another cache is taken for one of its own.", "008")
class _ForeignTaken(RadixPrefixCache):
    def _checked(self, handle: Any) -> Any:
        if getattr(handle, "owner", self) is not self and hasattr(handle, "node"):
            return handle
        return super()._checked(handle)


@_fault("second-unlock-taken", "An unlock without a lock does nothing.", "008")
class _SecondUnlock(RadixPrefixCache):
    def lock_handle(self, handle: PrefixHandle, unlock: bool = False) -> None:
        if not unlock or self._checked(handle).locks:
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
    def reset(self) -> Any:
        slots = super().reset()
        self._epoch -= 1
        return slots


@_fault("reset-keeps-what-is-locked", "A reset leaves locked prefixes where they are.", "011")
class _KeepsLocked(RadixPrefixCache):
    def reset(self) -> Any:
        return self.evict(self.size_info.evictable_size)


# Arguments


@_fault("lengths-cut", "Of tokens and slots of different number, those that both have are stored.", "009")
class _LengthsCut(RadixPrefixCache):
    def insert_prefix(self, tokens: Any, slots: Any, namespace: Any = (), *, priority: int = 0) -> InsertResult:
        if hasattr(slots, "__len__") and hasattr(tokens, "__len__") and not isinstance(tokens, str):
            count = min(len(tokens), len(slots))
            tokens, slots = tokens[:count], slots[:count]
        return super().insert_prefix(tokens, slots, namespace, priority=priority)


@_fault("error-after-a-partial-insertion", "The first block is stored before the slots of the others are looked at.", "009")
class _PartialInsertion(RadixPrefixCache):
    def insert_prefix(self, tokens: Any, slots: Any, namespace: Any = (), *, priority: int = 0) -> InsertResult:
        try:
            return super().insert_prefix(tokens, slots, namespace, priority=priority)
        except ArgumentValueError:
            if isinstance(slots, list):
                super().insert_prefix(tokens[: self.block_size], slots[: self.block_size], namespace, priority=priority)
            raise


@_fault("floats-rounded", "Tokens that are floats are rounded.", "009")
class _FloatsRounded(RadixPrefixCache):
    def match_prefix(self, tokens: Any, namespace: Any = (), *, record: bool = True) -> MatchResult:
        if isinstance(tokens, np.ndarray) and tokens.dtype.kind == "f":
            tokens = tokens.astype(np.int64)
        return super().match_prefix(tokens, namespace, record=record)


@_fault("owned-slots-taken", "Slots that are stored for other tokens are stored again.", "009")
class _OwnedTaken(RadixPrefixCache):
    def insert_prefix(self, tokens: Any, slots: Any, namespace: Any = (), *, priority: int = 0) -> InsertResult:
        try:
            return super().insert_prefix(tokens, slots, namespace, priority=priority)
        except ArgumentValueError as error:
            if "for another token" not in str(error):
                raise
            self._owned.clear()
            return super().insert_prefix(tokens, slots, namespace, priority=priority)


@_fault("any-block-size", "A block of no tokens is made one of one, and one of too many is made.", "018")
class _AnySize(RadixPrefixCache):
    def __init__(self, block_size: int = 16, policy: Any = "lru") -> None:
        super().__init__(max(1, min(block_size, 512)), policy)


# Books


@_fault("protected-counted-twice", "evictable_size counts what is locked too.", "012")
class _CountedTwice(RadixPrefixCache):
    @property
    def size_info(self) -> SizeInfo:
        return SizeInfo(self._stored * self.block_size, self._protected * self.block_size)


@_fault("blocks-unsorted", "stored_blocks is in no order.", "012")
class _Unsorted(RadixPrefixCache):
    def stored_blocks(self) -> Any:
        return super().stored_blocks()[::-1]


@_fault("hits-miscounted", "Every token that is looked up counts as a hit.", "014")
class _HitsMiscounted(RadixPrefixCache):
    def _record(self, handle: Any, num_tokens: int) -> None:
        super()._record(handle, num_tokens)
        self._hit_tokens = self._lookup_tokens


@_fault("events-of-removal-missing", "Nobody is told what was evicted.", "013")
class _SilentRemoval(RadixPrefixCache):
    def _removed(self, blocks: Any) -> Any:
        emit, self._events.emit = self._events.emit, lambda event: None  # type: ignore[method-assign]  # the fault
        try:
            return super()._removed(blocks)
        finally:
            self._events.emit = emit  # type: ignore[method-assign]  # as it was


@_fault("events-name-slots", "Events of removal name slots instead of blocks.", "013")
class _SlotEvents(RadixPrefixCache):
    def _removed(self, blocks: Any) -> Any:
        emit, size = self._events.emit, self.block_size

        def with_slots(event: Any) -> None:
            emit(Removed(event.blocks * size + (size == 1)))

        self._events.emit = with_slots  # type: ignore[method-assign]  # the fault
        try:
            return super()._removed(blocks)
        finally:
            self._events.emit = emit  # type: ignore[method-assign]  # as it was


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
        self._owner = threading.current_thread()
