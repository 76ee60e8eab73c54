"""One op's descriptor caches in each thread: one LRU per device, made on first touch.

A descriptor belongs to the thread that prepared it, and ends with it: see `lru` and `lifetimes`. What the caches of a thread
counted outlives it in the op's `CacheSettings`.
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

__all__ = ["CacheSettings", "ThreadCaches"]

_GENERATIONS = itertools.count(1)  # every clear of any op draws its own number, so that two at once are two


class CacheSettings:
    """What all threads' caches of one op share, and what they counted. The capacity is that of each thread and device."""

    def __init__(self, op: str, capacity: int, destroyer: Callable[[Any], None] | None) -> None:
        self.op = op
        self.capacity = capacity
        self.destroyer = destroyer
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
