"""A lock around the loading of plugins that reports a deadlock instead of having one, and that a forked child can use."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvdock.errors import DiscoveryReentryError, PluginError

__all__ = ["Gate"]


class Gate:
    """Held by one thread at a time. While plugins are loaded, the same thread may not come in again.

    Args:
        wait_s: how long another thread waits, in seconds, before it raises.
        after_fork: called in a forked child, once the gate is usable there.
    """

    def __init__(self, wait_s: float, after_fork: Callable[[], None]) -> None:
        self._wait_s = wait_s
        self._after_fork = after_fork
        self._open()
        _GATES.add(self)

    def _open(self) -> None:
        self._lock = threading.RLock()
        self._step = ""

    def reopen(self) -> None:
        """Forget who holds it: in a forked child that thread does not exist."""
        self._open()
        self._after_fork()

    def watch(self, step: str, subject: str) -> None:
        """Note which step of loading is being taken, for the messages."""
        self._step = f"{step} of {subject}"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock.

        Raises:
            PluginError: another thread has been loading plugins for too long.
            DiscoveryReentryError: this very thread is loading plugins, further up.
        """
        lock = self._lock  # kept, as a plugin may fork while it is loaded: the child resets, and unwinds through here too
        if not lock.acquire(timeout=self._wait_s):
            raise PluginError(
                f"another thread has been loading plugins for {self._wait_s:g} s; it is at: {self._step or 'start'}",
                fix="`kvdock doctor` shows the plugin that hangs; KVDOCK_BACKENDS_DENY=<name> leaves it out",
            )
        try:
            if self._step:
                raise DiscoveryReentryError(
                    f"backends were asked for while they are being loaded ({self._step})",
                    fix="a plugin must not call ops, create caches or ask for backends when it is imported or in its hooks",
                )
            yield
        finally:
            lock.release()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Mark that plugins are being loaded, so that `held` refuses to come in again. Hold the lock first."""
        self._step = "start"
        try:
            yield
        finally:
            self._step = ""


_GATES: weakref.WeakSet[Gate] = weakref.WeakSet()
"""All gates of this process; only fork needs them, and the hook it offers cannot be taken back for a single one."""


def _after_fork() -> None:
    for gate in _GATES:
        gate.reopen()


os.register_at_fork(after_in_child=_after_fork)
