"""The way out of a descriptor cache: a queue from which each descriptor is destroyed once, and never while it runs.

A descriptor is taken out of the queue before it is destroyed. So nothing is destroyed twice, and neither what a destroyer
does to the cache nor an interrupt in the middle loses the others::

    entries -- replaced, evicted, cleared --> queue -- idle ------> destroyer
                                              |   ^ -- pinned ----> kept until the interpreter exits
                                              +---+    while it runs, further up in this thread
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Generic, TypeVar

from kvdock.descriptors.lifetimes import destroy, keep, leak

__all__ = ["Departures", "is_pinned"]

V = TypeVar("V")


class Departures(Generic[V]):
    """Descriptors that have left a cache, until they are destroyed.

    Args:
        destroyer: see `LRUDescriptorCache`.
        in_use: see `LRUDescriptorCache`.
    """

    def __init__(self, destroyer: Callable[[V], None] | None, in_use: Callable[[V, FrameType], bool] | None) -> None:
        self.destroyed = 0
        """Descriptors handed to the destroyer."""
        self.failures = 0
        """How often the destroyer raised."""
        self._destroyer = destroyer
        self._in_use = in_use
        self._queue: deque[V] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, values: Iterable[V]) -> None:
        """Queue descriptors that nobody can find any more."""
        self._queue.extend(values)

    def settle(self) -> None:
        """Destroy those that are idle, and set those that are pinned aside. Called by the thread that they belong to."""
        running: list[V] = []
        try:
            running.extend(value for value in self._drain() if not self._gone(value))
        finally:
            self._queue.extend(running)

    def _drain(self) -> Iterable[V]:
        """Take one after the other; a destroyer, or another thread at exit, may be doing the same."""
        while True:
            try:
                yield self._queue.popleft()
            except IndexError:
                return

    def _gone(self, value: V) -> bool:
        """Destroy a descriptor or set it aside, unless it runs in this thread; say whether that was done."""
        if self._in_use is not None and self._in_use(value, sys._getframe()):
            return False
        if is_pinned(value):
            keep(value, self._destroyer)
        else:
            self._destroy(value)
        return True

    def _destroy(self, value: V) -> None:
        """Hand a descriptor to the destroyer."""
        self.destroyed += 1
        self.failures += not destroy(value, self._destroyer)

    def keep(self) -> None:
        """Destroy those that are idle, and hold the others until the interpreter exits: their cache ends."""
        self.settle()
        for value in self._drain():
            keep(value, self._destroyer)

    def finish(self, owner: int, deadline: float) -> None:
        """Destroy all, from whatever thread, as the interpreter exits.

        Args:
            owner: ident of the thread that they belong to.
            deadline: `time.monotonic` until when its running calls are waited for. What runs on then is never destroyed.
        """
        for value in self._drain():
            while self._runs_in(owner, value) and time.monotonic() < deadline:
                time.sleep(0.001)
            if self._runs_in(owner, value):
                leak(value)
            else:
                self._destroy(value)

    def _runs_in(self, owner: int, value: V) -> bool:
        """Whether a thread is in a call of a descriptor."""
        frame = sys._current_frames().get(owner)
        return frame is not None and self._in_use is not None and self._in_use(value, frame)

    def abandon(self) -> None:
        """Forget all without destroying them, and start counting anew."""
        leak(list(self._queue))
        self._queue.clear()
        self.destroyed = self.failures = 0


def is_pinned(value: Any) -> bool:
    """Whether a descriptor must stay for the life of the process."""
    return bool(getattr(value, "pinned", False))
