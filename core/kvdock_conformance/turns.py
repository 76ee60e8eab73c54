"""Which cases of a run may run at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["Turns"]


class Turns:
    """Lets cases run at once, but for those that must be alone, which come first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running, self._waiting, self._is_alone = 0, 0, False

    @contextlib.contextmanager
    def turn(self, *, alone: bool) -> Iterator[None]:
        """Wait until a case may run, and hold off for a block what may not run beside it."""
        with self._changed:
            self._waiting += alone
            self._changed.wait_for(lambda: not self._is_alone and not (self._running if alone else self._waiting))
            self._waiting -= alone
            self._running, self._is_alone = self._running + 1, alone
        try:
            yield
        finally:
            with self._changed:
                self._running, self._is_alone = self._running - 1, False
                self._changed.notify_all()
