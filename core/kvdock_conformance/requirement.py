"""What a requirement is: a stable id, one normative sentence, its cases as data, and its check.

A new requirement is one more entry in the list of its area in `kvdock_conformance.requirements`; nothing else changes.
"""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from kvdock.errors import ArgumentValueError

__all__ = ["Capability", "Case", "Check", "Extended", "Level", "Requirement", "Requirements", "at_level", "cases_at"]

Check = Callable[[Any, Mapping[str, Any]], None]
"""Checks one case: takes the target, of the class that its kind has (see `kvdock_conformance.kinds`), and the case's data, and
raises if it does not conform."""

_ID = re.compile(r"KVD-[A-Z]+-\d{3}(@\w+)?")
_LIMIT_S = 60.0


class Level(enum.Enum):
    """How much is asked of a backend. The extended level contains the core level."""

    CORE = "core"
    EXTENDED = "extended"

    def includes(self, other: Level) -> bool:
        """Whether a run at this level runs what belongs to another."""
        return self is Level.EXTENDED or other is Level.CORE


@attrs.frozen
class Case:
    """One input to check a requirement with.

    Args:
        name: what is special about it, unique within its requirement: ``"hnd pool"``.
        data: all that the check needs to know, as what JSON can hold. It travels to the child that runs the case, into the
            report and into ``repro.py``.
        level: at which level it runs, if its requirement does.
        alone: whether no other case may run meanwhile: it measures time, or needs every processor.
    """

    name: str
    data: Mapping[str, Any]
    level: Level = Level.CORE
    alone: bool = False


@attrs.frozen
class Extended:
    """Cases of the extended level, drawn where it is asked: drawing them takes longer than running the core level's.

    Args:
        cases: returns them.
    """

    cases: Callable[[], Iterable[Case]]


def at_level(level: Level, cases: Callable[[], Iterable[Case]]) -> Iterator[Case | Extended]:
    """Yield cases that are all of one level, those of the extended one to be drawn later."""
    if level is Level.EXTENDED:
        yield Extended(cases)
    else:
        yield from cases()


def cases_at(level: Level, parts: Iterable[Case | Extended]) -> list[Case]:
    """Return those cases that run at a level, and draw no others that need not be drawn."""
    found: list[Case] = []
    for part in parts:
        found += [part] if isinstance(part, Case) else part.cases() if level is Level.EXTENDED else ()
    return [case for case in found if level.includes(case.level)]


def _check_source(owner: Any, attribute: Any, value: Callable[..., Any]) -> None:
    """Refuse a function whose source cannot be found by its name: a lambda, a method, a function inside another."""
    name = getattr(value, "__qualname__", "")
    if not name.isidentifier():
        raise ArgumentValueError(
            f"{type(owner).__name__}: {attribute.name}",
            expected="a function of a module",
            got=name or repr(value),
            fix="write it with def at the top of a module, so that its source can go into repro.py",
        )


@attrs.frozen
class Capability:
    """Something that a backend may or may not claim. Claimed: the requirement's check runs. Not claimed: ``refused`` does.

    Args:
        name: for reports: ``"serves paged_caching_"``.
        reasons: given target and case data, returns what the backend says against it; empty when it claims it.
        refused: given the same, the reasons and the requirement's check, raises unless the refusal is a good one: it says why,
            what it refuses is refused when asked for all the same, and memory stays as it was.

    Both are functions of a module, as the check is: their source goes into ``repro.py``.
    """

    name: str
    reasons: Callable[[Any, Mapping[str, Any]], Sequence[str]] = attrs.field(validator=_check_source)
    refused: Callable[[Any, Mapping[str, Any], Sequence[str], Check], None] = attrs.field(validator=_check_source)


def _check_id(requirement: Requirement, attribute: Any, value: str) -> None:
    if not _ID.fullmatch(value):
        raise ArgumentValueError("Requirement: id", expected="KVD-<AREA>-<three digits>", got=repr(value), fix="such as KVD-WRITE-007")


def _check_sentence(requirement: Requirement, attribute: Any, value: str) -> None:
    if not value[:1].isupper() or not value.endswith(".") or ". " in value:
        raise ArgumentValueError(f"{requirement.id}: sentence", expected="one sentence", got=repr(value), fix="say what must be so, once")


@attrs.frozen
class Requirement:
    """One thing that every backend must do.

    Args:
        id: its name for good: ``"KVD-WRITE-007"``. Never given to another requirement, never renumbered.
        sentence: what must be so, in one sentence.
        area: what it belongs to; the op's name where it is about one op. ``--op`` selects by it.
        check: checks one case. Its source goes into ``repro.py``: see `kvdock_conformance.reports.repro`.
        cases: returns its cases, at least one; a function, so that those nobody runs cost nothing.
        level: at which level it runs.
        needs: what the backend must claim for the check to be made, case by case; None when there is no way around it.
        limit_s: how long one case may take in seconds. The child that exceeds it is ended, and the case has failed.
        kind: what it is asked of: a name in `kvdock_conformance.kinds.KINDS`.
        hardware: what a machine must have, beside a host, for the check to be made on any backend at all: ``"two devices"``.
            Elsewhere only the refusal can be verified. Empty where the host will do.
        unready: why none of its cases can be run, which leaves it open; empty when they can.
        alone: whether all its cases must be alone: see `Case`.
    """

    id: str = attrs.field(validator=_check_id)
    sentence: str = attrs.field(validator=_check_sentence)
    area: str
    check: Check = attrs.field(validator=_check_source)
    cases: Callable[[], Iterable[Case | Extended]]
    level: Level = Level.CORE
    needs: Capability | None = None
    limit_s: float = _LIMIT_S
    kind: str = "backend"
    hardware: str = ""
    unready: str = ""
    alone: bool = False

    def selected(self, level: Level) -> list[Case]:
        """Return the cases that run at a level.

        Raises:
            ArgumentValueError: there is none, or two have one name.
        """
        cases = cases_at(level, self.cases())
        named = Counter(case.name for case in cases)
        twice = sorted(name for name, count in named.items() if count > 1)
        if not cases or twice:
            got = f"{', '.join(map(repr, twice))} more than once" if twice else "none"
            raise ArgumentValueError(f"{self.id}: cases", expected="at least one, each with a name of its own", got=got)
        return cases


class Requirements:
    """A list of requirements by id. Refuses an id that is taken.

    Args:
        requirements: in the order in which they run.
    """

    def __init__(self, requirements: Iterable[Requirement] = ()) -> None:
        self._by_id: dict[str, Requirement] = {}
        for requirement in requirements:
            self.add(requirement)

    def add(self, requirement: Requirement) -> None:
        """Add one more.

        Raises:
            ArgumentValueError: the id is taken.
        """
        other = self._by_id.setdefault(requirement.id, requirement)
        if other is not requirement:
            raise ArgumentValueError(
                f"requirement {requirement.id}",
                expected="an id that no other requirement has",
                got=f"that of {other.sentence!r}",
                fix="take the next free number of the area; a number is never given twice",
            )

    def __iter__(self) -> Iterator[Requirement]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, requirement_id: str) -> Requirement:
        """Return one by its id.

        Raises:
            ArgumentValueError: there is none; lists the area's.
        """
        if requirement_id not in self._by_id:
            like = [known for known in self._by_id if known.rpartition("-")[0] == requirement_id.rpartition("-")[0]]
            known = ", ".join(like or self._by_id)
            raise ArgumentValueError("requirement", expected=f"one of {known}", got=repr(requirement_id))
        return self._by_id[requirement_id]

    @property
    def areas(self) -> list[str]:
        """The areas, in order."""
        return list(dict.fromkeys(requirement.area for requirement in self))

    def of_kind(self, kind: str) -> Requirements:
        """Return those that are asked of one kind of thing; see `kvdock_conformance.kinds`."""
        return Requirements(item for item in self if item.kind == kind)

    def select(self, level: Level, area: str | None = None) -> Requirements:
        """Return those of a level, and of one area if it is given.

        Raises:
            ArgumentValueError: there is no such area; lists those there are.
        """
        if area is not None and area not in self.areas:
            raise ArgumentValueError("op", expected=f"one of {', '.join(self.areas)}", got=repr(area))
        return Requirements(item for item in self if level.includes(item.level) and area in (None, item.area))
