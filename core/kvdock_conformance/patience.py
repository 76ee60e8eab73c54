"""How many dead children a run waits for: a backend that crashes or hangs in every case is told in minutes, not in an hour."""

from __future__ import annotations

from collections import Counter

from kvdock_conformance.requirement import Requirement

__all__ = ["Patience"]

_IN_A_REQUIREMENT = 3  # dead children of one requirement: more would only take time
_SILENT = 3  # so many requirements of an area in a row without an answer to any case, and the area is left
_IN_ALL_S = 600.0  # what the cases of dead children may take together


class Patience:
    """Counts dead children: crashes, time-outs, and devices that are of no more use."""

    def __init__(self) -> None:
        self._dead = 0
        self._answered = False
        self._silent: Counter[str] = Counter()
        self._lost_s = 0.0

    def why_not(self, requirement: Requirement) -> str:
        """Return why the next case of a requirement is not run; empty when it is."""
        silent = self._silent[requirement.area]
        if self._lost_s >= _IN_ALL_S:
            return f"not run after {self._lost_s:.0f} s of cases that crashed or hung"
        if silent >= _SILENT:
            return f"not run after {silent} requirements of its area in a row that crashed or hung in every case"
        # Behind a requirement without any answer, one dead child is enough to know.
        if self._dead >= (1 if silent and not self._answered else _IN_A_REQUIREMENT):
            return f"not run after {self._dead} crashes, time-outs or spoilt devices"
        return ""

    def count(self, *, dead: bool, seconds: float) -> None:
        """Take note of a case that was run, and of how long it kept the run waiting."""
        self._dead += dead
        self._answered |= not dead
        self._lost_s += seconds * dead

    def finish(self, requirement: Requirement) -> None:
        """Take note of the end of a requirement."""
        if self._answered:
            self._silent[requirement.area] = 0
        elif self._dead:
            self._silent[requirement.area] += 1
        self._dead, self._answered = 0, False
