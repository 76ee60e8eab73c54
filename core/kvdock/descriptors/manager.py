"""All descriptor caches of a runtime: capacity, statistics and clearing by op, whatever the op's name.

The same caches hold the descriptors of kvdock's own ops and of any op that a plugin makes: there is no code per op.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from kvdock.descriptors.lru import CacheStats, LRUDescriptorCache
from kvdock.descriptors.thread_caches import CacheSettings, ThreadCaches
from kvdock.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["DEFAULT_CAPACITY", "DescriptorCacheManager"]

DEFAULT_CAPACITY = 100
"""Descriptors per op, device and thread, unless said otherwise."""


class DescriptorCacheManager:
    """Descriptor caches by op. Threads may share it; each gets caches of its own from it.

    Args:
        capacities: descriptors per device and thread, by op; `DEFAULT_CAPACITY` for ops that are not named.
    """

    def __init__(self, capacities: Mapping[str, int] | None = None) -> None:
        self._capacities = {op: _check(op, value) for op, value in (capacities or {}).items()}
        self._settings: dict[str, CacheSettings] = {}
        self._locals: dict[str, ThreadCaches] = {}
        self._lock = threading.Lock()

    def declare(
        self, op: str, destroyer: Callable[[Any], None] | None = None, in_use: Callable[[Any], bool] | None = None
    ) -> tuple[CacheSettings, ThreadCaches]:
        """Make the caches of an op known, with what destroys its descriptors. Returns what exists when called again.

        Args:
            op: name of the op, any.
            destroyer: called once with each descriptor that leaves, in the thread that owns it.
            in_use: whether a descriptor is running further up in the calling thread.
        """
        with self._lock:
            if op not in self._settings:
                self._settings[op] = CacheSettings(op, self._capacities.get(op, DEFAULT_CAPACITY), destroyer, in_use)
                self._locals[op] = ThreadCaches(self._settings[op])
            return self._settings[op], self._locals[op]

    def cache(self, op: str, device: Any) -> LRUDescriptorCache[Any]:
        """Return the calling thread's cache of a declared op on a device.

        Args:
            op: name of the op.
            device: device of its tensors, such as a `torch.device`; None is the host.

        Raises:
            ArgumentValueError: the op was not declared.
        """
        if op not in self._locals:
            raise ArgumentValueError(
                "descriptor cache",
                expected=f"a declared op: {', '.join(sorted(self._locals)) or 'none yet'}",
                got=repr(op),
                fix="declare(op) first",
            )
        return self._locals[op].open(device)

    def set_capacity(self, op: str, capacity: int) -> None:
        """Change how many descriptors of an op each thread keeps for each device. Threads follow at their next miss."""
        with self._lock:
            self._capacities[op] = _check(op, capacity)
            if op in self._settings:
                self._settings[op].capacity = capacity

    def clear(self, op: str | None = None) -> None:
        """Forget the descriptors of one op, or of all, in every thread; each owner destroys its own at its next miss."""
        for name, settings in list(self._settings.items()):
            if op in (None, name):
                settings.generation += 1

    def stats(self) -> dict[str, dict[Any, CacheStats]]:
        """Return the statistics over all threads, those that have ended included, by op and device."""
        return {op: settings.stats() for op, settings in list(self._settings.items())}


def _check(op: str, capacity: object) -> int:
    """Return a capacity of at least 1."""
    if isinstance(capacity, bool) or not isinstance(capacity, int):
        raise ArgumentTypeError(f"descriptor capacity of {op}", expected="an int of at least 1", got=repr(capacity))
    if capacity < 1:
        raise ArgumentValueError(f"descriptor capacity of {op}", expected="at least 1", got=capacity)
    return capacity
