"""Faults of prefix caches in what they find, store, lock and evict: the radix tree, wrong in one way each."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np

from kvdock.errors import ArgumentTypeError, OutOfBlocksError, StaleHandleError
from kvdock.prefix import EvictionPolicy, InsertResult, PrefixMatch, SizeInfo
from kvdock.prefix.inputs import slots_of
from kvdock_conformance.faults.prefix_seed import Change, after, answered, changed, faults_of, first, forgiving

__all__ = ["FAULTS", "By"]

_TABLE = """
last-block-not-matched     | 001 032 | A match that goes to the end of the tokens leaves their last block out.
blocks-of-64-bits          | 001     | Blocks come back as int64.
indices-in-blocks          | 001 002 | Indices are blocks.
handle-of-the-root         | 001 005 | The handle of a match stands for no token.
answers-shared             | 003     | The same array is returned for equal matches, whatever a caller has done with it.
blocks-aliased             | 003     | Stored blocks are the caller's array.
blocks-passed-back         | 003 020 | An insertion of what is new returns the caller's array.
ids-cut-to-32-bits         | 003     | Of a token id the lower 32 bits count.
numpy-only                 | 003     | Lists are refused.
types-of-parts-dropped     | 004     | Parts of a namespace that print alike are equal.
parts-joined               | 004     | The parts of a namespace are joined without a mark between them.
true-is-one                | 004     | A part True is taken for 1.
namespaces-by-hash         | 004     | Namespaces are compared by their hashes.
duplicates-not-canonical   | 002 021 032 | An insertion returns the blocks that the caller passed.
what-was-there-miscounted  | 002     | cached_len of an insertion counts what is stored by it.
split-loses-its-lock       | 005 006 | The upper part of a run that is split is not locked.
end-not-locked             | 005 006 032 | A lock protects what is before the last block of its prefix, and not that.
one-lock-for-all           | 005     | The first unlock releases all locks of a place.
lock-of-a-whole-run        | 005 023 | A lock protects the rest of the run that its place is in.
eviction-in-tokens         | 006     | Evicting n blocks frees those of n tokens.
eviction-of-one-more       | 006 023 032 | Evicting n blocks frees one more, where there is one.
eviction-returns-slots     | 006     | An eviction returns the slots of what it frees.
eviction-returns-what-there-is | 009 | Evicting more than there is frees what there is, and does not raise.
a-use-does-not-count       | 007     | The cache declares lru, and evicts what was stored first.
a-look-is-a-use            | 007 014 | A match that is not recorded counts as a use.
evicts-by-the-clock        | 015     | What is evicted first depends on the time of day.
evicts-by-chance           | 015     | What is evicted first is a matter of chance.
evicts-by-hash             | 015     | What is evicted first follows Python's hash of a text, which has another seed in each process.
evicts-by-address          | 015     | What is evicted first depends on where it lies in memory.
evicted-in-a-set           | 015     | The blocks of an eviction are returned in the order of a set of texts.
discard-forgets-one-more   | 010     | Discarding the end of a prefix keeps one block less than it is told.
discard-in-tokens          | 010     | Discarding the end of a prefix keeps so many tokens.
foreign-handles-taken      | 008     | Locking by a handle of another cache does nothing.
second-unlock-taken        | 008     | An unlock without a lock does nothing.
stale-handles-ignored      | 008     | Locking what was evicted does nothing.
handles-outlive-a-reset    | 011 008 | A handle from before a reset is good after it.
reset-keeps-what-is-locked | 011     | A reset leaves locked prefixes where they are.
any-block-size             | 018     | A block of no tokens is made one of one, and one of too many is made.
protected-counted-twice    | 012 032 | evictable_size counts what is locked too.
blocks-unsorted            | 012     | stored_blocks is in no order.
walks-by-recursion         | 016     | Paths are walked by recursion.
threads-unnoticed          | 017     | Any thread may call at any time.
"""


# Matches and insertions


def _last_block(cache: Any, match: Any, tokens: Any, *rest: Any, **how: Any) -> Any:
    found, whole = match(tokens, *rest, **how), len(tokens) // cache.block_size * cache.block_size
    return match(tokens[: whole - cache.block_size], *rest, record=False) if 0 < whole == found.handle.cached_len else found


def _as_slots(answer: type[Any]) -> Change:
    """Return a change that takes the blocks of an answer for its slots."""
    return answered(lambda made: changed(answer, indices=lambda made, slots: made.blocks)(*made))


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


def _numpy_only(cache: Any, tokens: Any) -> Any:
    if isinstance(tokens, list):
        raise ArgumentTypeError("match_prefix: tokens", expected="an array", got="a list")
    return tokens


def _spaces(change: Change) -> dict[str, Change]:
    """Return changes that take a namespace for another."""
    return {
        "match_prefix": lambda cache, match, tokens, space=(), **how: match(tokens, change(space), **how),
        "insert_prefix": lambda cache, insert, tokens, blocks, space=(), **how: insert(tokens, blocks, change(space), **how),
    }


_CUT = first(lambda cache, tokens: [int(token) % 2**32 for token in tokens])
_FOUND: dict[str, dict[str, Any]] = {
    "last-block-not-matched": {"match_prefix": _last_block},
    "blocks-of-64-bits": {"match_prefix": answered(lambda found: found._replace(blocks=found.blocks.astype(np.int64)))},
    "indices-in-blocks": {"match_prefix": _as_slots(PrefixMatch), "insert_prefix": _as_slots(InsertResult)},
    "handle-of-the-root": {
        "match_prefix": lambda cache, match, *args, **how: match(*args, **how)._replace(handle=match([], *args[1:]).handle)
    },
    "answers-shared": {"match_prefix": _shared},
    "blocks-aliased": {"match_prefix": _shared, "insert_prefix": _aliased},
    "blocks-passed-back": {"insert_prefix": _passed_back},
    "ids-cut-to-32-bits": {"match_prefix": _CUT, "insert_prefix": _CUT},
    "numpy-only": {"match_prefix": first(_numpy_only)},
    "types-of-parts-dropped": _spaces(lambda space: tuple(map(str, space))),
    "parts-joined": _spaces(lambda space: ("".join(map(repr, space)).replace("''", ""),)),
    "true-is-one": _spaces(lambda space: tuple(int(part) if isinstance(part, bool) else part for part in space)),
    "namespaces-by-hash": _spaces(lambda space: tuple(map(hash, space))),
    "duplicates-not-canonical": {
        "insert_prefix": lambda cache, insert, *args, **how: insert(*args, **how)._replace(blocks=np.array(args[1], np.int32))
    },
    "what-was-there-miscounted": {"insert_prefix": answered(lambda made: made._replace(cached_len=made.handle.cached_len))},
}


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


def _depth(node: Any) -> int:
    return 0 if node is None or node.parent is None else 1 + _depth(node.parent)


def _taken(text: str) -> dict[str, Change]:
    """Return a change that takes a handle in silence that is refused with a text."""
    return {"lock_handle": forgiving(StaleHandleError, text, lambda cache, lock, *args, **how: None)}


_LOCKED: dict[str, dict[str, Any]] = {
    "split-loses-its-lock": {"tree": {"_split": _unlocked_split}},
    "end-not-locked": {"tree": {"lock": _one_too_few, "unlock": _one_too_few}},
    "one-lock-for-all": {"tree": {"unlock": _first_unlock}},
    "lock-of-a-whole-run": {"lock_handle": _whole_run},
    "foreign-handles-taken": _taken("one of this cache"),
    "second-unlock-taken": _taken("expected a locked one"),
    "stale-handles-ignored": _taken("which is evicted"),
    "handles-outlive-a-reset": _taken("from before a reset"),
    "walks-by-recursion": {"lock_handle": after(lambda cache, nothing, handle, **how: _depth(getattr(handle, "node", None)))},
    "threads-unnoticed": {"_enter": lambda cache, enter: None},
}


# Evictions and sizes


def _what_there_is(cache: Any, evict: Any, num_blocks: int) -> Any:
    return evict(cache.size_info.evictable_size // cache.block_size)


class By(EvictionPolicy):
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


def _policy(key: Change, name: str = "of one's own") -> dict[str, Change]:
    """Return a change of ``__init__`` that brings another policy."""
    return {"__init__": lambda cache, init, block_size=16, policy=None: init(block_size, By(name, key))}


_WENT: dict[str, dict[str, Any]] = {
    "eviction-in-tokens": {"evict": first(lambda cache, count: -(-count // cache.block_size))},
    "eviction-of-one-more": {"evict": first(lambda cache, count: count + (count * cache.block_size < cache.size_info.evictable_size))},
    "eviction-returns-slots": {"evict": lambda cache, evict, count: slots_of(evict(count), cache.block_size)},
    "eviction-returns-what-there-is": {"evict": forgiving(OutOfBlocksError, "", _what_there_is)},
    "a-use-does-not-count": _policy(lambda usage: usage.created, "lru"),
    "a-look-is-a-use": {"match_prefix": lambda cache, match, tokens, space=(), record=True: match(tokens, space)},
    "evicts-by-the-clock": _policy(lambda usage: time.time_ns()),
    "evicts-by-chance": _policy(lambda usage: random.random()),  # noqa: S311 - the fault
    "evicts-by-hash": _policy(lambda usage: hash(str(usage.created))),
    "evicts-by-address": _policy(id),
    "evicted-in-a-set": {"evict": answered(lambda gone: np.array([int(text) for text in set(map(str, gone))], dtype=np.int32))},
    "discard-forgets-one-more": {"discard_prefix": lambda cache, discard, handle, keep: discard(handle, max(keep - 1, 0))},
    "discard-in-tokens": {"discard_prefix": lambda cache, discard, handle, keep: discard(handle, keep // cache.block_size)},
    "reset-keeps-what-is-locked": {"reset": lambda cache, reset: cache.evict(cache.size_info.evictable_size // cache.block_size)},
    "any-block-size": {"__init__": lambda cache, init, block_size=16: init(max(1, min(block_size, 512)))},
    "protected-counted-twice": {"size_info": lambda cache, sizes: SizeInfo(sizes.total_size, sizes.protected_size)},
    "blocks-unsorted": {"stored_blocks": answered(lambda blocks: blocks[::-1])},
}

FAULTS = faults_of(_TABLE, {**_FOUND, **_LOCKED, **_WENT})
