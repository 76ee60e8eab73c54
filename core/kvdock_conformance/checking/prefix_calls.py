"""Checks of a prefix cache: what it claims, and its answers to a case's calls against the slow one's."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvdock.errors import ArgumentValueError, UnsupportedError, WrongThreadError
from kvdock.prefix import PrefixCache
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.prefix_model import KEYS, SlowPrefixCache, StoresNothing
from kvdock_conformance.checking.prefix_play import Player, play
from kvdock_conformance.checking.prefix_target import PrefixTarget
from kvdock_conformance.requirement import Capability, Check

__all__ = [
    "ABOUT_ALL",
    "DECLARES_AN_ORDER",
    "FINDS_PARTS",
    "STORES",
    "check_block_sizes",
    "check_calls",
    "check_can_store",
    "check_copies",
    "check_late_reads",
    "check_observers",
    "check_stores_nothing",
    "check_threads",
    "check_without_order",
    "check_without_parts",
    "compared",
    "same_number",
    "stores_nothing",
    "why_it_stores_nothing",
    "why_no_order",
    "why_no_parts",
]

ABOUT_ALL = ["match", "insert", "evict", "discard", "reset", "locks", "sizes", "stats", "events", "refused"]
"""Everything but the order of eviction."""


def stores_nothing(target: PrefixTarget) -> bool:
    """Whether a cache takes over no block of an insertion, and says so: the handle that it returns stands for no token."""
    cache = target.make(1)
    made = cache.insert_prefix([1, 2, 3], [0, 1, 2])
    return made.handle.cached_len == 0 and cache.size_info.total_size == 0


def why_it_stores_nothing(target: PrefixTarget, data: Mapping[str, Any]) -> Sequence[str]:
    """Return the reason against asking what is stored; empty where something is."""
    return [f"{target.name} stores nothing: an insertion returns a handle of no tokens"] if stores_nothing(target) else []


def check_stores_nothing(target: PrefixTarget, data: Mapping[str, Any], reasons: Sequence[str], check: Check) -> None:
    """Check that a cache that claims to store nothing never does: it finds nothing, and frees nothing.

    Raises:
        NonconformanceError: an answer is not that of a cache without blocks.
    """
    if "steps" in data:
        size = data["block_size"]
        play(Player(target.make(size), StoresNothing(size, "lru"), data, target.make, ABOUT_ALL), data["steps"])


STORES = Capability("stores blocks", why_it_stores_nothing, check_stores_nothing)
"""The capability of storing anything at all."""


def why_no_parts(target: PrefixTarget, data: Mapping[str, Any]) -> Sequence[str]:
    """Return the reason against asking for blocks that begin alike: it leaves `match_partial` as it is."""
    return [f"{target.name} does not offer match_partial"] if target.kind.match_partial is PrefixCache.match_partial else []


def check_without_parts(target: PrefixTarget, data: Mapping[str, Any], reasons: Sequence[str], check: Check) -> None:
    """Check that nothing is found.

    Raises:
        NonconformanceError: something is.
    """
    cache = target.make(data["block_size"])
    handle = cache.insert_prefix([7] * data["block_size"], [0]).handle
    same_number("match_partial: whether it finds nothing", True, cache.match_partial(handle, [7]) is None)


FINDS_PARTS = Capability("finds blocks that begin alike", why_no_parts, check_without_parts)
"""The capability of `PrefixCache.match_partial`."""


def why_no_order(target: PrefixTarget, data: Mapping[str, Any]) -> Sequence[str]:
    """Return the reasons against asking for an order of eviction: nothing is stored, or no policy that the kit knows is declared."""
    if stores_nothing(target):
        return why_it_stores_nothing(target, data)
    declared = target.policy
    return [] if declared in KEYS else [f"{target.name} declares {declared or 'no policy'}, of which the kit knows no order"]


def check_without_order(target: PrefixTarget, data: Mapping[str, Any], reasons: Sequence[str], check: Check) -> None:
    """Check all but the order: what is evicted is followed.

    Raises:
        NonconformanceError: an answer is wrong in whatever order.
    """
    if stores_nothing(target):
        check_stores_nothing(target, data, reasons, check)
    else:
        compared(target, data, ABOUT_ALL)


DECLARES_AN_ORDER = Capability("declares a policy of eviction that the kit knows", why_no_order, check_without_order)
"""The capability of evicting in an order that can be told beforehand."""


def compared(target: PrefixTarget, data: Mapping[str, Any], about: Collection[str]) -> Player:
    """Play a case on the cache and on the slow one; returns the player."""
    size = data["block_size"]
    nothing, policy = stores_nothing(target), target.policy
    model = (StoresNothing if nothing else SlowPrefixCache)(size, policy if policy is not None and policy in KEYS else "lru")
    player = Player(target.make(size), model, data, target.make, about)
    play(player, data["steps"])
    return player


def check_calls(target: PrefixTarget, data: Mapping[str, Any]) -> None:
    """Check what the case is about."""
    compared(target, data, data["about"])


def check_late_reads(target: PrefixTarget, data: Mapping[str, Any]) -> None:
    """Check what insertions return when it is looked at at last, after all that came behind them."""
    player = compared(target, data, data["about"])
    for made, canonical in player.unread:
        player.named("late", "insert_prefix, first read at the end", canonical, made)


def check_observers(target: PrefixTarget, data: Mapping[str, Any]) -> None:
    """Subscribe an observer, one that raises and one that calls the cache, and end the first one's subscription.

    Raises:
        NonconformanceError: one is not told, or told too early or too long; or a call suffers from one.
    """
    size = data["block_size"]
    cache, told, found = target.make(size), list[str](), list[int]()
    prefix = [list(range(100 * number, 100 * number + 2 * size)) for number in range(3)]

    def insert(number: int) -> None:
        made = cache.insert_prefix(prefix[number], range(2 * number, 2 * (number + 1)))
        same_number(f"insertion {number}, with observers: tokens", 2 * size, made.handle.cached_len)

    def raises(event: object) -> None:
        raise RuntimeError("an observer that fails")

    end = cache.subscribe(lambda event: told.append(type(event).__name__))
    cache.subscribe(raises)
    cache.subscribe(lambda event: found.append(cache.match_prefix(prefix[0], record=False).handle.cached_len))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        insert(0)
        end()
        insert(1)
        cache.subscribe(lambda event: told.append("again"))
        insert(2)
    if told != ["Stored", "again"]:
        raise NonconformanceError("what an observer was told until its end, and another later", expected=["Stored", "again"], got=told)
    if found != [2 * size] * 3:
        raise NonconformanceError("tokens that an observer finds, asked by each event", expected=[2 * size] * 3, got=found)


def check_copies(target: PrefixTarget, data: Mapping[str, Any]) -> None:
    """Copy and pickle a cache with something in it, and its handles.

    Raises:
        NonconformanceError: a copy is made, or the original has changed.
    """
    player = compared(target, data, data["about"])
    for what in (player.cache, *(held.handle for held in player.held)):
        for call in (copy.copy, copy.deepcopy, pickle.dumps):
            player.refused(f"{call.__name__} of {type(what).__name__}", UnsupportedError, functools.partial(call, what))


def check_can_store(target: PrefixTarget, data: Mapping[str, Any]) -> None:
    """Check that a cache says whether it stores anything."""
    same_number("can_store", not stores_nothing(target), target.make(data["block_size"]).can_store)


def same_number(what: str, expected: int, got: int) -> None:
    """Compare two numbers."""
    if expected != got:
        raise NonconformanceError(what, expected=expected, got=got)


def check_threads(target: PrefixTarget, data: Mapping[str, Any]) -> None:
    """Call from another thread: refused at first, after `hand_over` not.

    Raises:
        NonconformanceError: a call of another thread does not raise, or changes something.
    """
    player = compared(target, data, ())
    cache, handle, before = player.cache, player.held[-1].handle, player.observed()
    calls: dict[str, Callable[[], object]] = {
        "match_prefix": lambda: cache.match_prefix([1]),
        "record_match": lambda: cache.record_match(handle, 100),
        "lock_handle": lambda: cache.lock_handle(handle),
        "insert_prefix": lambda: cache.insert_prefix([1] * player.block_size, [4000]),
        "evict": lambda: cache.evict(0),
        "discard_prefix": lambda: cache.discard_prefix(handle, 0),
        "reset": cache.reset,
        "subscribe": lambda: cache.subscribe(print),
        "check_integrity": cache.check_integrity,
        "hand_over": cache.hand_over,
    }
    with ThreadPoolExecutor(1) as other:
        for name, call in calls.items():
            error = other.submit(call).exception()
            if not isinstance(error, WrongThreadError):
                got = "no error" if error is None else repr(error)
                raise NonconformanceError(f"{name} in another thread", expected="WrongThreadError", got=got)
        if player.observed() != before:
            raise NonconformanceError("the cache after calls of another thread", expected=before, got=player.observed())
        cache.hand_over()
        other.submit(cache.match_prefix, [1]).result()


def check_block_sizes(target: PrefixTarget, data: Mapping[str, Any]) -> None:
    """Make caches with good and bad block sizes.

    Raises:
        NonconformanceError: a good size is not the cache's, or a bad one does not raise.
    """
    for size in data["good"]:
        same_number("block_size", size, target.make(size).block_size)
    for size in data["bad"]:
        try:
            target.make(size)
        except ArgumentValueError:
            continue
        raise NonconformanceError(f"a block of {size} tokens", expected="ArgumentValueError", got="no error")
