"""How descriptors end: when nobody holds them any more, with the interpreter, or never.

A cache holds what holds a descriptor (`Held`), and so does every frame that runs it, both by plain references. Whoever lets
go last ends it. Until then, and until it is destroyed, a descriptor is also *pending* here, where nothing is lost::

    cache ----+
              +--> Held ....> Ending --> destroyer       once, by the thread that prepared it
    frames ---+  finaliser    | in _pending, until then
                              +--> due                   another thread let go, or the finaliser was interrupted

* **The interpreter exits.** `close_all` empties every cache, and destroys what nobody holds, pinned or not. What another
  thread is running gets a moment to end, or else stays.
* **A process forks.** The handles that a child inherits mean nothing there. It forgets them, and even what their
  deallocation would do must not happen: `_leak` holds them until the process is gone.
* **A graph was captured.** It launches what its descriptors hold whenever it is replayed, from any thread: what is pinned
  stays pending until the interpreter exits, though its cache or its thread ends.

Nothing here takes a lock: a child could inherit it locked, and finalisers run in the middle of anything.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from operator import length_hint
from typing import Any

__all__ = ["Ending", "Held", "Owner", "close_all", "track"]

_log = logging.getLogger("kvdock.descriptors")

_GRACE_S = 1.0  # how long calls of other threads are waited for, all together, when the interpreter exits

_tracked: dict[int, weakref.ReferenceType[Any]] = {}
_pending: dict[int, Ending] = {}


def track(thing: Any) -> None:
    """Call ``finish()`` of an object when the interpreter exits, and ``abandon()`` in a forked child. It is not kept alive."""
    key, forget = id(thing), _tracked.pop  # bound here: the last objects die after this module's names
    _tracked[key] = weakref.ref(thing, lambda _: forget(key, None))


class Owner:
    """A cache as its descriptors know it: whose it is, what destroys them (see `LRUDescriptorCache`), and how many were."""

    def __init__(self, destroyer: Callable[[Any], None] | None) -> None:
        self.destroyer: Callable[[Any], object] = destroyer or id  # which does nothing to it
        self.thread = threading.get_ident()
        self.pid = os.getpid()
        self.due: deque[Ending] = deque()  # their holders are gone, and most of them are over
        self.destroyed = self.failures = 0  # descriptors handed to the destroyer, and how often that raised
        self.is_closed = False  # the cache has ended: nobody will settle what is due, and whoever lets go last destroys
        self.is_final = False  # the interpreter exits: what is pinned goes too
        self.late: Callable[[bool], None] | None = None  # told of each that ends when the counts have been taken

    def settle(self) -> None:
        """End what another thread let go of, or whose finaliser was interrupted. Called by the thread that owns it."""
        with contextlib.suppress(IndexError):  # a destroyer may settle as well
            while self.due:
                self.due.popleft().end()

    def count(self, failed: bool) -> None:
        """Count a descriptor that was destroyed."""
        self.destroyed += 1
        self.failures += failed
        if self.late is not None:
            self.late(failed)


class Held:
    """A descriptor, destroyed under a guard when nobody holds this any more. The owner is that of the cache that it is for."""

    __slots__ = ("__weakref__", "ending")

    def __init__(self, value: Any, owner: Owner, guard: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext) -> None:
        # `append` is called even where an interrupt ends the finaliser before its first instruction: no Python comes between.
        ending = Ending(self, owner.due.append)
        ending.captured, ending.guard, ending.owner, ending.value, ending.once = False, guard, owner, value, iter((value,))
        _pending[id(ending)] = self.ending = ending

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Nothing that a destroyer needs may be left then; `close_all` has been called before.
        if not is_finalizing() and hasattr(self, "ending"):
            self.ending.end()


class Ending(weakref.ref[Held]):
    """What is left of a `Held` to be done when it is gone: it refers to the descriptor, and not to its holder."""

    __slots__ = ("captured", "guard", "once", "owner", "value")
    captured: bool
    guard: Callable[[], AbstractContextManager[Any]]
    once: Iterator[Any]
    owner: Owner
    value: Any

    @property
    def pinned(self) -> bool:
        """Whether the descriptor must stay, since a graph recorded a call of it. It may say so itself."""
        return self.captured or bool(getattr(self.value, "pinned", False))

    @property
    def may_run(self) -> bool:
        """Whether another thread may be running the descriptor. What a thread that has ended holds is no more than a traceback."""
        others = sys._current_frames().keys() - {threading.get_ident()}
        return self() is not None and self.owner.thread in others

    def end(self) -> None:
        """Destroy the descriptor, unless it stays pending: pinned, or for its own thread to end."""
        owner = self.owner
        if owner.pid != os.getpid():  # also in a fork of which Python was not told, as with a C library's
            _leak(_pending.pop(id(self), None))
        elif id(self) in _pending and (owner.is_final or not self.pinned) and (owner.is_closed or owner.thread == threading.get_ident()):
            list(self._destroying())

    def _destroying(self) -> Iterator[None]:
        """Hand the descriptor to its destroyer, under its guard, unless that was done. What this raises is logged.

        In a generator, whose frame forgets its caller: who keeps the traceback does not keep the caches and plans of callers.
        """
        value, failed = self.value, False
        try:
            with self.guard():
                yield from map(self.owner.destroyer, self.once)  # in C: no interrupt comes between taking it and handing it over
        except Exception:  # noqa: BLE001 - whatever a destroyer raises is reported, and must not keep the others from theirs
            _log.exception("destroying descriptor %r raised; what it holds may be lost, and the others are destroyed all the same", value)
            failed, self.once = True, iter(())  # it is not tried again, though the guard refused
        finally:
            if not length_hint(self.once) and _pending.pop(id(self), None) is not None:
                self.value = None
                self.owner.count(failed)


def _leak(value: object) -> None:
    """Hold an object until the process is gone: not even the interpreter's last clearing up deallocates it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _everything() -> list[Any]:
    return [thing for thing in (reference() for reference in list(_tracked.values())) if thing is not None]


def close_all() -> None:
    """Destroy what is left when the interpreter exits, except what another thread goes on running."""
    for thing in _everything():
        thing.finish()
    deadline = time.monotonic() + _GRACE_S
    for ending in list(_pending.values()):
        while ending.may_run and time.monotonic() < deadline:
            time.sleep(0.001)
        if not ending.may_run:
            ending.owner.is_closed = ending.owner.is_final = True
            ending.end()


def _abandon_all() -> None:
    _leak(list(_pending.values()))
    _pending.clear()
    for thing in _everything():
        thing.abandon()


atexit.register(close_all)
os.register_at_fork(after_in_child=_abandon_all)
