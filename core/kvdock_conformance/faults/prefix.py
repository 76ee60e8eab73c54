"""Faults of prefix caches in what they find, store, lock and evict: the radix tree, wrong in one way each."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np

from kvdock.errors import ArgumentTypeError, OutOfBlocksError, StaleHandleError
from kvdock.prefix import EvictionPolicy, InsertResult, PrefixMatch, SizeInfo
from kvdock.prefix.inputs import slots_of
from kvdock_conformance.faults.fault import Fault
from kvdock_conformance.faults.prefix_seed import Change, adding, changed

__all__ = ["FAULTS"]

FAULTS: list[Fault] = []
_fault = adding(FAULTS)


# Matches


def _last_block(cache: Any, match: Any, tokens: Any, *rest: Any, **how: Any) -> Any:
    found, whole = match(tokens, *rest, **how), len(tokens) // cache.block_size * cache.block_size
    return match(tokens[: whole - cache.block_size], *rest, record=False) if 0 < whole == found.handle.cached_len else found


_fault("last-block-not-matched", "A match that goes to the end of the tokens leaves their last block out.", "001", match_prefix=_last_block)


def _wide(cache: Any, match: Any, *args: Any, **how: Any) -> Any:
    handle, blocks = match(*args, **how)
    return PrefixMatch(handle, blocks.astype(np.int64))


def _named(answer: type[Any]) -> Change:
    """Return a change that takes the blocks of an answer for its slots."""
    return lambda cache, call, *args, **how: changed(answer, indices=lambda made, slots: made.blocks)(*call(*args, **how))


_fault("blocks-of-64-bits", "Blocks come back as int64.", "001", match_prefix=_wide)
_fault("indices-in-blocks", "Indices are blocks.", "001 002", match_prefix=_named(PrefixMatch), insert_prefix=_named(InsertResult))
_fault(
    "handle-of-the-root",
    "The handle of a match stands for no token.",
    "001 005",
    match_prefix=lambda cache, match, tokens, *rest, **how: match(tokens, *rest, **how)._replace(handle=match([], *rest).handle),
)


def _shared(cache: Any, match: Any, *args: Any, **how: Any) -> Any:
    found = match(*args, **how)
    return found._replace(blocks=vars(cache).setdefault("kept", {}).setdefault(found.blocks.size, found.blocks))


def _aliased(cache: Any, insert: Any, tokens: Any, blocks: Any, *rest: Any, **how: Any) -> Any:
    made = insert(tokens, blocks, *rest, **how)
    if isinstance(blocks, np.ndarray) and blocks.dtype == np.int32:
        vars(cache).setdefault("kept", {})[blocks.size] = blocks
    return made


def _passed_back(cache: Any, insert: Any, tokens: Any, blocks: Any, *rest: Any, **how: Any) -> Any:
    made = insert(tokens, blocks, *rest, **how)
    is_same = isinstance(blocks, np.ndarray) and blocks.dtype == np.int32 and np.array_equal(made.blocks, blocks)
    return made._replace(blocks=blocks) if is_same else made


def _cut(cache: Any, call: Any, tokens: Any, *rest: Any, **how: Any) -> Any:
    return call([int(token) % 2**32 for token in tokens], *rest, **how)


def _numpy_only(cache: Any, match: Any, tokens: Any, *rest: Any, **how: Any) -> Any:
    if isinstance(tokens, list):
        raise ArgumentTypeError("match_prefix: tokens", expected="an array", got="a list")
    return match(tokens, *rest, **how)


_fault("answers-shared", "The same array is returned for equal matches, whatever a caller has done with it.", "003", match_prefix=_shared)
_fault("blocks-aliased", "Stored blocks are the caller's array.", "003", match_prefix=_shared, insert_prefix=_aliased)
_fault("blocks-passed-back", "An insertion of what is new returns the caller's array.", "003 020", insert_prefix=_passed_back)
_fault("ids-cut-to-32-bits", "Of a token id the lower 32 bits count.", "003", match_prefix=_cut, insert_prefix=_cut)
_fault("numpy-only", "Lists are refused.", "003", match_prefix=_numpy_only)


# Namespaces


def _spaces(change: Change) -> dict[str, Change]:
    """Return changes that take a namespace for another."""
    return {
        "match_prefix": lambda cache, match, tokens, space=(), **how: match(tokens, change(space), **how),
        "insert_prefix": lambda cache, insert, tokens, blocks, space=(), **how: insert(tokens, blocks, change(space), **how),
    }


_fault("types-of-parts-dropped", "Parts of a namespace that print alike are equal.", "004", **_spaces(lambda space: tuple(map(str, space))))
_fault(
    "parts-joined",
    "The parts of a namespace are joined without a mark between them.",
    "004",
    **_spaces(lambda space: ("".join(map(repr, space)).replace("''", ""),)),
)
_fault(
    "true-is-one",
    "A part True is taken for 1.",
    "004",
    **_spaces(lambda space: tuple(int(part) if isinstance(part, bool) else part for part in space)),
)
_fault("namespaces-by-hash", "Namespaces are compared by their hashes.", "004", **_spaces(lambda space: tuple(map(hash, space))))


# Insertions

_fault(
    "duplicates-not-canonical",
    "An insertion returns the blocks that the caller passed.",
    "002 021",
    insert_prefix=lambda cache, insert, tokens, blocks, *rest, **how: insert(tokens, blocks, *rest, **how)._replace(
        blocks=np.array(blocks, dtype=np.int32)
    ),
)


def _miscounted(cache: Any, insert: Any, *args: Any, **how: Any) -> Any:
    made = insert(*args, **how)
    return made._replace(cached_len=made.handle.cached_len)


_fault("what-was-there-miscounted", "cached_len of an insertion counts what is stored by it.", "002", insert_prefix=_miscounted)


# Locks


def _unlocked_split(tree: Any, split: Any, node: Any, at: int) -> Any:
    upper = split(node, at)
    tree.protected -= upper.held
    upper.held = 0
    return upper


def _one_too_few(tree: Any, call: Any, node: Any, position: int) -> None:
    if node.start < position - 1:
        call(node, position - 1)
    elif node.parent.parent is not None:
        call(node.parent, position - 1)


def _first_unlock(tree: Any, unlock: Any, node: Any, position: int) -> None:
    if position in (node.locks or {}):
        node.locks[position] = 1
        unlock(node, position)


def _whole_run(cache: Any, lock: Any, handle: Any, unlock: bool = False) -> None:
    lock(handle, unlock)
    if not unlock and handle.node is not None:
        cache._tree.unlock(handle.node, handle.position)
        handle.position = handle.node.end
        cache._tree.lock(handle.node, handle.position)


_fault("split-loses-its-lock", "The upper part of a run that is split is not locked.", "005 006", tree={"_split": _unlocked_split})
_fault(
    "end-not-locked",
    "A lock protects what is before the last block of its prefix, and not that.",
    "005 006",
    tree={"lock": _one_too_few, "unlock": _one_too_few},
)
_fault("one-lock-for-all", "The first unlock releases all locks of a place.", "005", tree={"unlock": _first_unlock})
_fault("lock-of-a-whole-run", "A lock protects the rest of the run that its place is in.", "005 023", lock_handle=_whole_run)


# Evictions


def _what_there_is(cache: Any, evict: Any, num_blocks: int) -> Any:
    try:
        return evict(num_blocks)
    except OutOfBlocksError:
        return evict(cache.size_info.evictable_size // cache.block_size)


_fault(
    "eviction-in-tokens",
    "Evicting n blocks frees those of n tokens.",
    "006",
    evict=lambda cache, evict, count: evict(-(-count // cache.block_size)),
)
_fault(
    "eviction-of-one-more",
    "Evicting n blocks frees one more, where there is one.",
    "006 023",
    evict=lambda cache, evict, count: evict(count + (count * cache.block_size < cache.size_info.evictable_size)),
)
_fault(
    "eviction-returns-slots",
    "An eviction returns the slots of what it frees.",
    "006",
    evict=lambda cache, evict, count: slots_of(evict(count), cache.block_size),
)
_fault(
    "eviction-returns-what-there-is", "Evicting more than there is frees what there is, and does not raise.", "009", evict=_what_there_is
)


class _By(EvictionPolicy):
    """Asks a function once for each time of creation.

    Args:
        name: what it says that it is.
        key: the function.
    """

    def __init__(self, name: str, key: Any) -> None:
        self.name, self._key, self._found = name, key, dict[int, Any]()

    def key(self, usage: Any) -> Any:
        """Return what the function said first."""
        return self._found.setdefault(usage.created, self._key(usage))


def _policy(name: str, key: Change) -> Change:
    """Return a change of ``__init__`` that brings another policy."""
    return lambda cache, init, block_size=16, policy=None: init(block_size, _By(name, key))


_fault(
    "a-use-does-not-count",
    "The cache declares lru, and evicts what was stored first.",
    "007",
    __init__=_policy("lru", lambda usage: usage.created),
)
_fault(
    "a-look-is-a-use",
    "A match that is not recorded counts as a use.",
    "007 014",
    match_prefix=lambda cache, match, tokens, space=(), record=True: match(tokens, space),
)
_fault(
    "evicts-by-the-clock",
    "What is evicted first depends on the time of day.",
    "015",
    __init__=_policy("by the clock", lambda usage: time.time_ns()),
)
_fault(
    "evicts-by-chance",
    "What is evicted first is a matter of chance.",
    "015",
    __init__=_policy("by chance", lambda usage: random.random()),  # noqa: S311 - the fault
)
_fault(
    "discard-forgets-one-more",
    "Discarding the end of a prefix keeps one block less than it is told.",
    "010",
    discard_prefix=lambda cache, discard, handle, keep: discard(handle, max(keep - 1, 0)),
)
_fault(
    "discard-in-tokens",
    "Discarding the end of a prefix keeps so many tokens.",
    "010",
    discard_prefix=lambda cache, discard, handle, keep: discard(handle, keep // cache.block_size),
)


# Handles and resets


def _good_when(text: str) -> Change:
    """Return a change that takes a handle in silence that is refused with a text."""

    def lock_handle(cache: Any, lock: Any, handle: Any, unlock: bool = False) -> None:
        try:
            lock(handle, unlock)
        except StaleHandleError as error:
            if text not in str(error):
                raise

    return lock_handle


_fault("foreign-handles-taken", "Locking by a handle of another cache does nothing.", "008", lock_handle=_good_when("one of this cache"))
_fault("second-unlock-taken", "An unlock without a lock does nothing.", "008", lock_handle=_good_when("expected a locked one"))
_fault("stale-handles-ignored", "Locking what was evicted does nothing.", "008", lock_handle=_good_when("which is evicted"))
_fault(
    "handles-outlive-a-reset", "A handle from before a reset is good after it.", "011 008", lock_handle=_good_when("from before a reset")
)
_fault(
    "reset-keeps-what-is-locked",
    "A reset leaves locked prefixes where they are.",
    "011",
    reset=lambda cache, reset: cache.evict(cache.size_info.evictable_size // cache.block_size),
)


# Sizes, depth and threads


def _depth(node: Any) -> int:
    return 0 if node is None or node.parent is None else 1 + _depth(node.parent)


def _recursive(cache: Any, lock: Any, handle: Any, unlock: bool = False) -> None:
    lock(handle, unlock)
    _depth(getattr(handle, "node", None))


_fault(
    "any-block-size",
    "A block of no tokens is made one of one, and one of too many is made.",
    "018",
    __init__=lambda cache, init, block_size=16: init(max(1, min(block_size, 512))),
)
_fault(
    "protected-counted-twice",
    "evictable_size counts what is locked too.",
    "012",
    size_info=lambda cache, sizes: SizeInfo(sizes.total_size, sizes.protected_size),
)
_fault("blocks-unsorted", "stored_blocks is in no order.", "012", stored_blocks=lambda cache, stored: stored()[::-1])
_fault("walks-by-recursion", "Paths are walked by recursion.", "016", lock_handle=_recursive)
_fault("threads-unnoticed", "Any thread may call at any time.", "017", _enter=lambda cache, enter: None)
