"""How descriptors end: with their thread, with the interpreter, or never.

A descriptor is destroyed once, by the thread it belongs to. Three cases need more than that:

* **The interpreter exits.** `close_all` takes what is left out of every cache, whoever owns it. A thread that still runs (a
  daemon) may be in the middle of a call then: it gets a moment to end the call, or else keeps its descriptor.
* **A process forks.** The handles that a child inherits mean nothing there. It forgets them, and even what their
  deallocation would do must not happen: `leak` holds them until the process is gone.
* **A graph was captured.** It launches what its descriptors hold whenever it is replayed, from any thread: `keep` holds
  them until the interpreter exits, though their cache or their thread ends.

Nothing here takes a lock: a child could inherit it locked, and finalizers run in the middle of anything.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["GRACE_S", "Ending", "close_all", "destroy", "keep", "leak", "track"]

_log = logging.getLogger("kvdock.descriptors")

GRACE_S = 1.0
"""How long calls of other threads are waited for, all together, when the interpreter exits."""


class Ending(Protocol):
    """What hears of the end of the interpreter and of a fork."""

    def finish(self, deadline: float) -> None:
        """Destroy what is left, as the interpreter exits; wait for running calls until `time.monotonic` says ``deadline``."""
        ...

    def abandon(self) -> None:
        """Forget what a forked child inherited, without destroying it."""
        ...


_tracked: dict[int, weakref.ReferenceType[Ending]] = {}
_kept: list[tuple[Any, Callable[[Any], None] | None]] = []


def track(thing: Ending) -> None:
    """Let an object know when the interpreter exits or the process has forked. It is not kept alive."""
    key, forget = id(thing), _tracked.pop  # bound here: the last objects die after this module's names
    _tracked[key] = weakref.ref(thing, lambda _: forget(key, None))


def destroy(value: Any, destroyer: Callable[[Any], None] | None) -> bool:
    """Hand a descriptor to its destroyer. Returns whether that went well; if not, says so in the log."""
    if destroyer is None:
        return True
    try:
        destroyer(value)
    except Exception:  # noqa: BLE001 - whatever a destroyer raises is reported, and must not keep the others from theirs
        _log.exception("destroying descriptor %r raised; what it holds may be lost, and the others are destroyed all the same", value)
        return False
    return True


def keep(value: Any, destroyer: Callable[[Any], None] | None) -> None:
    """Hold a descriptor that a graph may launch until the interpreter exits, and destroy it then."""
    _kept.append((value, destroyer))


def leak(value: object) -> None:
    """Hold an object until the process is gone: not even the interpreter's last clearing up deallocates it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _everything() -> list[Ending]:
    """Return what is tracked and still there."""
    return [thing for thing in (reference() for reference in list(_tracked.values())) if thing is not None]


def close_all() -> None:
    """Destroy what is left when the interpreter exits."""
    deadline = time.monotonic() + GRACE_S
    for thing in _everything():
        thing.finish(deadline)
    while _kept:
        destroy(*_kept.pop())


def _abandon_all() -> None:
    """Forget what the parent process prepared."""
    for thing in _everything():
        thing.abandon()
    leak(list(_kept))
    _kept.clear()


atexit.register(close_all)
os.register_at_fork(after_in_child=_abandon_all)
