"""Faults of prefix caches in what is stored behind a handle, in handles that live on, in copies, and in blocks that begin alike."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvdock.errors import ArgumentValueError, StaleHandleError
from kvdock.prefix import PrefixHandle
from kvdock_conformance.faults.prefix_seed import Change, after, faults_of, forgiving

__all__ = ["FAULTS"]

_TABLE = """
behind-ignored              | 021 023 | What follows a handle is stored from the beginning.
behind-counted-from-there   | 021 023 | cached_len of an insertion behind a handle counts from there.
behind-blocks-of-the-whole  | 021     | An insertion behind a handle returns what is before, too.
behind-is-no-use            | 007     | An insertion that goes on where one ended is no use of what is before.
behind-not-protected        | 005     | A lock of what was stored behind a handle does not protect what is before.
behind-taken-twice          | 009     | Blocks that are before the handle are stored behind it again.
behind-in-another-namespace | 009     | What follows a handle of another namespace is stored in the one that is named.
behind-what-is-stale        | 008 024 | What follows a handle that is stale, or another cache's, is stored from the beginning.
behind-looked-at-again      | 022     | What is before the handle is looked up once more.
append-leaves-handles       | 028     | A handle behind which a block was appended has the length from before.
append-leaves-locks         | 028     | A block that was appended behind a locked handle is not protected.
handles-stale-by-growth     | 023 024 | A handle is stale when something was stored behind it.
handles-stale-by-splits     | 024     | A handle to what is before a place where a run was split is stale.
handles-to-what-grew-anew   | 023 024 | What is stored where something was evicted is taken for that.
copies-made                 | 025     | A cache can be copied, and then two own its blocks.
copies-of-handles           | 025     | A copy of a handle is the handle.
stores-in-secret            | 027     | A cache that stores says that it does not.
partial-any-number          | 026     | A block of which too few tokens are the same is found.
partial-is-a-use            | 026     | A block that is found to begin alike counts as used.
"""


def _from_the_start(cache: Any, insert: Any, *args: Any, behind: Any = None, **how: Any) -> Any:
    return insert(*args, **how)


def _answered(change: Change) -> Change:
    """Return a change of what an insertion behind a handle answers."""

    def insert_prefix(cache: Any, insert: Any, *args: Any, behind: Any = None, **how: Any) -> Any:
        made = insert(*args, behind=behind, **how)
        return made if behind is None else change(cache, made, behind)

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


def _unmoved(cache: Any, append: Any, handles: Any, *args: Any) -> Any:
    stored = append(handles, *args)
    for handle, is_stored in zip(handles, stored, strict=True):
        handle.cached_len -= cache.block_size * int(is_stored)
    return stored


def _stale_when(is_stale: Change) -> Change:
    """Return a change that lets handles go stale too early."""

    def lock_handle(cache: Any, lock: Any, handle: Any, unlock: bool = False) -> None:
        if not unlock and getattr(handle, "node", None) is not None and is_stale(handle.node, handle.position):
            raise StaleHandleError("handle", expected="another place", got="this one")
        lock(handle, unlock)

    return lock_handle


class _Copyable(PrefixHandle):
    """Allows copies."""

    __slots__ = ()

    def __copy__(self) -> Any:
        return self


def _any_number(cache: Any, match: Any, handle: Any, tokens: Any) -> Any:
    half = (cache.block_size + 1) // 2
    return match(handle, tokens) or match(handle, [*map(int, tokens), *[7] * half][:half])


def _use(cache: Any, found: Any, *args: Any) -> None:
    if found is not None:
        cache.record_match(found.handle, found.handle.cached_len)


FAULTS = faults_of(
    _TABLE,
    {
        "behind-ignored": {"insert_prefix": _from_the_start},
        "behind-counted-from-there": {
            "insert_prefix": _answered(lambda cache, made, behind: made._replace(cached_len=made.cached_len - behind.cached_len))
        },
        "behind-blocks-of-the-whole": {"insert_prefix": _answered(_whole)},
        "behind-is-no-use": {"tree": {"use": _no_use}},
        "behind-not-protected": {"insert_prefix": _answered(_noted), "lock_handle": _lock_part},
        "behind-taken-twice": {"insert_prefix": _taken_twice},
        "behind-in-another-namespace": {"insert_prefix": forgiving(ArgumentValueError, "", _from_the_start)},
        "behind-what-is-stale": {"insert_prefix": forgiving(StaleHandleError, "", _from_the_start)},
        "behind-looked-at-again": {"insert_prefix": _looked_at},
        "append-leaves-handles": {"append_blocks": _unmoved},
        "append-leaves-locks": {
            "tree": {"grow_locked": after(lambda tree, nothing, nodes, *args: setattr(tree, "protected", tree.protected - len(nodes)))}
        },
        "handles-stale-by-growth": {"lock_handle": _stale_when(lambda node, position: node.end > position or node.children)},
        "handles-stale-by-splits": {"lock_handle": _stale_when(lambda node, position: node.start >= position)},
        "handles-to-what-grew-anew": {"tree": {"cut": after(lambda tree, gone, node, end: setattr(node, "was_trimmed", False))}},
        "copies-made": {"__reduce_ex__": lambda cache, reduce, protocol: object.__reduce_ex__(cache, protocol)},
        "copies-of-handles": {
            "insert_prefix": lambda cache, insert, *args, **how: insert(*args, **how)._replace(handle=_Copyable(0)),
            "lock_handle": lambda cache, lock, handle, unlock=False: None if isinstance(handle, _Copyable) else lock(handle, unlock),
        },
        "stores-in-secret": {"can_store": lambda cache, can_store: False},
        "partial-any-number": {"match_partial": _any_number},
        "partial-is-a-use": {"match_partial": after(_use)},
    },
)
