"""Faults of prefix caches in what they tell and count, in what is read late, and in calls that they must refuse."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch

from kvdock.errors import ArgumentValueError, StaleHandleError
from kvdock.prefix import InsertResult, RadixPrefixCache, Removed
from kvdock.prefix.inputs import slots_of
from kvdock_conformance.faults.fault import Fault
from kvdock_conformance.faults.prefix_seed import Change, adding, changed

__all__ = ["FAULTS"]

FAULTS: list[Fault] = []
_fault = adding(FAULTS)


# Observers


def _end_all(cache: Any, subscribe: Any, observer: Any) -> Any:
    vars(cache).setdefault("ends", []).append(subscribe(observer))
    return lambda: [end() for end in cache.ends]


def _known(cache: Any, subscribe: Any, observer: Any) -> Any:
    observers, end = vars(cache).setdefault("observers", []), subscribe(lambda event: cache.is_mute or observer(event))
    observers.append(observer)
    cache.is_mute = False
    return lambda: (observers.remove(observer), end())


def _raised(cache: Any, insert: Any, *args: Any, **how: Any) -> Any:
    made = insert(*args, **how)
    for observer in vars(cache).get("observers", ()):
        observer("again")
    return made


def _told_before(cache: Any, insert: Any, *args: Any, **how: Any) -> Any:
    twin = RadixPrefixCache(cache.block_size)
    for observer in vars(cache).get("observers", ()):
        twin.subscribe(observer)
    twin.insert_prefix(*args)
    cache.is_mute = True
    made = insert(*args, **how)
    cache.is_mute = False
    return made


def _told(change: Change) -> Change:
    """Return a change of ``subscribe`` that tells observers of other events, or of none."""

    def subscribe(cache: Any, subscribe: Any, observer: Any) -> Any:
        return subscribe(lambda event: observer(told) if (told := change(cache, event)) is not None else None)

    return subscribe


def _in_slots(cache: Any, event: Any) -> Any:
    slots = slots_of(event.blocks, cache.block_size) + (cache.block_size == 1) if isinstance(event, Removed) else None
    return event if slots is None else Removed(slots)


_fault(
    "subscriptions-without-end",
    "An observer is told for ever.",
    "019",
    subscribe=lambda cache, subscribe, observer: [subscribe(observer), lambda: None][1],
)
_fault("end-of-all-subscriptions", "The end of one subscription is that of all.", "019", subscribe=_end_all)
_fault(
    "errors-of-observers-raised",
    "What an observer raises is raised by the call that told it.",
    "019",
    subscribe=_known,
    insert_prefix=_raised,
)
_fault(
    "observers-told-before",
    "Observers are told of an insertion before anything is stored.",
    "019",
    subscribe=_known,
    insert_prefix=_told_before,
)
_fault(
    "events-of-removal-missing",
    "Nobody is told what was evicted.",
    "013",
    subscribe=_told(lambda cache, event: None if isinstance(event, Removed) else event),
)
_fault("events-name-slots", "Events of removal name slots instead of blocks.", "013", subscribe=_told(_in_slots))
_fault(
    "hits-miscounted",
    "Every token that is looked up counts as a hit.",
    "014",
    stats=lambda cache, stats: attrs.evolve(stats, hit_tokens=stats.lookup_tokens),
)


# Read late


def _late(cache: Any, insert: Any, tokens: Any, blocks: Any, space: Any = (), **how: Any) -> Any:
    made, kept = insert(tokens, blocks, space, **how), [int(token) for token in tokens]
    return changed(InsertResult, indices=lambda made, slots: cache.match_prefix(kept, space, record=False).indices)(*made)


def _list_shared(cache: Any, stored: Any) -> Any:
    return vars(cache).setdefault("lists", {}).setdefault(len(now := stored()), now)


_fault("slots-looked-up-late", "The slots of an insertion are looked up when they are read.", "020", insert_prefix=_late)
_fault("list-of-blocks-shared", "stored_blocks is the list of the cache itself.", "012", stored_blocks=_list_shared)


# Taken, and to be refused


def _foreign_recorded(cache: Any, record: Any, handle: Any, num_tokens: int) -> None:
    record(handle if getattr(handle, "owner", cache) is cache else cache.match_prefix([], record=False).handle, num_tokens)


def _foreign_discarded(cache: Any, discard: Any, handle: Any, keep_blocks: int) -> Any:
    try:
        return discard(handle, keep_blocks)
    except StaleHandleError as error:
        if "one of this cache" not in str(error):
            raise
        return cache.evict(0)


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


def _rounded(cache: Any, match: Any, tokens: Any, *rest: Any, **how: Any) -> Any:
    is_float = isinstance(tokens, np.ndarray) and tokens.dtype.kind == "f"
    return match(tokens.astype(np.int64) if is_float else tokens, *rest, **how)


def _owned_taken(cache: Any, insert: Any, *args: Any, **how: Any) -> Any:
    try:
        return insert(*args, **how)
    except ArgumentValueError as error:
        if "for other tokens" not in str(error):
            raise
        cache._owned.clear()
        return insert(*args, **how)


_fault("foreign-handles-recorded", "A match of another cache is recorded as its own.", "008", record_match=_foreign_recorded)
_fault("foreign-handles-discarded", "Discarding by a handle of another cache does nothing.", "008", discard_prefix=_foreign_discarded)
_fault("tokens-of-a-device-copied", "Tokens on a device are brought to the host in silence.", "009", insert_prefix=_brought)
_fault(
    "negative-keep-is-zero",
    "Discarding all but a negative number of blocks discards all.",
    "009",
    discard_prefix=lambda cache, discard, handle, keep: discard(handle, max(keep, 0) if isinstance(keep, int) else keep),
)
_fault("lengths-cut", "Of tokens and blocks of different number, those that both have are stored.", "009", insert_prefix=_lengths_cut)
_fault("error-after-a-partial-insertion", "The first block is stored before the others are looked at.", "009", insert_prefix=_partly)
_fault("floats-rounded", "Tokens that are floats are rounded.", "009", match_prefix=_rounded)
_fault("owned-blocks-taken", "Blocks that are stored for other tokens are stored again.", "009", insert_prefix=_owned_taken)
