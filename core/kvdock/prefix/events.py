"""What a prefix cache tells its observers, such as a router that keeps a map of which engine has which prefix."""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable, Hashable
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.errors import KVDockWarning

__all__ = ["Cleared", "EventStream", "PrefixEvent", "Removed", "Stored", "report"]


@attrs.frozen(eq=False)
class Stored:
    """Blocks that the cache took over.

    Args:
        namespace: where they are.
        parent: id of the block before the first of them, or None at the beginning of a prefix.
        tokens: their token ids, int64 ``[n * block_size]``.
        blocks: their ids in order, int32 ``[n]``.
    """

    namespace: tuple[Hashable, ...]
    parent: int | None
    tokens: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int32]


@attrs.frozen(eq=False)
class Removed:
    """Blocks that were evicted; none of them is before a block that is still there.

    Args:
        blocks: their ids, int32 ``[n]``.
    """

    blocks: npt.NDArray[np.int32]


@attrs.frozen
class Cleared:
    """Everything was forgotten."""


PrefixEvent: TypeAlias = Stored | Removed | Cleared

Observer = Callable[[PrefixEvent], None]


class EventStream:
    """Events to deliver, in order, when the call that caused them is done.

    An observer may call the cache: what that causes is delivered after what is already waiting. One that raises is
    reported with a `KVDockWarning`; the call and the other observers go on.
    """

    def __init__(self) -> None:
        self._observers: list[Observer] = []
        self._waiting: deque[PrefixEvent] = deque()
        self._delivering = False

    def __bool__(self) -> bool:
        """Whether anybody listens: without, events need not be made."""
        return bool(self._observers)

    def subscribe(self, observer: Observer) -> Callable[[], None]:
        """Add an observer, and return a function that removes it."""
        self._observers.append(observer)
        is_there = True

        def unsubscribe() -> None:
            nonlocal is_there
            if is_there:
                is_there = False
                self._observers.remove(observer)

        return unsubscribe

    def emit(self, event: PrefixEvent) -> None:
        """Deliver an event, or let it wait for the ones before it."""
        self._waiting.append(event)
        # An observer has called the cache: the loop below, further up in this very thread, goes on with this event.
        if self._delivering:
            return
        self._delivering = True
        try:
            while self._waiting:
                self._deliver(self._waiting.popleft())
        finally:
            self._delivering = False

    def _deliver(self, event: PrefixEvent) -> None:
        # A copy, since an observer may unsubscribe itself or others while it is called.
        for observer in tuple(self._observers):
            try:
                observer(event)
            except Exception as error:  # noqa: BLE001 - the cache is not the observer's to break
                text = f"an observer of a prefix cache raised {type(error).__name__}: {error}. Fix: catch it in {observer!r}"
                report(text)


def report(text: str) -> None:
    """Warn; where warnings are errors, log: the call that somebody else's code is called in goes on."""
    try:
        warnings.warn(text, KVDockWarning, stacklevel=5)
    except KVDockWarning:
        logging.getLogger("kvdock").error(text)
