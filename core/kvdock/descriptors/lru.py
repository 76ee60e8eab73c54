"""A least-recently-used cache of descriptors, owned by one thread.

A hit must cost next to nothing, so it only stamps the entry with a counter; the order is looked for when an entry has to go,
which is rare and over at most `capacity` entries.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterable
from operator import itemgetter
from types import FrameType
from typing import Any, Generic, NoReturn, TypeVar

from kvdock.descriptors.departures import Departures, is_pinned
from kvdock.descriptors.lifetimes import track
from kvdock.descriptors.stats import CacheStats
from kvdock.errors import UnsupportedError, WrongThreadError
from kvdock.spec import check_int

__all__ = ["Entry", "LRUDescriptorCache"]

V = TypeVar("V")


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

    When the cache is dropped, as at the end of its thread, or when the interpreter exits, what it holds is destroyed. In a
    forked child it is empty, and what the parent held is never destroyed there.

    A descriptor with a true attribute ``pinned`` never leaves, since a captured graph may launch it again: it does not
    count towards the capacity, stays when the cache is cleared, and is destroyed when the interpreter exits.

    It cannot be copied or pickled, which raises `UnsupportedError`: a descriptor may be in one cache only.

    Args:
        capacity: descriptors held at most, at least 1.
        destroyer: called once with each descriptor that leaves. One that raises is logged and counted, and the others are
            destroyed all the same.
        in_use: given a descriptor and the innermost frame of a thread, says whether it is running further up that stack. It
            then leaves, and is destroyed at a later call. Without it, descriptors are taken to be idle between calls.

    Raises:
        ArgumentTypeError: a capacity that is no int.
        ArgumentValueError: a capacity below 1.
    """

    def __init__(
        self, capacity: int, destroyer: Callable[[V], None] | None = None, *, in_use: Callable[[V, FrameType], bool] | None = None
    ) -> None:
        self.entries: dict[Hashable, Entry[V]] = {}
        """The entries by key: read by the quick path of a call, which stamps what it finds (see `touch`)."""
        self.clock = 0
        """Uses so far: hits and puts. An entry is stamped with it."""
        self.removals = 0
        """Counted up whenever descriptors leave. Who kept one must look it up again when this changes."""
        self._departures = Departures(destroyer, in_use)
        self._begin()
        self._capacity = check_int("LRUDescriptorCache: capacity", capacity, 1)
        track(self)

    def _begin(self) -> None:
        """Belong to the calling thread of this process, and start counting."""
        self._owner = threading.get_ident()
        self._pid = os.getpid()
        self._clear_requested = False
        self.clock = self._puts = self._misses = self._evictions = 0
        self._prepare_s = 0.0

    def get(self, key: Hashable) -> V | None:
        """Return the descriptor of a key and count a hit, or None and count a miss.

        Raises:
            WrongThreadError: called from another thread than the one that made the cache.
        """
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

    def put(self, key: Hashable, value: V, *, prepare_s: float = 0.0) -> Entry[V]:
        """Keep a descriptor. One that was there under the key is destroyed, unless it is the same object.

        Args:
            key: exact static signature; compared for equality.
            value: the descriptor. It may be in one cache only, under one key.
            prepare_s: seconds that preparing it took, for the statistics.

        Returns:
            Its entry.

        Raises:
            WrongThreadError: called from another thread than the one that made the cache.
        """
        self._settle()
        old = self.entries.get(key)
        self.clock += 1
        self._puts += 1
        entry = self.entries[key] = Entry(value, self.clock)
        self._prepare_s += prepare_s
        if old is not None and old.value is not value:
            self.removals += 1
            self.dispose(old.value)
        self._make_room()
        return entry

    def count_miss(self) -> None:
        """Count a look-up that the quick path of a call did itself, without finding anything."""
        self._misses += 1

    def dispose(self, value: V) -> None:
        """Destroy a descriptor that was prepared and used without being kept here; it is counted like the others."""
        self._departures.add([value])
        self._departures.settle()

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
        if threading.get_ident() == self._owner:
            self._settle()

    def _settle(self) -> None:
        """Do what was put off: a clear that was asked for, and descriptors that were running."""
        if threading.get_ident() != self._owner:
            raise WrongThreadError(
                "LRUDescriptorCache",
                expected=f"calls from thread {self._owner}, which made it",
                got=f"a call from thread {threading.get_ident()}",
                fix="make one in each thread; only clear() may come from another",
            )
        if self._clear_requested:
            self._clear_requested = False
            self._remove([key for key, entry in list(self.entries.items()) if not is_pinned(entry.value)])
        if self._departures:
            self._departures.settle()

    def _make_room(self) -> None:
        """Let the least recently used go until no more than ``capacity`` are left, pinned ones aside."""
        if len(self.entries) <= self._capacity:
            return
        free = [(entry.used, key) for key, entry in list(self.entries.items()) if not is_pinned(entry.value)]
        excess = len(free) - self._capacity
        if excess > 0:
            free.sort(key=itemgetter(0))  # keys need not have an order
            self._evictions += self._remove([key for _, key in free[:excess]])

    def _remove(self, keys: Iterable[Hashable]) -> int:
        """Let entries go, and count those that were still there: a signal handler may have let some go in between."""
        self.removals += 1
        found = 0
        for key in keys:
            entry = self.entries.pop(key, None)
            if entry is not None:
                found += 1
                self._departures.add([entry.value])
        self._departures.settle()
        return found

    def _take_all(self) -> None:
        """Take everything out, one by one, so that nobody finds it any more."""
        self.removals += 1
        with contextlib.suppress(KeyError):
            while self.entries:
                self._departures.add([self.entries.popitem()[1].value])

    def close(self) -> None:
        """End the cache, as it does by itself when it is dropped: destroy everything but what is pinned or running."""
        self._check_process()
        self._take_all()
        self._departures.keep()

    def finish(self, deadline: float) -> None:
        """Destroy everything, pinned or not, as the interpreter exits, from whatever thread. See `Departures.finish`."""
        self._check_process()
        self._take_all()
        self._departures.finish(self._owner, deadline)

    def _check_process(self) -> None:
        """Notice a fork of which Python has not told yet, as before its hooks run, or never will, as with a C library's."""
        if os.getpid() != self._pid:
            self.abandon()

    def abandon(self) -> None:
        """Forget everything without destroying it: a forked child must not touch its parent's descriptors."""
        self._take_all()
        self._departures.abandon()
        self._begin()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # nothing that a destroyer needs may be left then; `finish` has been called before
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
        hits, gone = self.clock - self._puts, self._departures
        return CacheStats(
            hits, self._misses, self._evictions, gone.destroyed, gone.failures, len(self.entries), self._capacity, self._prepare_s
        )
