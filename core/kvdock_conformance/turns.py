"""Which cases of a run may run at once."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence

from kvdock_conformance.requirement import Case, Requirement

__all__ = ["Turns", "by_turns"]


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


def by_turns(requirement: Requirement, cases: Sequence[Case]) -> Iterator[tuple[bool, list[Case]]]:
    """Yield the cases of each turn, and whether it is alone: those in a row that must be alone share one, since others wait for each."""
    for is_alone, run in itertools.groupby(cases, lambda case: requirement.alone or case.alone):
        together = [*run]
        yield from [(True, together)] if is_alone else ((False, [case]) for case in together)
