"""One thread at a time."""

from __future__ import annotations

import threading

from kvdock.errors import WrongThreadError

__all__ = ["OneThread"]


class OneThread:
    """Base of what belongs to the thread that uses it first, until that one calls `hand_over` or ends."""

    _owner: threading.Thread | None = None

    def _enter(self) -> None:
        """Notice another thread; called first by every method, and cheap."""
        if threading.current_thread() is not self._owner:
            self._claim()

    def _claim(self) -> None:
        """Belong to the calling thread, unless another has it."""
        owner, here = self._owner, threading.current_thread()
        if owner is not None and owner.is_alive():
            raise WrongThreadError(
                type(self).__name__,
                expected=f"calls from thread {owner.name!r} only",
                got=f"one from {here.name!r}",
                fix="let the owner call hand_over() between calls, or give each thread its own",
            )
        self._owner = here

    def hand_over(self) -> None:
        """Belong to the thread that calls next. Raises `WrongThreadError` in another thread than the owner."""
        self._enter()
        self._owner = None
