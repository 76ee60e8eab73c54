"""Faults of prefix caches in what is stored behind a handle, in handles that live on, in copies, and in blocks that begin alike."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvdock.errors import ArgumentValueError, StaleHandleError
from kvdock.prefix import InsertResult, PartialMatch, PrefixHandle, RadixPrefixCache
from kvdock.prefix.labels import tokens_of
from kvdock.prefix.tree import RadixTree
from kvdock_conformance.faults.fault import Fault
from kvdock_conformance.faults.prefix_seed import FaultyTree, adding

__all__ = ["FAULTS"]

FAULTS: list[Fault] = []
_fault = adding(FAULTS)


# Insertions behind a handle


@_fault("behind-ignored", "What follows a handle is stored from the beginning.", "021", "023")
class _Ignored(RadixPrefixCache):
    def insert_prefix(self, tokens: Any, blocks: Any, namespace: Any = (), *, behind: Any = None, priority: int = 0) -> InsertResult:
        return super().insert_prefix(tokens, blocks, namespace, priority=priority)


class _AnsweredBehind(RadixPrefixCache):
    """Answers insertions behind a handle in another way."""

    def answer(self, made: InsertResult, behind: Any) -> InsertResult:
        """Return another answer."""
        raise NotImplementedError

    def insert_prefix(self, tokens: Any, blocks: Any, namespace: Any = (), *, behind: Any = None, priority: int = 0) -> InsertResult:
        made = super().insert_prefix(tokens, blocks, namespace, behind=behind, priority=priority)
        return made if behind is None else self.answer(made, behind)


@_fault("behind-counted-from-there", "cached_len of an insertion behind a handle counts from there.", "021", "023")
class _Relative(_AnsweredBehind):
    def answer(self, made: InsertResult, behind: Any) -> InsertResult:
        return made._replace(cached_len=made.cached_len - behind.cached_len)


@_fault("behind-handle-counted-from-there", "The handle of an insertion behind another counts from there.", "021")
class _RelativeHandle(_AnsweredBehind):
    def answer(self, made: InsertResult, behind: Any) -> InsertResult:
        made.handle.cached_len -= behind.cached_len
        return made


@_fault("behind-blocks-of-the-whole", "An insertion behind a handle returns the blocks before it, too.", "021")
class _Whole(_AnsweredBehind):
    def answer(self, made: InsertResult, behind: Any) -> InsertResult:
        above: list[Any] = []
        node = behind.node
        while node is not None:
            above.append(node.blocks[: behind.position - node.start])
            node = node.parent
        return made._replace(blocks=np.concatenate((*above[::-1], made.blocks)))


class _NoUses(RadixTree):
    """Counts no uses."""

    def use(self, node: Any, upto: int, priority: int | None) -> None:
        if node is None or not node.uses or priority is None:
            super().use(node, upto, priority)


@_fault("behind-is-no-use", "An insertion that goes on where one ended is no use of what is before.", "007")
class _NoUse(FaultyTree):
    tree = _NoUses


@_fault("behind-not-protected", "A lock of what was stored behind a handle does not protect what is before.", "005")
class _NotProtected(_AnsweredBehind):
    def answer(self, made: InsertResult, behind: Any) -> InsertResult:
        self.__dict__.setdefault("parts", {})[made.handle] = behind
        return made

    def lock_handle(self, handle: PrefixHandle, unlock: bool = False) -> None:
        super().lock_handle(handle, unlock)
        before: Any = self.__dict__.get("parts", {}).get(handle)
        if before is not None and before.node is not None:
            self._tree.protected += before.position if unlock else -before.position


@_fault("behind-taken-twice", "Blocks that are before the handle are stored behind it again.", "009")
class _TakenTwice(RadixPrefixCache):
    def insert_prefix(self, tokens: Any, blocks: Any, namespace: Any = (), *, behind: Any = None, priority: int = 0) -> InsertResult:
        if behind is not None:
            self._owned.clear()
        return super().insert_prefix(tokens, blocks, namespace, behind=behind, priority=priority)


@_fault("behind-in-another-namespace", "What follows a handle of another namespace is stored in the one that is named.", "009")
class _OtherSpace(_Ignored):
    def insert_prefix(self, tokens: Any, blocks: Any, namespace: Any = (), *, behind: Any = None, priority: int = 0) -> InsertResult:
        try:
            return RadixPrefixCache.insert_prefix(self, tokens, blocks, namespace, behind=behind, priority=priority)
        except ArgumentValueError as error:
            if "of another" not in str(error):
                raise
            return super().insert_prefix(tokens, blocks, namespace, priority=priority)


@_fault("behind-what-is-stale", "What follows a stale handle, or another cache's, is stored from the beginning.", "008", "024")
class _BehindStale(_Ignored):
    def insert_prefix(self, tokens: Any, blocks: Any, namespace: Any = (), *, behind: Any = None, priority: int = 0) -> InsertResult:
        try:
            return RadixPrefixCache.insert_prefix(self, tokens, blocks, namespace, behind=behind, priority=priority)
        except StaleHandleError:
            return super().insert_prefix(tokens, blocks, namespace, priority=priority)


@_fault("behind-looked-at-again", "What is before the handle is inserted once more.", "022")
class _LookedAt(RadixPrefixCache):
    def insert_prefix(self, tokens: Any, blocks: Any, namespace: Any = (), *, behind: Any = None, priority: int = 0) -> InsertResult:
        node, position = getattr(behind, "node", None), getattr(behind, "position", 0)
        before = [] if node is None or not node.is_stored else tokens_of(node.label, self._tree.token_bytes).tolist()
        super().match_prefix(before[: position * self.block_size], namespace, record=False)
        return super().insert_prefix(tokens, blocks, namespace, behind=behind, priority=priority)


# Handles that live on


class _EarlyStale(RadixPrefixCache):
    """Lets handles go stale too early."""

    def is_stale(self, handle: Any) -> bool:
        """Whether it is stale, if it is not yet."""
        raise NotImplementedError

    def lock_handle(self, handle: PrefixHandle, unlock: bool = False) -> None:
        if not unlock and getattr(handle, "node", None) is not None and self.is_stale(handle):
            raise StaleHandleError("handle", expected="the end of a run", got="another place")
        super().lock_handle(handle, unlock)


@_fault("handles-stale-by-growth", "A handle is stale when something was stored behind it.", "023", "024")
class _StaleByGrowth(_EarlyStale):
    def is_stale(self, handle: Any) -> bool:
        return bool(handle.node.end > handle.position or handle.node.children)


@_fault("handles-stale-by-splits", "A handle to what is before a place where a run was split is stale.", "024")
class _StaleBySplits(_EarlyStale):
    def is_stale(self, handle: Any) -> bool:
        return bool(handle.node.start >= handle.position)


class _ForgetsTrims(RadixTree):
    """Does not know whether something was taken off a run."""

    def cut(self, node: Any, end: int) -> Any:
        gone = super().cut(node, end)
        node.was_trimmed = False
        return gone


@_fault("handles-to-what-grew-anew", "What is stored where something was evicted is taken for that.", "023", "024")
class _GrewAnew(FaultyTree):
    tree = _ForgetsTrims


# Copies, and what a cache says of itself


@_fault("copies-made", "A cache can be copied, and then two own its blocks.", "025")
class _Copied(RadixPrefixCache):
    __reduce_ex__ = object.__reduce_ex__  # type: ignore[assignment]  # the fault


@_fault("copies-of-handles", "A copy of a handle is the handle.", "025")
class _CopiedHandles(RadixPrefixCache):
    def insert_prefix(self, tokens: Any, blocks: Any, namespace: Any = (), **how: Any) -> InsertResult:
        made = super().insert_prefix(tokens, blocks, namespace, **how)
        return made._replace(handle=_Copyable(made.handle.cached_len))

    def lock_handle(self, handle: PrefixHandle, unlock: bool = False) -> None:
        if not isinstance(handle, _Copyable):
            super().lock_handle(handle, unlock)


class _Copyable(PrefixHandle):
    """Allows copies."""

    __slots__ = ()

    def __copy__(self) -> Any:
        return self


@_fault("stores-in-secret", "A cache that stores says that it does not.", "027")
class _Secret(RadixPrefixCache):
    can_store = False


# Blocks that begin alike


@_fault("partial-any-number", "A block of which one token is the same is found.", "026")
class _AnyNumber(RadixPrefixCache):
    def match_partial(self, handle: PrefixHandle, tokens: Any) -> PartialMatch | None:
        ids = [int(token) for token in tokens]
        found = super().match_partial(handle, ids)
        half = (self.block_size + 1) // 2
        return found or super().match_partial(handle, [*ids, *[7] * half][:half])


@_fault("partial-whole-block", "A block that is there whole counts with all its tokens.", "026")
class _WholeBlock(RadixPrefixCache):
    def match_partial(self, handle: PrefixHandle, tokens: Any) -> PartialMatch | None:
        found = super().match_partial(handle, tokens)
        return found and found._replace(num_tokens=found.num_tokens + (found.num_tokens == self.block_size - 1))


@_fault("partial-is-a-use", "A block that is found to begin alike counts as used.", "026")
class _PartialIsUse(RadixPrefixCache):
    def match_partial(self, handle: PrefixHandle, tokens: Any) -> PartialMatch | None:
        found = super().match_partial(handle, tokens)
        if found is not None:
            super().record_match(found.handle, found.handle.cached_len)
        return found
