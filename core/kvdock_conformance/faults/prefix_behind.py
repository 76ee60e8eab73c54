"""Faults of prefix caches in what is stored behind a handle, in handles that live on, in copies, and in blocks that begin alike."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvdock.errors import ArgumentValueError, StaleHandleError
from kvdock.prefix import PrefixHandle
from kvdock_conformance.faults.fault import Fault
from kvdock_conformance.faults.prefix_seed import Change, adding

__all__ = ["FAULTS"]

FAULTS: list[Fault] = []
_fault = adding(FAULTS)


# Insertions behind a handle


def _answered(change: Change) -> Change:
    """Return a change of what an insertion behind a handle answers."""

    def insert_prefix(cache: Any, insert: Any, *args: Any, behind: Any = None, **how: Any) -> Any:
        made = insert(*args, behind=behind, **how)
        return made if behind is None else change(cache, made, behind)

    return insert_prefix


def _from_the_beginning(error: type[Exception]) -> Change:
    """Return a change that stores what follows a handle that is refused from the beginning."""

    def insert_prefix(cache: Any, insert: Any, *args: Any, behind: Any = None, **how: Any) -> Any:
        try:
            return insert(*args, behind=behind, **how)
        except error:
            return insert(*args, **how)

    return insert_prefix


def _whole(cache: Any, made: Any, behind: Any) -> Any:
    runs, node = [made.blocks], behind.node
    while node is not None:
        runs.append(node.blocks[: behind.position - node.start])
        node = node.parent
    return made._replace(blocks=np.concatenate(runs[::-1]))


def _no_use(tree: Any, use: Any, node: Any, upto: int, priority: Any) -> None:
    if node is None or not node.uses or priority is None:
        use(node, upto, priority)


def _noted(cache: Any, made: Any, behind: Any) -> Any:
    vars(cache).setdefault("parts", {})[made.handle] = behind
    return made


def _lock_part(cache: Any, lock: Any, handle: Any, unlock: bool = False) -> None:
    lock(handle, unlock)
    before = vars(cache).get("parts", {}).get(handle)
    if before is not None:
        cache._tree.protected += before.position if unlock else -before.position


def _taken_twice(cache: Any, insert: Any, *args: Any, behind: Any = None, **how: Any) -> Any:
    if behind is not None:
        cache._owned.clear()
    return insert(*args, behind=behind, **how)


def _looked_at(cache: Any, insert: Any, *args: Any, behind: Any = None, **how: Any) -> Any:
    vars(cache).setdefault("kept", []).extend(args[0])
    cache.match_prefix(cache.kept, record=False)
    return insert(*args, behind=behind, **how)


_fault(
    "behind-ignored",
    "What follows a handle is stored from the beginning.",
    "021 023",
    insert_prefix=lambda cache, insert, *args, behind=None, **how: insert(*args, **how),
)
_fault(
    "behind-counted-from-there",
    "cached_len of an insertion behind a handle counts from there.",
    "021 023",
    insert_prefix=_answered(lambda cache, made, behind: made._replace(cached_len=made.cached_len - behind.cached_len)),
)
_fault("behind-blocks-of-the-whole", "An insertion behind a handle returns what is before, too.", "021", insert_prefix=_answered(_whole))
_fault("behind-is-no-use", "An insertion that goes on where one ended is no use of what is before.", "007", tree={"use": _no_use})
_fault(
    "behind-not-protected",
    "A lock of what was stored behind a handle does not protect what is before.",
    "005",
    insert_prefix=_answered(_noted),
    lock_handle=_lock_part,
)
_fault("behind-taken-twice", "Blocks that are before the handle are stored behind it again.", "009", insert_prefix=_taken_twice)
_fault(
    "behind-in-another-namespace",
    "What follows a handle of another namespace is stored in the one that is named.",
    "009",
    insert_prefix=_from_the_beginning(ArgumentValueError),
)
_fault(
    "behind-what-is-stale",
    "What follows a handle that is stale, or another cache's, is stored from the beginning.",
    "008 024",
    insert_prefix=_from_the_beginning(StaleHandleError),
)
_fault("behind-looked-at-again", "What is before the handle is looked up once more.", "022", insert_prefix=_looked_at)


# Blocks that are appended


def _unmoved(cache: Any, append: Any, handles: Any, *args: Any) -> Any:
    stored = append(handles, *args)
    for handle, is_stored in zip(handles, stored, strict=True):
        handle.cached_len -= cache.block_size * int(is_stored)
    return stored


def _unprotected(tree: Any, grow: Any, nodes: Any, *args: Any) -> None:
    grow(nodes, *args)
    tree.protected -= len(nodes)


_fault("append-leaves-handles", "A handle behind which a block was appended has the length from before.", "028", append_blocks=_unmoved)
_fault(
    "append-leaves-locks", "A block that was appended behind a locked handle is not protected.", "028", tree={"grow_locked": _unprotected}
)


# Handles that live on


def _stale_when(is_stale: Change) -> Change:
    """Return a change that lets handles go stale too early."""

    def lock_handle(cache: Any, lock: Any, handle: Any, unlock: bool = False) -> None:
        if not unlock and getattr(handle, "node", None) is not None and is_stale(handle.node, handle.position):
            raise StaleHandleError("handle", expected="another place", got="this one")
        lock(handle, unlock)

    return lock_handle


def _untrimmed(tree: Any, cut: Any, node: Any, end: int) -> Any:
    gone = cut(node, end)
    node.was_trimmed = False
    return gone


_fault(
    "handles-stale-by-growth",
    "A handle is stale when something was stored behind it.",
    "023 024",
    lock_handle=_stale_when(lambda node, position: node.end > position or node.children),
)
_fault(
    "handles-stale-by-splits",
    "A handle to what is before a place where a run was split is stale.",
    "024",
    lock_handle=_stale_when(lambda node, position: node.start >= position),
)
_fault("handles-to-what-grew-anew", "What is stored where something was evicted is taken for that.", "023 024", tree={"cut": _untrimmed})


# Copies, and what a cache says of itself


class _Copyable(PrefixHandle):
    """Allows copies."""

    __slots__ = ()

    def __copy__(self) -> Any:
        return self


_fault(
    "copies-made",
    "A cache can be copied, and then two own its blocks.",
    "025",
    __reduce_ex__=lambda cache, reduce, protocol: object.__reduce_ex__(cache, protocol),
)
_fault(
    "copies-of-handles",
    "A copy of a handle is the handle.",
    "025",
    insert_prefix=lambda cache, insert, *args, **how: insert(*args, **how)._replace(handle=_Copyable(0)),
    lock_handle=lambda cache, lock, handle, unlock=False: None if isinstance(handle, _Copyable) else lock(handle, unlock),
)
_fault("stores-in-secret", "A cache that stores says that it does not.", "027", can_store=lambda cache, can_store: False)


# Blocks that begin alike


def _any_number(cache: Any, match: Any, handle: Any, tokens: Any) -> Any:
    half = (cache.block_size + 1) // 2
    return match(handle, tokens) or match(handle, [*map(int, tokens), *[7] * half][:half])


def _is_use(cache: Any, match: Any, handle: Any, tokens: Any) -> Any:
    found = match(handle, tokens)
    if found is not None:
        cache.record_match(found.handle, found.handle.cached_len)
    return found


_fault("partial-any-number", "A block of which too few tokens are the same is found.", "026", match_partial=_any_number)
_fault("partial-is-a-use", "A block that is found to begin alike counts as used.", "026", match_partial=_is_use)
