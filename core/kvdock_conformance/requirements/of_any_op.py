"""What a requirement of any op is: a sentence, a check, and the cases that an op's schema makes for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs

from kvdock_conformance.cases.any_op import Drawable
from kvdock_conformance.checking import any_op
from kvdock_conformance.requirement import Capability, Case, Check, Extended, Level, Requirement

__all__ = ["OpRequirement"]

_UNREADY = (Case("no case could be drawn", {}),)


@attrs.frozen
class OpRequirement:
    """One thing that must be so for every op that a plugin brings.

    Args:
        id: its name for good.
        sentence: what must be so, in one sentence.
        check: checks one case.
        cases: returns its cases for an op; none where the op has nothing that it is about.
        needs: what it takes.
        by_area: whether areas of their own ask it of the ops of `kvdock_conformance.cases.every_op`.
        limit_s: how long one case may take in seconds.
        level: at which level it is asked.
    """

    id: str
    sentence: str
    check: Check
    cases: Callable[[Drawable], Iterable[Case | Extended]]
    needs: Capability = any_op.BY_ANYBODY
    by_area: bool = False
    limit_s: float = 60.0
    level: Level = Level.CORE

    def of(self, op: str, cases: Sequence[Case] = _UNREADY, unready: str = "") -> Requirement:
        """Return it as a requirement of one op, with cases; or with why there are none, which leaves it open."""
        made = Requirement(f"{self.id}@{op}", self.sentence, op, self.check, lambda: cases, self.level, self.needs, limit_s=self.limit_s)
        return attrs.evolve(made, unready=unready)
