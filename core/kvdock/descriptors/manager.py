"""All descriptor caches of a runtime: capacity, statistics and clearing by op, whatever the op's name.

The same caches hold the descriptors of kvdock's own ops and of any op that a plugin makes: there is no code per op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvdock.descriptors.lru import LRUDescriptorCache
from kvdock.descriptors.stats import CacheStats
from kvdock.descriptors.thread_caches import CacheSettings, ThreadCaches
from kvdock.errors import ArgumentValueError
from kvdock.spec import check_int

__all__ = ["DEFAULT_CAPACITY", "DescriptorCacheManager"]

DEFAULT_CAPACITY = 100
"""Descriptors per op, device and thread, unless said otherwise."""


class DescriptorCacheManager:
    """Descriptor caches by op. Threads may share it; each gets caches of its own from it.

    Args:
        capacities: descriptors per device and thread, by op; `DEFAULT_CAPACITY` for ops that are not named.

    Raises:
        ArgumentTypeError: a capacity that is no int.
        ArgumentValueError: a capacity below 1.
    """

    def __init__(self, capacities: Mapping[str, int] | None = None) -> None:
        self._capacities = {op: _checked(op, value) for op, value in (capacities or {}).items()}
        self._declared: dict[str, tuple[CacheSettings, ThreadCaches]] = {}

    def declare(self, op: str, destroyer: Callable[[Any], None] | None = None) -> tuple[CacheSettings, ThreadCaches]:
        """Make the caches of an op known, whose destroyer is called once with each descriptor, in the thread that owns it.

        Declaring it again in the same way returns what is there.

        Raises:
            ArgumentValueError: the op is declared already with another destroyer, so that descriptors would be mixed up.
        """
        settings = CacheSettings(op, self._capacities.get(op, DEFAULT_CAPACITY), destroyer)
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
        self._capacities[op] = _checked(op, capacity)
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


def _checked(op: str, capacity: object) -> int:
    return check_int(f"descriptor capacity of {op}", capacity, 1)
