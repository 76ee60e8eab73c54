"""One thread at a time, and no copies."""

from __future__ import annotations

import threading
from threading import get_ident
from typing import Any, NoReturn

from kvdock.errors import UnsupportedError, WrongThreadError

__all__ = ["NotCopied", "OneThread"]


class NotCopied:
    """Base of what names blocks of a pool, which exist once: a copy would own them a second time.

    `copy.copy`, `copy.deepcopy` and `pickle` raise `UnsupportedError`, which says what to do instead.
    """

    __slots__ = ()

    instead_of_copies = "make a new one over a pool of its own, and let it compute what it needs"
    """What to do instead, for the error."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse; `copy` and `pickle` all come here."""
        raise UnsupportedError(
            type(self).__name__,
            expected="to stay the only one that names its blocks",
            got="a request to copy or pickle it",
            fix=self.instead_of_copies,
        )


class OneThread:
    """Base of what belongs to the thread that uses it first, until that one calls `hand_over` or ends."""

    _thread: int | None = None  # a number, which is compared in half the time of a Thread

    def _enter(self) -> None:
        """Notice another thread; called first by every method, and cheap."""
        if get_ident() != self._thread:
            self._claim()

    def _claim(self) -> None:
        """Belong to the calling thread, unless another has it."""
        self._check_thread()
        self._thread = get_ident()

    def _check_thread(self) -> None:
        """Raise if another thread has it: one that runs, and has the number of the last user. Claims nothing."""
        if self._thread is None or self._thread == get_ident():
            return
        # A thread that has ended is not listed, so that what it used can be claimed. One that is just starting is, without a number.
        owner = next((thread for thread in threading.enumerate() if thread.ident == self._thread), None)
        if owner is not None:
            raise WrongThreadError(
                type(self).__name__,
                expected=f"calls from thread {owner.name!r} only",
                got=f"one from {threading.current_thread().name!r}",
                fix="let the owner call hand_over() between calls, or give each thread its own",
            )

    def hand_over(self) -> None:
        """Belong to the thread that calls next. Raises `WrongThreadError` in another thread than the owner."""
        self._enter()
        self._thread = None
