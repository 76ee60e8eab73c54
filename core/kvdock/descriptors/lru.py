"""A least-recently-used cache of descriptors, owned by one thread.

A hit must cost next to nothing, so it only stamps the entry with a counter; the order is looked for when an entry has to go,
which is rare and over at most `capacity` entries.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Iterable
from operator import itemgetter
from typing import Any, Generic, NoReturn, TypeVar

from kvdock.descriptors.lifetimes import Held, Owner, track
from kvdock.descriptors.stats import CacheStats
from kvdock.errors import UnsupportedError, WrongThreadError
from kvdock.spec import check_int

__all__ = ["Entry", "LRUDescriptorCache"]

V = TypeVar("V")


class _Value(Held):
    """A descriptor held for who put it, by the cache alone."""

    __slots__ = ()


class Entry:
    """What holds a descriptor in a cache, and when it was last used: ``used`` counts look-ups, not time.

    ``value`` is None from the moment when the entry leaves its cache. Who has found an entry may run what it reads from there:
    holding that, it keeps the descriptor from being destroyed.
    """

    __slots__ = ("used", "value")

    def __init__(self, value: Held | None, used: int) -> None:
        self.value: Any = value
        self.used = used

    @property
    def content(self) -> Any:
        """What was put: itself what holds a descriptor, like a plan, or a descriptor that is held for who put it."""
        return self.value.ending.value if isinstance(self.value, _Value) else self.value

    @property
    def pinned(self) -> bool:
        """Whether it must stay."""
        return self.value is not None and self.value.ending.pinned

    def leave(self) -> None:
        """Let go. A descriptor that only the cache held is destroyed now."""
        held, self.value = self.value, None
        if isinstance(held, _Value):  # now, and not by its finaliser: that could not raise an interrupt of the destroyer
            held.ending.end()


class LRUDescriptorCache(Generic[V]):
    """Descriptors by key, of which the least recently used leaves when there are more than ``capacity``.

    It belongs to the thread that made it: only that thread may look up, put and resize. `clear` from another thread is a
    request, which the owner carries out at its next call, since a descriptor must be destroyed by the thread that uses it.

    When the cache is dropped, as at the end of its thread, or when the interpreter exits, what it holds is destroyed. In a
    forked child it is empty, and what the parent held is never destroyed there.

    A descriptor with a true attribute ``pinned`` never leaves, since a captured graph may launch it again: it does not
    count towards the capacity, stays when the cache is cleared, and is destroyed when the interpreter exits.

    What is put may also be a `Held`, like a plan. The cache then only lets go of it, and it ends when its last call does.

    It cannot be copied or pickled, which raises `UnsupportedError`: a descriptor may be in one cache only.

    Args:
        capacity: descriptors held at most, at least 1.
        destroyer: called once with each descriptor that leaves. One that raises is logged and counted, and the others are
            destroyed all the same.

    Raises:
        ArgumentTypeError: a capacity that is no int.
        ArgumentValueError: a capacity below 1.
    """

    def __init__(self, capacity: int, destroyer: Callable[[V], None] | None = None) -> None:
        self.entries: dict[Hashable, Entry] = {}
        """The entries by key: read by the quick path of a call, which stamps what it finds, as `get` does."""
        self.clock = 0
        """Uses so far: hits and puts. An entry is stamped with it."""
        self.misses = 0
        """Look-ups so far that found nothing, by `get` or by the quick path of a call itself."""
        self._destroyer = destroyer
        self._begin()
        self._capacity = check_int("LRUDescriptorCache: capacity", capacity, 1)
        track(self)

    def _begin(self) -> None:
        """Belong to the calling thread of this process, and start counting."""
        self.owner = Owner(self._destroyer)
        self._clear_requested = False
        self.clock = self._puts = self.misses = self._evictions = 0
        self._prepare_s = 0.0

    def get(self, key: Hashable) -> V | None:
        """Return the descriptor of a key and count a hit, or None and count a miss.

        Raises:
            WrongThreadError: called from another thread than the one that made the cache.
        """
        self._settle()
        entry = self.entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        entry.used = self.clock = self.clock + 1
        found: V = entry.content
        return found

    def put(self, key: Hashable, value: V, *, prepare_s: float = 0.0) -> Entry:
        """Keep a descriptor, and return its entry. One that was there under the key is destroyed, unless it is the same object.

        A descriptor may be in one cache only, under one key. Preparing it took ``prepare_s`` seconds, say the statistics.

        Raises:
            WrongThreadError: called from another thread than the one that made the cache.
        """
        self._settle()
        old = self.entries.get(key)
        self.clock += 1
        self._puts += 1
        self._prepare_s += prepare_s
        if old is not None and old.content is value:
            old.used = self.clock
            return old
        entry = self.entries[key] = Entry(value if isinstance(value, Held) else _Value(value, self.owner), self.clock)
        if old is not None:
            old.leave()
        self._make_room()
        return entry

    def resize(self, capacity: int) -> None:
        """Change the capacity; what is too much leaves at once.

        Raises:
            ArgumentTypeError: a capacity that is no int.
            ArgumentValueError: a capacity below 1.
            WrongThreadError: called from another thread than the one that made the cache.
        """
        checked = check_int("LRUDescriptorCache: capacity", capacity, 1)
        self._settle()
        self._capacity = checked
        self._make_room()

    def clear(self) -> None:
        """Destroy everything, pinned descriptors aside. From another thread: ask the owner to, at its next call."""
        self._clear_requested = True
        if threading.get_ident() == self.owner.thread:
            self._settle()

    def _settle(self) -> None:
        """Do what was put off: a clear that was asked for, and descriptors that could not be destroyed yet."""
        if threading.get_ident() != self.owner.thread:
            raise WrongThreadError(
                "LRUDescriptorCache",
                expected=f"calls from thread {self.owner.thread}, which made it",
                got=f"a call from thread {threading.get_ident()}",
                fix="make one in each thread; only clear() may come from another",
            )
        if self._clear_requested:
            self._clear()
        if self.owner.due:
            self.owner.settle()

    def _clear(self) -> None:
        """Let everything go, pinned descriptors aside. An interrupt puts off what is left."""
        try:
            self._clear_requested = False
            self._remove([key for key, entry in list(self.entries.items()) if not entry.pinned])
        except BaseException:
            self._clear_requested = True
            raise

    def _make_room(self) -> None:
        """Let the least recently used go until no more than ``capacity`` are left, pinned ones aside."""
        if len(self.entries) <= self._capacity:
            return
        free = [(entry.used, key) for key, entry in list(self.entries.items()) if not entry.pinned]
        excess = len(free) - self._capacity
        if excess > 0:
            free.sort(key=itemgetter(0))  # keys need not have an order
            self._evictions += self._remove([key for _, key in free[:excess]])

    def _remove(self, keys: Iterable[Hashable]) -> int:
        """Let entries go, and count those that were still there: a signal handler may have let some go in between."""
        found = 0
        for key in keys:
            entry = self.entries.pop(key, None)
            if entry is not None:
                found += 1
                entry.leave()
        return found

    def close(self) -> None:
        """End the cache, as it does by itself when it is dropped: what is idle and not pinned is destroyed."""
        self.owner.is_closed = True
        self._remove(list(self.entries))
        self.owner.settle()

    def finish(self) -> None:
        """Let everything go, pinned or not, from whatever thread: the interpreter exits."""
        self.owner.is_closed = self.owner.is_final = True
        self._remove(list(self.entries))

    def abandon(self) -> None:
        """Forget everything without destroying it: a forked child must not touch its parent's descriptors."""
        self._remove(list(self.entries))
        self._begin()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # see `Held`
            self.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        fix = f"make another, LRUDescriptorCache({self._capacity}), and prepare its own descriptors"
        raise UnsupportedError("LRUDescriptorCache", expected="one owner of each descriptor", got="copy, deepcopy or pickle", fix=fix)

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
        """What happened so far. Any thread may ask."""
        owner, size = self.owner, len(self.entries)
        hits, failures = self.clock - self._puts, owner.failures
        return CacheStats(hits, self.misses, self._evictions, owner.destroyed, failures, size, self._capacity, self._prepare_s)
