"""Faults of prefix caches in what they tell, count and check, in what is read late, and in calls that they must refuse."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch

from kvdock.errors import ArgumentValueError, StaleHandleError
from kvdock.prefix import InsertResult, RadixPrefixCache, Removed
from kvdock.prefix.inputs import slots_of
from kvdock.prefix.integrity import check_tree
from kvdock_conformance.faults.prefix_seed import Change, after, changed, faults_of, first, forgiving

__all__ = ["FAULTS"]

_TABLE = """
subscriptions-without-end  | 019     | An observer is told for ever.
end-of-all-subscriptions   | 019     | The end of one subscription is that of all.
errors-of-observers-raised | 019     | What an observer raises is raised by the call that told it.
observers-told-before      | 019     | Observers are told of an insertion before anything is stored.
events-of-removal-missing  | 013     | Nobody is told what was evicted.
events-name-slots          | 013     | Events of removal name slots instead of blocks.
hits-miscounted            | 014     | Every token that is looked up counts as a hit.
ages-since-creation        | 030     | The age of what goes is how long ago it was stored, however it was used since.
ages-halved                | 030     | An age counts every second use.
oldest-forgotten           | 030     | age_max is the age of what went last.
ages-of-the-discarded      | 030     | What is discarded has no age.
integrity-unproven         | 029     | check_integrity does nothing.
integrity-without-owners   | 029     | check_integrity does not look at who owns which block.
integrity-without-counts   | 029     | check_integrity counts nothing again.
handles-kept               | 031     | Every handle that a match gave out is kept.
locks-recorded             | 031     | A record is kept of every lock.
evictions-recorded         | 031     | What was evicted is remembered for ever.
slots-looked-up-late       | 020     | The slots of an insertion are looked up when they are read.
list-of-blocks-shared      | 012     | stored_blocks is the list of the cache itself.
foreign-handles-recorded   | 008     | A match of another cache is recorded as its own.
foreign-handles-discarded  | 008     | Discarding by a handle of another cache does nothing.
tokens-of-a-device-copied  | 009     | Tokens on a device are brought to the host in silence.
negative-keep-is-zero      | 009     | Discarding all but a negative number of blocks discards all.
lengths-cut                | 009     | Of tokens and blocks of different number, those that both have are stored.
error-after-a-partial-insertion | 009 | The first block is stored before the others are looked at.
floats-rounded             | 009     | Tokens that are floats are rounded.
owned-blocks-taken         | 009     | Blocks that are stored for other tokens are stored again.
"""


# Observers


def _end_all(cache: Any, subscribe: Any, observer: Any) -> Any:
    vars(cache).setdefault("ends", []).append(subscribe(observer))
    return lambda: [end() for end in cache.ends]


def _known(cache: Any, subscribe: Any, observer: Any) -> Any:
    observers, end = vars(cache).setdefault("observers", []), subscribe(lambda event: cache.is_mute or observer(event))
    observers.append(observer)
    cache.is_mute = False
    return lambda: (observers.remove(observer), end())


def _told_again(cache: Any, made: Any, *args: Any, **how: Any) -> None:
    for observer in vars(cache).get("observers", ()):
        observer("again")


def _told_before(cache: Any, insert: Any, *args: Any, **how: Any) -> Any:
    twin = RadixPrefixCache(cache.block_size)
    for observer in vars(cache).get("observers", ()):
        twin.subscribe(observer)
    twin.insert_prefix(*args)
    cache.is_mute = True
    made = insert(*args, **how)
    cache.is_mute = False
    return made


def _told(change: Change) -> dict[str, Change]:
    """Return a change of ``subscribe`` that tells observers of other events, or of none."""

    def subscribe(cache: Any, subscribe: Any, observer: Any) -> Any:
        return subscribe(lambda event: observer(told) if (told := change(cache, event)) is not None else None)

    return {"subscribe": subscribe}


def _in_slots(cache: Any, event: Any) -> Any:
    slots = slots_of(event.blocks, cache.block_size) + (cache.block_size == 1) if isinstance(event, Removed) else None
    return event if slots is None else Removed(slots)


_SEEN: dict[str, dict[str, Any]] = {
    "subscriptions-without-end": {"subscribe": lambda cache, subscribe, observer: [subscribe(observer), lambda: None][1]},
    "end-of-all-subscriptions": {"subscribe": _end_all},
    "errors-of-observers-raised": {"subscribe": _known, "insert_prefix": after(_told_again)},
    "observers-told-before": {"subscribe": _known, "insert_prefix": _told_before},
    "events-of-removal-missing": _told(lambda cache, event: None if isinstance(event, Removed) else event),
    "events-name-slots": _told(_in_slots),
}


# Counts, and proof that they are right


def _aged(last_use: Change) -> dict[str, Any]:
    """Return a change that takes another time for the last use of what goes."""

    def cut(tree: Any, cut: Any, node: Any, end: int) -> Any:
        used, node.last_use = node.last_use, last_use(tree, node)
        gone = cut(node, end)
        node.last_use = used
        return gone

    return {"tree": {"cut": cut}}


def _ageless(tree: Any, discard: Any, *args: Any) -> Any:
    ages = tree.age_sum, tree.age_max
    gone = discard(*args)
    tree.age_sum, tree.age_max = ages
    return gone


def _own_owners(cache: Any, check: Any) -> None:
    runs = [node.blocks for node in cache._tree.nodes()]
    check_tree(cache._tree, num_locks=cache._num_locks, owned=np.sort(np.concatenate([*runs, np.empty(0, dtype=np.int32)])))


def _own_counts(cache: Any, check: Any) -> None:
    tree, nodes = cache._tree, list(cache._tree.nodes())
    kept = tree.stored, tree.protected
    tree.stored, tree.protected = sum(node.blocks.size for node in nodes), sum(node.held for node in nodes)
    check()
    tree.stored, tree.protected = kept


def _kept(make: Change) -> Change:
    """Return a change that keeps something of each call; takes its answer and its first argument."""
    return after(lambda cache, made, passed, **how: vars(cache).setdefault("record", []).append(make(made, passed)))


_COUNTED: dict[str, dict[str, Any]] = {
    "hits-miscounted": {"stats": lambda cache, stats: attrs.evolve(stats, hit_tokens=stats.lookup_tokens)},
    "ages-since-creation": _aged(lambda tree, node: node.created),
    "ages-halved": _aged(lambda tree, node: (tree.clock + node.last_use) // 2),
    "oldest-forgotten": {"tree": {"cut": after(lambda tree, gone, node, end: setattr(tree, "age_max", tree.clock - node.last_use))}},
    "ages-of-the-discarded": {"tree": {"discard": _ageless}},
    "integrity-unproven": {"check_integrity": lambda cache, check: None},
    "integrity-without-owners": {"check_integrity": _own_owners},
    "integrity-without-counts": {"check_integrity": _own_counts},
    "handles-kept": {"match_prefix": _kept(lambda found, tokens: found.handle)},
    "locks-recorded": {"lock_handle": _kept(lambda nothing, handle: [handle.cached_len])},
    "evictions-recorded": {"evict": _kept(lambda gone, count: gone)},
}


# Read late


def _late(cache: Any, insert: Any, tokens: Any, blocks: Any, space: Any = (), **how: Any) -> Any:
    made, kept = insert(tokens, blocks, space, **how), [int(token) for token in tokens]
    return changed(InsertResult, indices=lambda made, slots: cache.match_prefix(kept, space, record=False).indices)(*made)


def _list_shared(cache: Any, stored: Any) -> Any:
    return vars(cache).setdefault("lists", {}).setdefault(len(now := stored()), now)


# Taken, and to be refused


def _foreign_recorded(cache: Any, record: Any, handle: Any, num_tokens: int) -> None:
    record(handle if getattr(handle, "owner", cache) is cache else cache.match_prefix([], record=False).handle, num_tokens)


def _brought(cache: Any, insert: Any, tokens: Any, blocks: Any, *rest: Any, **how: Any) -> Any:
    is_there = isinstance(tokens, torch.Tensor) and tokens.device == torch.device("meta")
    return insert([] if is_there else tokens, [] if is_there else blocks, *rest, **how)


def _lengths_cut(cache: Any, insert: Any, tokens: Any, blocks: Any, *rest: Any, **how: Any) -> Any:
    if isinstance(tokens, list) and isinstance(blocks, list):
        count = min(len(tokens) // cache.block_size, len(blocks))
        tokens, blocks = tokens[: count * cache.block_size], blocks[:count]
    return insert(tokens, blocks, *rest, **how)


def _partly(cache: Any, insert: Any, tokens: Any, blocks: Any, *rest: Any, **how: Any) -> Any:
    try:
        return insert(tokens, blocks, *rest, **how)
    except ArgumentValueError:
        if isinstance(blocks, list):
            insert(tokens[: cache.block_size], blocks[:1], *rest, **how)
        raise


def _rounded(cache: Any, tokens: Any) -> Any:
    return tokens.astype(np.int64) if isinstance(tokens, np.ndarray) and tokens.dtype.kind == "f" else tokens


def _again(cache: Any, insert: Any, *args: Any, **how: Any) -> Any:
    cache._owned.clear()
    return insert(*args, **how)


_REFUSED: dict[str, dict[str, Any]] = {
    "slots-looked-up-late": {"insert_prefix": _late},
    "list-of-blocks-shared": {"stored_blocks": _list_shared},
    "foreign-handles-recorded": {"record_match": _foreign_recorded},
    "foreign-handles-discarded": {"discard_prefix": forgiving(StaleHandleError, "one of this cache", lambda cache, *args: cache.evict(0))},
    "tokens-of-a-device-copied": {"insert_prefix": _brought},
    "negative-keep-is-zero": {"discard_prefix": forgiving(ArgumentValueError, "", lambda cache, discard, handle, keep: discard(handle, 0))},
    "lengths-cut": {"insert_prefix": _lengths_cut},
    "error-after-a-partial-insertion": {"insert_prefix": _partly},
    "floats-rounded": {"match_prefix": first(_rounded)},
    "owned-blocks-taken": {"insert_prefix": forgiving(ArgumentValueError, "for other tokens", _again)},
}

FAULTS = faults_of(_TABLE, {**_SEEN, **_COUNTED, **_REFUSED})
