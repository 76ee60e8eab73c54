"""How many dead children a run waits for: a backend that crashes or hangs in every case is told in minutes, not in an hour."""

from __future__ import annotations

from collections import Counter

from kvdock_conformance.requirement import Requirement

__all__ = ["INTERRUPTED", "Patience"]

INTERRUPTED = "interrupted"
"""Why the rest of a run is not run, behind Ctrl-C."""

_IN_A_REQUIREMENT = 3  # dead children of one requirement: more would only take time
_SILENT = 3  # so many requirements of an area in a row without an answer to any case, and the area is left
_IN_ALL_S = 600.0  # what the cases of dead children may take together


class Patience:
    """Counts dead children: crashes, time-outs, and devices that are of no more use. Sessions that share a run share it."""

    def __init__(self) -> None:
        self._dead: Counter[str] = Counter()
        self._answered: set[str] = set()
        self._silent: Counter[str] = Counter()
        self._lost_s = 0.0

    def why_not(self, requirement: Requirement) -> str:
        """Return why the next case of a requirement is not run; empty when it is."""
        silent, dead = self._silent[requirement.area], self._dead[requirement.id]
        if self._lost_s >= _IN_ALL_S:
            return f"not run after {self._lost_s:.0f} s of cases that crashed or hung"
        if silent >= _SILENT:
            return f"not run after {silent} requirements of its area in a row that crashed or hung in every case"
        # Behind a requirement without any answer, one dead child is enough to know.
        if dead >= (1 if silent and requirement.id not in self._answered else _IN_A_REQUIREMENT):
            return f"not run after {dead} crashes, time-outs or spoilt devices"
        return ""

    def count(self, requirement: Requirement, *, dead: bool, seconds: float) -> None:
        """Take note of a case that was run, and of how long it kept the run waiting."""
        if dead:
            self._dead[requirement.id] += 1
            self._lost_s += seconds
        else:
            self._answered.add(requirement.id)

    def finish(self, requirement: Requirement) -> None:
        """Take note of the end of a requirement."""
        if requirement.id in self._answered:
            self._silent[requirement.area] = 0
        elif self._dead[requirement.id]:
            self._silent[requirement.area] += 1
        self._dead[requirement.id] = 0
        self._answered.discard(requirement.id)
