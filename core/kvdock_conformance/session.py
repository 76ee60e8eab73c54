"""A backend in a child, asked case by case: what to run on it, and a child whenever one is needed."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from kvdock.errors import BackendUnavailableError
from kvdock_conformance.child import COMMAND, Child, ChildEndedError
from kvdock_conformance.expected import Expected
from kvdock_conformance.patience import INTERRUPTED, Patience
from kvdock_conformance.requirement import Case, Level, Requirement, Requirements
from kvdock_conformance.turns import Turns, by_turns
from kvdock_conformance.verdict import CaseOutcome, Outcome, Verdict, outcome_of

__all__ = ["ConformancePlan", "Session"]

_START_S = 300.0
_DRAWING_S = 60.0
_SPOILT = "The device is of no more use to this process, and the next case gets a new one"
_FAILED_STARTS = 3  # so often in a row the backend is tried to be opened; more would only take time


@attrs.frozen
class ConformancePlan:
    """What to run.

    Args:
        backend: name of the backend, or of what else is tested.
        requirements: every requirement there is; those of other kinds are left out.
        level: the level.
        area: run only this area's requirements; None runs all.
        expected: expected failures by requirement.
        setup: ``"module:function"`` that the child calls before it looks for the backend; None for nothing.
        limit_s: time limit of a case in seconds in place of the requirements' own; None for those.
        environ: variables of the child's environment beside this process's own.
        command: how a child is started.
        kind: kind of what is tested: a name in `kvdock_conformance.kinds.KINDS`.
        device: on which of its devices, such as ``"acme:1"``; None for the first.
        start_s: how long Python, torch and the plugins may take to start, in seconds.
        workers: how many areas may run at once, each in a child of its own; on host memory: a device may let one process in only.
    """

    backend: str
    requirements: Requirements
    level: Level = Level.CORE
    area: str | None = None
    expected: Mapping[str, Expected] = attrs.field(factory=dict)
    setup: str | None = None
    limit_s: float | None = None
    environ: Mapping[str, str] = attrs.field(factory=dict)
    command: Sequence[str] = COMMAND
    kind: str = "backend"
    device: str | None = None
    start_s: float = _START_S
    workers: int = 1

    def selected(self) -> Requirements:
        """Return the requirements to run."""
        return self.requirements.of_kind(self.kind).select(self.level, self.area)

    def known(self) -> Requirements:
        """Return the requirements to run that are known before plugins are asked: all but those of their ops."""
        every = self.requirements.of_kind(self.kind)
        is_of_an_op = self.kind == "backend" and self.area not in (None, *every.areas)
        return Requirements() if is_of_an_op else every.select(self.level, self.area)

    def with_ops(self, requirements: Iterable[Requirement]) -> ConformancePlan:
        """Return the plan with the requirements of the ops that plugins bring."""
        return attrs.evolve(self, requirements=Requirements([*self.requirements, *requirements]))

    def left_out(self) -> list[str]:
        """Return the ids of the level's requirements that the choice of an area leaves out."""
        chosen = {item.id for item in self.selected()}
        return [item.id for item in self.requirements.of_kind(self.kind).select(self.level) if item.id not in chosen]


class Session:
    """A child that is there when it is needed: started at the first question, and anew after a crash or a hang.

    Args:
        plan: what to open, and how.
        beside: a session of the same run, in another thread: both wait for dead children together, and for cases that must be alone.
        first: its first child, where one was started as the plan says before there was one.
    """

    is_stopped = False

    def __init__(self, plan: ConformancePlan, beside: Session | None = None, first: Child | None = None) -> None:
        self._plan, self._first = plan, first
        self._child: Child | None = None
        self._fault: str | None = None
        self._failed_starts = 0
        self._patience: Patience = beside._patience if beside else Patience()
        self._turns: Turns = beside._turns if beside else Turns()
        # Faults are seeded one after the other into what a few requirements ask about, whose cases may take a second to draw.
        self._selected = functools.lru_cache(4)(lambda requirement, level: requirement.selected(level))
        self.sound: dict[str, int] = {}
        """By requirement, of how many cases from the first on it is known that none fails without a fault."""
        self.about: Mapping[str, Any] = {}
        """What the backend says of itself, once it has been opened."""

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def stop(self) -> None:
        """End the child, and run nothing more. Another thread may ask for it."""
        self.is_stopped, child = True, self._child
        if child is not None:
            child.kill()

    def open(self) -> None:
        """Start the child and load the backend in it, unless it is there.

        Raises:
            BackendUnavailableError: the backend is not ready; its ``got`` is the state, ``"unknown"`` if no plugin has it.
            ChildEndedError: loading it crashed or took too long.
        """
        if self._child is not None:
            return
        # Counted first, and set to 0 at the end: whatever raises in between has failed.
        self._failed_starts += 1
        plan, self._child, self._first = self._plan, self._first or Child(self._plan.command, self._plan.environ), None
        if self.is_stopped:  # meanwhile, when there was no child to end yet
            self._child.kill()
        wanted = {"kind": plan.kind, "name": plan.backend, "setup": plan.setup, "device": plan.device}
        answer = self._ask({"open": wanted}, plan.start_s)
        if "error" in answer:
            self.close()
            raise BackendUnavailableError(answer["error"], got=answer["state"])
        self.about = answer["about"]
        if self._fault is not None:
            self._ask({"fault": self._fault}, plan.start_s)
        self._failed_starts = 0

    def brought(self, reason: str = "") -> list[Requirement]:
        """Return the requirements of the ops that plugins bring; where nothing can be opened, for a reason, of the op that is wanted."""
        from kvdock_conformance.requirements.ops import of_op  # it needs torch

        if self._plan.kind != "backend":
            return []
        if reason:
            area = self._plan.area
            return [*of_op(area, {}, reason)] if area and area not in self._plan.requirements.areas else []
        self.open()
        return [each for name in self._ask({"ops": None}, self._plan.start_s)["ops"] for each in self._of_op(name)]

    def _of_op(self, name: str) -> list[Requirement]:
        """Return the requirements of one op, with the cases that the child draws."""
        from kvdock_conformance.requirements.ops import of_op  # it needs torch

        try:
            self.open()
            answer = self._ask({"ops": name}, _DRAWING_S)
        except ChildEndedError as error:
            answer = {"error": f"the process that draws its cases {error.how}"}
        return [*of_op(name, answer.get("cases", {}), answer.get("error", ""))]

    def seed(self, fault: str | None) -> str:
        """Seed a fault into the backend in place of the one before, and return why that cannot be done; None takes it out."""
        self.open()
        self._patience = Patience()  # a fault that crashes says nothing about the next
        self._fault = None  # so that a new child has it only if it could be seeded
        reason: str = self._ask({"fault": fault}, self._plan.start_s)["reason"]
        self._fault = None if reason else fault
        return reason

    def case(self, requirement: Requirement, case: Case) -> CaseOutcome:
        """Run one case.

        Raises:
            ChildEndedError: it crashed the child, or took too long.
            BackendUnavailableError: the backend cannot be opened.
        """
        self.open()
        limit = self._plan.limit_s or requirement.limit_s
        answer = self._ask({"case": {"requirement": requirement.id, "data": case.data}}, limit)
        verdict, failure = Verdict(answer["verdict"]), answer.get("failure", {})
        if "spoilt" in answer:  # whatever this child would say from here on, it would say of that error
            self.close()
            failure = {**failure, "details": f"{failure.get('details', '')}\n{_SPOILT}: {answer['spoilt']}".lstrip()}
        return CaseOutcome(case.name, verdict, case.data, failure or None, answer.get("reason", ""), answer["seconds"])

    def _ask(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Ask the child, and drop it if it is gone."""
        assert self._child is not None, "every caller opens the session first"  # noqa: S101 - for the type checker
        try:
            return self._child.ask(request, limit_s)
        except BaseException:
            self.close()
            raise

    def requirement(self, requirement: Requirement, level: Level, *, stop_at_failure: bool = False, last: str = "") -> Outcome:
        """Run a requirement's cases, each whatever came of those before.

        Args:
            requirement: the requirement.
            level: at which level.
            stop_at_failure: leave the cases behind the first failure, which are then not run.
            last: name of the case to end with; empty for all.
        """
        outcomes: list[CaseOutcome] = []
        for is_alone, cases in by_turns(requirement, _up_to(self._selected(requirement, level), last)):
            with self._turns.turn(alone=is_alone):
                for case in cases:
                    reason = INTERRUPTED if self.is_stopped else requirement.unready or self._patience.why_not(requirement)
                    if not reason and stop_at_failure and outcomes and outcomes[-1].verdict in (Verdict.FAILED, Verdict.NOT_RUN):
                        reason = "not run after a failure"
                    left = CaseOutcome(case.name, Verdict.NOT_RUN, case.data, reason=reason)
                    outcomes.append(left if reason else self._survived(requirement, case))
        self._patience.finish(requirement)
        return outcome_of(requirement, outcomes)

    def _survived(self, requirement: Requirement, case: Case) -> CaseOutcome:
        """Run one case; a crash or a hang is a failure, and a backend that cannot be opened again leaves it open."""
        if self._failed_starts >= _FAILED_STARTS:
            return CaseOutcome(case.name, Verdict.NOT_RUN, case.data, reason=f"the backend could not be opened {self._failed_starts} times")
        try:
            self.open()
        except (BackendUnavailableError, ChildEndedError) as error:
            return CaseOutcome(case.name, Verdict.NOT_RUN, case.data, reason=f"the backend could not be opened: {error}")
        begin, seconds = time.monotonic(), 0.0
        try:
            outcome = self.case(requirement, case)
        except ChildEndedError as error:
            failure = {"what": "the process that runs the case", "expected": "an answer", "got": error.how, "details": error.output}
            seconds = time.monotonic() - begin
            outcome = CaseOutcome(case.name, Verdict.FAILED, case.data, failure, seconds=seconds)
        # Gone, for which the case is to blame.
        self._patience.count(requirement, dead=outcome.verdict is Verdict.FAILED and self._child is None, seconds=seconds)
        return outcome


def _up_to(cases: Sequence[Case], last: str) -> Sequence[Case]:
    """Return the cases up to the one of a name, or all if none has it."""
    names = [case.name for case in cases]
    return cases[: names.index(last) + 1] if last in names else cases
