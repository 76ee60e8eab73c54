"""One op's descriptor caches in each thread: one LRU per device, made on first touch.

A descriptor belongs to the thread that prepared it. When that thread ends, or the interpreter does, its descriptors are
destroyed; a forked child forgets those of its parent, whose handles mean nothing there, and never destroys them.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from kvdock.descriptors.lru import CacheStats, LRUDescriptorCache

__all__ = ["CacheSettings", "ThreadCaches"]


class CacheSettings:
    """What all threads' caches of one op share.

    Args:
        op: name of the op.
        capacity: descriptors per device and thread.
        destroyer: called once with each descriptor that leaves.
        in_use: whether a descriptor is running further up in the calling thread.
    """

    def __init__(self, op: str, capacity: int, destroyer: Callable[[Any], None] | None, in_use: Callable[[Any], bool] | None) -> None:
        self.op = op
        self.capacity = capacity
        self.destroyer = destroyer
        self.in_use = in_use
        self.generation = 0
        """Part of every key. Bumped by a clear from any thread: what was prepared before is never found again."""
        self.stores: weakref.WeakSet[_Store] = weakref.WeakSet()
        self.past: dict[Any, CacheStats] = {}
        """What caches of threads that have ended had counted, by device."""
        self.lock = threading.Lock()

    def stats(self) -> dict[Any, CacheStats]:
        """Return the statistics over all threads, by device."""
        with self.lock:
            total, stores = dict(self.past), list(self.stores)
        for store in stores:
            for device, cache in list(store.caches.items()):
                total[device] = total.get(device, CacheStats()) + cache.stats
        return total


class _Store:
    """One thread's caches of one op. Its end is the end of its thread, or of the process."""

    def __init__(self, settings: CacheSettings) -> None:
        self.settings = settings
        self.caches: dict[Any, LRUDescriptorCache[Any]] = {}
        self._pid = os.getpid()
        with settings.lock:
            settings.stores.add(self)
        _STORES.add(self)

    def close(self) -> None:
        """Destroy everything, once."""
        if os.getpid() != self._pid:  # forked without the hook, as by a C library
            self.abandon()
        caches, self.caches = self.caches, {}
        for device, cache in caches.items():
            cache.close()
            with self.settings.lock:
                self.settings.past[device] = self.settings.past.get(device, CacheStats()) + cache.stats

    def abandon(self) -> None:
        """Forget everything in a forked child, and keep it from being collected."""
        _ABANDONED.extend(cache.abandon() for cache in self.caches.values())
        self.caches.clear()
        self._pid = os.getpid()

    def __del__(self) -> None:
        self.close()


_STORES: weakref.WeakSet[_Store] = weakref.WeakSet()
_ABANDONED: list[Any] = []


def _close_all() -> None:
    """Destroy what is left when the interpreter exits."""
    for store in list(_STORES):
        store.close()


def _abandon_all() -> None:
    """Forget what the parent process prepared."""
    for store in list(_STORES):
        store.settings.lock = threading.Lock()  # its holder may not exist here
        store.abandon()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_abandon_all)


class ThreadCaches(threading.local):
    """The calling thread's caches of one op: ``local.caches`` is a dictionary of its own in each thread, by device.

    Args:
        settings: what all threads share.
    """

    def __init__(self, settings: CacheSettings) -> None:
        self._settings = settings
        self._store = _Store(settings)
        self._generation = settings.generation
        self.caches = self._store.caches

    def open(self, device: Any) -> LRUDescriptorCache[Any]:
        """Return the cache of a device, made on first touch."""
        if self._generation != self._settings.generation:
            self._catch_up()
        cache = self.caches.get(device)
        if cache is None:
            settings = self._settings
            cache = self.caches[device] = LRUDescriptorCache(settings.capacity, settings.destroyer, in_use=settings.in_use)
        elif cache.capacity != self._settings.capacity:
            cache.resize(self._settings.capacity)
        return cache

    def _catch_up(self) -> None:
        """Drop what an earlier generation left, whose keys are never looked up again."""
        self._generation = self._settings.generation
        for cache in self.caches.values():
            cache.clear()
