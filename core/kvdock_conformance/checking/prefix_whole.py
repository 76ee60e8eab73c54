"""Whether `check_integrity` of a prefix cache looks: it is asked where the cache, damaged from outside, contradicts itself."""

from __future__ import annotations

import itertools
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from kvdock.prefix import PrefixCache
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.prefix_target import PrefixTarget
from kvdock_conformance.requirement import Capability, Check

__all__ = [
    "CAN_BE_DAMAGED",
    "Spot",
    "check_notices_damage",
    "check_undamaged",
    "contradiction",
    "damaged",
    "filled",
    "places_of",
    "why_no_damage",
]

_MOST = 64  # elements of one container that are looked at
_ENTRY = "one entry"  # in the place of a key: of a container something is taken
_NO_STATE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, str, bytes, int, float)


@attrs.frozen
class Spot:
    """Where something is kept: an attribute, an entry or an element; or a container, of which an entry can be taken."""

    owner: Any
    key: Any
    value: Any

    def __str__(self) -> str:
        return f"{type(self.owner).__name__} {f'less {_ENTRY}' if self.key is _ENTRY else f'{self.key!r} plus 1'}"

    def damage(self, block_size: int) -> bool:
        """Add 1 to a number, or take one out of a container; returns whether that could be done. A block size is no bookkeeping."""
        if self.key is _ENTRY:
            (self.owner.popitem if isinstance(self.owner, dict) else self.owner.pop)()
        elif isinstance(self.value, bool) or not isinstance(self.value, int | np.integer) or self.value == block_size:
            return False
        elif isinstance(self.owner, dict | list | deque | np.ndarray):
            self.owner[self.key] = self.value + 1
        elif isinstance(self.owner, tuple | set | frozenset):
            return False
        else:
            object.__setattr__(self.owner, self.key, self.value + 1)
        return True


def _parts(thing: Any) -> Iterator[Spot]:
    """Yield what an object holds."""
    if isinstance(thing, dict | list | deque | set) and thing:
        yield Spot(thing, _ENTRY, None)
    if isinstance(thing, dict):
        yield from (Spot(thing, key, value) for key, value in itertools.islice(thing.items(), _MOST))
    elif isinstance(thing, list | tuple | deque | set | frozenset) or (
        isinstance(thing, np.ndarray) and thing.dtype.kind in "iu" and thing.ndim
    ):
        yield from (Spot(thing, at, value) for at, value in enumerate(itertools.islice(thing, _MOST)))
    elif not isinstance(thing, (*_NO_STATE, np.ndarray)):
        slots = (name for base in type(thing).__mro__ for name, kind in vars(base).items() if isinstance(kind, types.MemberDescriptorType))
        yield from (Spot(thing, name, getattr(thing, name)) for name in [*getattr(thing, "__dict__", ()), *slots] if hasattr(thing, name))


def places_of(root: Any, shared: frozenset[int] = frozenset()) -> list[Spot]:
    """Return every place that can be reached from an object, not through objects whose ids are in ``shared``."""
    found, left, seen = list[Spot](), [root], {*shared, id(root)}
    for thing in left:
        for place in _parts(thing):
            found.append(place)
            if id(place.value) not in seen and not isinstance(place.value, _NO_STATE):
                seen.add(id(place.value))
                left.append(place.value)
    return found


def filled(target: PrefixTarget, block_size: int) -> PrefixCache:
    """Return a cache with two prefixes that branch, one in a namespace, and one that was locked; nothing is locked any more."""
    cache = target.make(block_size)
    start = [7] * (2 * block_size)
    for number, (tail, space) in enumerate((([1], ()), ([2], ()), ([3], ("a",)))):
        known = cache.match_prefix(start, space).blocks.tolist()
        blocks = [*known, *range(3 * number, 3 * number + 3)][:3]
        handle = cache.insert_prefix(start + tail * block_size, blocks, space).handle
        cache.lock_handle(handle)
        cache.lock_handle(handle, unlock=True)
    return cache


def contradiction(cache: PrefixCache) -> str:
    """Return in which way the answers of a cache, of which nothing is locked, contradict one another; empty when they do not."""
    sizes, blocks = cache.size_info, cache.stored_blocks().tolist()
    if len(set(blocks)) < len(blocks):
        return f"stored_blocks names a block twice: {blocks}"
    if sizes.total_size != len(blocks) * cache.block_size:
        return f"size_info says {sizes.total_size} tokens, and stored_blocks {len(blocks)} blocks of {cache.block_size}"
    if min(sizes.evictable_size, sizes.protected_size) < 0 or (sizes.protected_size and not cache.num_locks):
        return f"num_locks is {cache.num_locks}, and size_info {sizes}"
    return ""


def damaged(target: PrefixTarget, block_size: int) -> Iterator[tuple[str, PrefixCache]]:
    """Yield caches that were damaged in one place each so that they contradict themselves, with how. Nothing else is called on them."""
    one, other = filled(target, block_size), filled(target, block_size)
    # What two caches share is not theirs: classes, loggers, registries.
    shared = frozenset.intersection(*(frozenset(id(place.value) for place in places_of(cache)) for cache in (one, other)))
    for number in range(len(places_of(other, shared))):
        cache = filled(target, block_size)
        place = dict(enumerate(places_of(cache, shared))).get(number)
        try:
            wrong = contradiction(cache) if place is not None and place.damage(block_size) else ""
        except Exception:  # noqa: BLE001 - a damaged cache may raise whatever it likes: then it speaks for itself
            wrong = ""
        if wrong:
            yield f"{wrong} ({place})", cache


def why_no_damage(target: PrefixTarget, data: Mapping[str, Any]) -> Sequence[str]:
    """Return the reason against asking: none of what can be reached from Python shows when it is damaged."""
    found = next(damaged(target, data["block_size"]), None)
    return [] if found else [f"{target.name} keeps nothing in Python whose damage shows in size_info and stored_blocks"]


def check_undamaged(target: PrefixTarget, data: Mapping[str, Any], reasons: Sequence[str], check: Check) -> None:
    """Check that a sound cache is found to be sound."""
    filled(target, data["block_size"]).check_integrity()


CAN_BE_DAMAGED = Capability("keeps its books in Python, where they can be damaged", why_no_damage, check_undamaged)
"""The capability of being damaged from outside so that it shows."""


def check_notices_damage(target: PrefixTarget, data: Mapping[str, Any]) -> None:
    """Damage a cache in each place, and ask `check_integrity` where the cache contradicts itself.

    Raises:
        NonconformanceError: it finds nothing.
    """
    for wrong, cache in damaged(target, data["block_size"]):
        if _is_silent(cache):
            raise NonconformanceError(f"check_integrity of a cache where {wrong}", expected="IntegrityError", got="no error")


def _is_silent(cache: PrefixCache) -> bool:
    """Whether `check_integrity` raises nothing."""
    try:
        cache.check_integrity()
    except Exception:  # noqa: BLE001 - in what is damaged anything may come up
        return False
    return True
