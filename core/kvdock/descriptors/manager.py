"""All descriptor caches of a runtime: capacity, statistics and clearing by op, whatever the op's name.

The same caches hold the descriptors of kvdock's own ops and of any op that a plugin makes: there is no code per op. Of an op there is
one LRU per thread and device, made on first touch. A descriptor belongs to the thread that prepared it, and ends with it: see `lru` and
`lifetimes`. What the caches of a thread counted outlives it in the op's `CacheSettings`.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from kvdock.descriptors.lifetimes import track
from kvdock.descriptors.lru import LRUDescriptorCache
from kvdock.descriptors.stats import CacheStats
from kvdock.errors import ArgumentValueError
from kvdock.spec import check_int

__all__ = ["DEFAULT_CAPACITY", "CacheSettings", "DescriptorCacheManager", "ThreadCaches"]

DEFAULT_CAPACITY = 100
"""Descriptors per op, device and thread, unless said otherwise."""

_GENERATIONS = itertools.count(1)  # every clear of any op draws its own number, so that two at once are two


class CacheSettings:
    """What all threads' caches of one op share, and what they counted. The capacity is that of each thread and device."""

    def __init__(self, capacity: int, destroyer: Callable[[Any], None] | None) -> None:
        self.capacity, self.destroyer = capacity, destroyer
        self.generation = 0
        """Part of every key of a call: what was prepared under an earlier one is never found again."""
        self.living: dict[int, weakref.ref[_OpCache]] = {}
        self._past: dict[Any, CacheStats] = {}
        self._lock = threading.RLock()  # taken by finalizers too, which run in the middle of anything
        track(self)

    def new_generation(self) -> None:
        """Let every thread find nothing from now on, and destroy what it has at its next miss."""
        self.generation = next(_GENERATIONS)

    def ended(self, cache: _OpCache) -> None:
        """Keep what a cache counted, which holds nothing any more."""
        counted = attrs.evolve(cache.stats, size=0, capacity=0)
        device = cache.device  # and not the cache: what is late refers to this
        cache.owner.late = lambda failed: self._count(device, CacheStats(destroyed=1, failures=failed))
        if self.living.pop(id(cache), None) is not None and counted != CacheStats():  # a forked child must not wait for the lock
            self._count(device, counted)

    def _count(self, device: Any, counted: CacheStats) -> None:
        with self._lock:
            self._past[device] = self._past.get(device, CacheStats()) + counted

    def stats(self) -> dict[Any, CacheStats]:
        """Return the statistics over all threads of this process, those that have ended included, by device."""
        with self._lock:
            total = dict(self._past)
            for cache in [reference() for reference in list(self.living.values())]:
                if cache is not None:
                    total[cache.device] = total.get(cache.device, CacheStats()) + cache.stats
        return total

    def finish(self) -> None:
        """Nothing ends with the interpreter here: the caches hear of it themselves."""

    def abandon(self) -> None:
        """Count anew in a forked child. The lock may have been held by a thread that does not exist there."""
        self._lock = threading.RLock()
        self._past = {}


class _OpCache(LRUDescriptorCache[Any]):
    def __init__(self, settings: CacheSettings, device: Any) -> None:
        super().__init__(settings.capacity, settings.destroyer)
        self.device = device
        self._settings = settings
        settings.living[id(self)] = weakref.ref(self)

    def close(self) -> None:
        super().close()
        self._settings.ended(self)


class ThreadCaches(threading.local):
    """The calling thread's caches of one op: ``local.caches`` is a dictionary of its own in each thread, by device.

    Python calls ``__init__`` at a thread's first touch. A signal handler may look in the middle of that, and finds what is
    the same for all threads: the settings, which are in a slot, and no caches yet.
    """

    __slots__ = ("_settings",)
    _settings: CacheSettings
    caches: Mapping[Any, LRUDescriptorCache[Any]] = MappingProxyType({})
    generation: int = -1
    """The generation of what the caches hold: that of the settings when this thread last looked."""

    def __init__(self, settings: CacheSettings) -> None:
        self._settings = settings
        self._own()

    def open(self, device: Any) -> LRUDescriptorCache[Any]:
        """Return the cache of a device, made on first touch, after what other threads have asked for was done."""
        self.catch_up()
        cache = self.caches.get(device)
        if cache is None:
            cache = self._own().setdefault(device, _OpCache(self._settings, device))
        elif cache.capacity != self._settings.capacity:
            cache.resize(self._settings.capacity)
        return cache

    def _own(self) -> dict[Any, LRUDescriptorCache[Any]]:
        caches: dict[Any, LRUDescriptorCache[Any]] = self.__dict__.setdefault("caches", {})
        return caches

    def catch_up(self) -> None:
        """Drop what an earlier generation left, whose keys are never looked up again."""
        if self.generation != self._settings.generation:
            self.generation = self._settings.generation
            for cache in list(self.caches.values()):
                cache.clear()


class DescriptorCacheManager:
    """Descriptor caches by op. Threads may share it; each gets caches of its own from it.

    Args:
        capacities: descriptors per device and thread, by op; `DEFAULT_CAPACITY` for ops that are not named.

    Raises:
        ArgumentTypeError: a capacity that is no int.
        ArgumentValueError: a capacity below 1.
    """

    def __init__(self, capacities: Mapping[str, int] | None = None) -> None:
        self._capacities: dict[str, int] = {}
        self._declared: dict[str, tuple[CacheSettings, ThreadCaches]] = {}
        for op, capacity in (capacities or {}).items():
            self.set_capacity(op, capacity)

    def declare(self, op: str, destroyer: Callable[[Any], None] | None = None) -> tuple[CacheSettings, ThreadCaches]:
        """Make the caches of an op known, whose destroyer is called once with each descriptor, in the thread that owns it.

        Declaring it again in the same way returns what is there.

        Raises:
            ArgumentValueError: the op is declared already with another destroyer, so that descriptors would be mixed up.
        """
        settings = CacheSettings(self._capacities.get(op, DEFAULT_CAPACITY), destroyer)
        found = self._declared.setdefault(op, (settings, ThreadCaches(settings)))  # one step: of two threads one wins
        if found[0].destroyer != destroyer:
            raise ArgumentValueError(
                f"descriptor caches of {op}",
                expected="one owner",
                got=f"a second declaration, with destroyer {destroyer!r} instead of {found[0].destroyer!r}",
                fix="use another name, or another DescriptorCacheManager",
            )
        found[0].capacity = self._capacities.get(op, DEFAULT_CAPACITY)  # again: it may have been set meanwhile
        return found

    def cache(self, op: str, device: Any) -> LRUDescriptorCache[Any]:
        """Return the calling thread's cache of a declared op on a device.

        Ask for it at each call: what is returned has done what `clear` and `set_capacity` asked for in any thread. A device is
        anything hashable, such as a `torch.device`. kvdock's ops use None for host memory.

        Raises:
            ArgumentValueError: the op was not declared.
        """
        return self._find(op)[1].open(device)

    def set_capacity(self, op: str, capacity: int) -> None:
        """Change how many descriptors of an op each thread keeps for each device. Threads follow at their next miss.

        The op may be declared later.

        Raises:
            ArgumentTypeError: a capacity that is no int.
            ArgumentValueError: a capacity below 1.
        """
        self._capacities[op] = check_int(f"descriptor capacity of {op}", capacity, 1)
        if op in self._declared:
            self._declared[op][0].capacity = capacity

    def clear(self, op: str | None = None) -> None:
        """Forget the descriptors of one op, or of all, in every thread.

        The calling thread destroys its own at once, every other at its next call of the op. Pinned ones stay.

        Raises:
            ArgumentValueError: the op was not declared.
        """
        for settings, local in list(self._declared.values()) if op is None else [self._find(op)]:
            settings.new_generation()
            local.catch_up()

    def stats(self) -> dict[str, dict[Any, CacheStats]]:
        """Return the statistics over all threads, those that have ended included, by op and device."""
        return {op: settings.stats() for op, (settings, _) in list(self._declared.items())}

    def _find(self, op: str) -> tuple[CacheSettings, ThreadCaches]:
        if op not in self._declared:
            known = ", ".join(sorted(self._declared)) or "none yet"
            raise ArgumentValueError("descriptor caches", expected=f"a declared op: {known}", got=repr(op), fix="declare(op) first")
        return self._declared[op]
