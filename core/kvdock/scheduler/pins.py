"""Prefixes that must stay cached, such as a system prompt."""

from __future__ import annotations

import heapq
import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvdock.errors import ArgumentTypeError, ArgumentValueError
from kvdock.prefix.interface import PrefixHandle
from kvdock.prefix.ownership import NotCopied

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Pin", "Pins"]

_FIX = "pass time.monotonic, or a function that returns the number of steps"


class Pin(NotCopied):
    """Keeps a prefix cached until it is released: by `release`, by the end of a ``with`` block, or by its time.

    It cannot be copied or pickled; pin the prefix again.

    Attributes:
        num_tokens: tokens that are pinned, a multiple of the block size.
    """

    instead_of_copies = "pin the prefix again: each pin holds it by itself"

    def __init__(self, handle: PrefixHandle, held: Any, release: Callable[[Pin], None]) -> None:
        self.num_tokens = handle.cached_len
        self._held = held
        self._release = release
        self._handle: PrefixHandle | None = handle

    def __repr__(self) -> str:
        return f"Pin(num_tokens={self.num_tokens}, is_held={self._handle is not None})"

    @property
    def is_held(self) -> bool:
        """Whether the prefix is still pinned. One whose time is over counts until the manager is called again."""
        return self._handle is not None

    def release(self) -> None:
        """Release the prefix: as far as this pin is concerned it may be evicted. Once more does nothing.

        Raises:
            WrongThreadError: the manager is another thread's.
        """
        self._release(self)

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class Pins:
    """The pins of a manager, and when their times are over.

    Args:
        clock: what the times are compared with.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        if not callable(clock):
            raise ArgumentTypeError("CacheManager: clock", expected="a function without arguments", got=repr(clock)[:80], fix=_FIX)
        self._clock = clock
        self._held: dict[int, Pin] = {}
        self._ends: list[tuple[float, int, Pin]] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._held)

    def held(self) -> list[Any]:
        """Return what each pin holds beside its lock."""
        return [pin._held for pin in self._held.values()]

    def now(self) -> Any:
        """Return what the clock says. It is the caller's: what it raises comes through, so nothing may be half done by then."""
        now: Any = self._clock()
        if not isinstance(now, numbers.Real):
            raise ArgumentTypeError("CacheManager: clock", expected="a function that returns a number", got=repr(now)[:80], fix=_FIX)
        return now

    def end_of(self, ttl: object) -> float | None:
        """Return what the clock says when a pin of so much time is over."""
        if ttl is None:
            return None
        if isinstance(ttl, bool) or not isinstance(ttl, int | float | np.integer | np.floating) or not ttl > 0:
            raise ArgumentValueError("CacheManager.pin: ttl", expected="a number above 0, or None", got=repr(ttl))
        end: float = self.now() + ttl
        return end

    def add(self, pin: Pin, end: float | None) -> None:
        """Keep a pin, until the clock says ``end``."""
        self._held[id(pin)] = pin
        if end is not None:
            self._number += 1
            heapq.heappush(self._ends, (end, self._number, pin))

    def remove(self, pin: Pin) -> None:
        """Keep a pin no longer."""
        del self._held[id(pin)]
        if len(self._ends) > 2 * len(self._held):  # those released before their time would stay till then
            self._ends = [entry for entry in self._ends if id(entry[2]) in self._held]
            heapq.heapify(self._ends)

    def over(self) -> list[Pin]:
        """Return the pins whose time is over, each once."""
        found: list[Pin] = []
        now = self.now() if self._ends else 0.0
        while self._ends and self._ends[0][0] <= now:
            found.append(heapq.heappop(self._ends)[2])
        return found
