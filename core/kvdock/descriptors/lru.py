"""A least-recently-used cache of descriptors, owned by one thread.

A hit must cost next to nothing, so it only stamps the entry with a counter; the order is looked for when an entry has to go,
which is rare and over at most `capacity` entries.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

import attrs

from kvdock.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["CacheStats", "Entry", "LRUDescriptorCache"]

V = TypeVar("V")

_log = logging.getLogger("kvdock.descriptors")


@attrs.frozen
class CacheStats:
    """What happened in a descriptor cache since it was made.

    Args:
        hits: look-ups that found a descriptor.
        misses: look-ups that did not.
        evictions: descriptors that left to make room.
        destroyed: descriptors handed to the destroyer, for whatever reason.
        failures: destroyers that raised; each is logged.
        size: descriptors held now.
        capacity: how many are held at most, pinned ones aside.
        prepare_s: seconds spent preparing what was put in, as far as the caller said.
    """

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    destroyed: int = 0
    failures: int = 0
    size: int = 0
    capacity: int = 0
    prepare_s: float = 0.0

    def __add__(self, other: CacheStats) -> CacheStats:
        """Add up two caches."""
        return CacheStats(*(a + b for a, b in zip(attrs.astuple(self), attrs.astuple(other), strict=True)))


class Entry(Generic[V]):
    """A descriptor in a cache, and when it was last used: ``used`` counts look-ups, not time."""

    __slots__ = ("used", "value")

    def __init__(self, value: V, used: int) -> None:
        self.value = value
        self.used = used


class LRUDescriptorCache(Generic[V]):
    """Descriptors by key, of which the least recently used leaves when there are more than ``capacity``.

    It belongs to the thread that made it: only that thread may look up, put and resize. `clear` from another thread is a
    request, which the owner carries out at its next call, since a descriptor must be destroyed by the thread that uses it.

    Args:
        capacity: descriptors held at most, at least 1.
        destroyer: called once with each descriptor that leaves. One that raises is logged and counted, and the others are
            destroyed all the same.
        in_use: whether a descriptor is running right now, further up in this thread: it then leaves, and is destroyed at a
            later call.

    A descriptor with a true attribute ``pinned`` never leaves to make room: a captured graph may launch it again.

    Raises:
        ArgumentValueError: a capacity below 1.
    """

    def __init__(self, capacity: int, destroyer: Callable[[V], None] | None = None, *, in_use: Callable[[V], bool] | None = None) -> None:
        self.entries: dict[Hashable, Entry[V]] = {}
        """The entries by key: read by the quick path of a call, which stamps what it finds (see `touch`)."""
        self.clock = 0
        """Uses so far: hits and puts. An entry is stamped with it."""
        self.removals = 0
        """Descriptors that have left so far, for whatever reason. Who kept one must look it up again when this changes."""
        self._destroyer = destroyer
        self._in_use = in_use
        self._owner = threading.get_ident()
        self._limbo: list[V] = []
        self._clear_requested = False
        self._puts = self._misses = self._evictions = self._destroyed = self._failures = 0
        self._prepare_s = 0.0
        self._capacity = _check_capacity(capacity)

    def get(self, key: Hashable) -> V | None:
        """Return the descriptor of a key and count a hit, or None and count a miss."""
        self._settle()
        entry = self.entries.get(key)
        if entry is None:
            self._misses += 1
            return None
        self.touch(entry)
        return entry.value

    def touch(self, entry: Entry[V]) -> None:
        """Count a hit of an entry. The quick path of a call does this in place."""
        self.clock += 1
        entry.used = self.clock

    def put(self, key: Hashable, value: V, *, prepare_s: float = 0.0) -> None:
        """Keep a descriptor. One that was there under the key is destroyed, unless it is the same object.

        Args:
            key: exact static signature; compared for equality.
            value: the descriptor.
            prepare_s: seconds that preparing it took, for the statistics.
        """
        self._settle()
        old = self.entries.get(key)
        self.clock += 1
        self._puts += 1
        self.entries[key] = Entry(value, self.clock)
        self._prepare_s += prepare_s
        if old is not None and old.value is not value:
            self._leave(old.value)
        self._make_room(keep=key)

    def count_miss(self) -> None:
        """Count a look-up that the quick path of a call did itself, without finding anything."""
        self._misses += 1

    def _make_room(self, keep: Hashable = None) -> None:
        """Let the least recently used go until no more than ``capacity`` are left; pinned ones stay."""
        excess = len(self.entries) - self._capacity
        if excess <= 0:
            return
        free = [key for key, entry in self.entries.items() if key != keep and not _pinned(entry.value)]
        for key in sorted(free, key=lambda key: self.entries[key].used)[:excess]:
            self._evictions += 1
            self._leave(self.entries.pop(key).value)

    def _leave(self, value: V) -> None:
        """Destroy a descriptor, or remember to if it is running."""
        self.removals += 1
        if self._in_use is not None and self._in_use(value):
            self._limbo.append(value)
        else:
            self._destroy([value])

    def _destroy(self, values: Iterable[V]) -> None:
        """Hand descriptors to the destroyer, each of them whatever the others do."""
        for value in values:
            self._destroyed += 1
            if self._destroyer is None:
                continue
            try:
                self._destroyer(value)
            except Exception:
                self._failures += 1
                _log.exception("destroying descriptor %r raised; the others are destroyed all the same", value)

    def _settle(self) -> None:
        """Do what was put off: a clear that another thread asked for, and descriptors that were running."""
        if self._clear_requested:
            self._clear_requested = False
            self._drop_all()
        if self._limbo:
            waiting, self._limbo = self._limbo, []
            for value in waiting:
                self._leave(value)

    def resize(self, capacity: int) -> None:
        """Change the capacity; what is too much leaves at once."""
        self._capacity = _check_capacity(capacity)
        self._settle()
        self._make_room()

    def clear(self) -> None:
        """Destroy everything, pinned descriptors aside. From another thread: ask the owner to, at its next call."""
        if threading.get_ident() != self._owner:
            self._clear_requested = True
            return
        self._settle()
        self._drop_all()

    def _drop_all(self) -> None:
        """Let go of everything that is not pinned."""
        dropped = [key for key, entry in self.entries.items() if not _pinned(entry.value)]
        for value in [self.entries.pop(key).value for key in dropped]:
            self._leave(value)

    def close(self) -> None:
        """Destroy everything that is left, pinned or not: the thread or the process ends."""
        values = [*self._limbo, *(entry.value for entry in self.entries.values())]
        self._limbo.clear()
        self.removals += 1
        self.entries.clear()
        self._destroy(values)

    def abandon(self) -> list[V]:
        """Forget everything without destroying it, and return it: a forked child must not touch its parent's descriptors."""
        values = [*self._limbo, *(entry.value for entry in self.entries.values())]
        self._limbo.clear()
        self.removals += 1
        self.entries.clear()
        return values

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, key: Hashable) -> bool:
        return key in self.entries

    @property
    def capacity(self) -> int:
        """Descriptors held at most, pinned ones aside."""
        return self._capacity

    @property
    def stats(self) -> CacheStats:
        """What happened so far."""
        return CacheStats(
            self.clock - self._puts,
            self._misses,
            self._evictions,
            self._destroyed,
            self._failures,
            len(self.entries),
            self._capacity,
            self._prepare_s,
        )


def _check_capacity(capacity: object) -> int:
    """Return a capacity of at least 1."""
    if isinstance(capacity, bool) or not isinstance(capacity, int):
        raise ArgumentTypeError("LRUDescriptorCache: capacity", expected="an int of at least 1", got=repr(capacity))
    if capacity < 1:
        raise ArgumentValueError(
            "LRUDescriptorCache: capacity", expected="at least 1", got=capacity, fix="a cache that holds nothing prepares at every call"
        )
    return capacity


def _pinned(value: object) -> bool:
    """Whether a descriptor must stay for the life of the process."""
    return bool(getattr(value, "pinned", False))
