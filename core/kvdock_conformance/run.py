"""Running requirements on a backend: in a child, case by case, until every requirement is accounted for."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import attrs

from kvdock.errors import ArgumentValueError, BackendUnavailableError
from kvdock_conformance.child import Child, ChildEndedError
from kvdock_conformance.expected import apply
from kvdock_conformance.kinds import KINDS, UNKNOWN_DEVICE
from kvdock_conformance.patience import INTERRUPTED
from kvdock_conformance.requirement import Level, Requirement
from kvdock_conformance.session import ConformancePlan, Session
from kvdock_conformance.side_by_side import outcomes_of
from kvdock_conformance.verdict import CaseOutcome, Outcome, Verdict, counted

__all__ = ["EXIT_FAILED", "EXIT_GREEN", "EXIT_INCOMPLETE", "ConformanceRun", "not_begun", "run"]

EXIT_GREEN = 0
EXIT_FAILED = 1
EXIT_INCOMPLETE = 3


@attrs.frozen
class ConformanceRun:
    """What came of a run.

    Args:
        plan: what was to be run.
        about: what the backend says of itself; empty if it could not be opened.
        outcomes: what came of each requirement that was selected.
        started: when it began.
        seconds: how long it took.
        proofs: what came of each seeded fault, as `kvdock_conformance.prove.Proof.as_dict` tells it, if any was.
    """

    plan: ConformancePlan
    about: Mapping[str, Any]
    outcomes: Sequence[Outcome]
    started: datetime.datetime
    seconds: float
    proofs: Sequence[Mapping[str, Any]] = ()

    @property
    def missing(self) -> list[Outcome]:
        """The requirements that are not accounted for."""
        return [outcome for outcome in self.outcomes if outcome.verdict is Verdict.NOT_RUN]

    @property
    def failed(self) -> list[Outcome]:
        """The requirements that failed."""
        return [outcome for outcome in self.outcomes if outcome.verdict is Verdict.FAILED]

    @property
    def given_up(self) -> list[Outcome]:
        """The requirements that failed by crashes or hangs, so often that the rest of their cases was not run."""
        return [outcome for outcome in self.outcomes if outcome.given_up]

    @property
    def exit_code(self) -> int:
        """0 when all are accounted for and none failed; 1 when one failed; 3 when one was not run, and none failed.

        3 also when one was given up: what else is wrong with the backend is not known.

        A fault that survived, or was missed by a requirement that should have noticed, is a failure too. One that is unclear,
        because a requirement that should notice fails without it as well, counts as not run.
        """
        if self.given_up:
            return EXIT_INCOMPLETE
        proven = {proof["verdict"] for proof in self.proofs}
        if self.failed or proven & {"survived", "missed"}:
            return EXIT_FAILED
        complete = not self.missing and bool(self.outcomes) and "unclear" not in proven
        return EXIT_GREEN if complete else EXIT_INCOMPLETE

    def counts(self) -> dict[str, int]:
        """Return how many requirements have each verdict, without those that none has."""
        return counted(outcome.verdict for outcome in self.outcomes)


def run(
    plan: ConformancePlan, listen: Callable[[Outcome], None] = lambda outcome: None, children: Sequence[Child | None] = ()
) -> ConformanceRun:
    """Run a plan to its end. An interrupt (Ctrl-C) ends it early, with the rest not run.

    Args:
        plan: what to run.
        listen: called with each outcome as it comes, before expected failures are taken into account. With several workers, those of an
            area come in their order; the run has all in the order of the plan.
        children: one for each worker, where they were started as the plan says before there was one: they start while it is made. Whoever
            started them ends them.

    Raises:
        ArgumentValueError: no plugin has the backend, it has no such device, or there is no such area.
    """
    started = datetime.datetime.now(datetime.UTC)
    found: dict[str, Outcome] = {}
    first, *more = children or [None] * plan.workers
    with ExitStack() as stack:
        session = stack.enter_context(Session(plan, first=first))
        try:
            reason = _why_not_open(session, plan)
            plan = plan.with_ops(session.brought(reason))
            wanted, is_host = [*plan.selected()], session.about.get("device") == "cpu"
            others = [stack.enter_context(Session(plan, session, child)) for child in (more if is_host else ())]
            told = outcomes_of([session, *others], wanted, plan.level)
            for outcome in (_not_run(item, plan.level, reason) for item in wanted) if reason else stack.enter_context(closing(told)):
                listen(outcome)
                found[outcome.requirement.id] = outcome
        except KeyboardInterrupt:
            stack.close()
            reason, wanted = INTERRUPTED, [*plan.selected()]
        outcomes = [found[item.id] if item.id in found else _not_run(item, plan.level, reason) for item in wanted]
        seconds = (datetime.datetime.now(datetime.UTC) - started).total_seconds()
        return ConformanceRun(plan, session.about, apply(outcomes, plan.expected, started.date()), started, seconds)


def not_begun(plan: ConformancePlan) -> ConformanceRun:
    """Return what comes of a plan that was interrupted before it was run."""
    outcomes = [_not_run(item, plan.level, INTERRUPTED) for item in plan.selected()]
    return ConformanceRun(plan, {}, outcomes, datetime.datetime.now(datetime.UTC), 0.0)


def _why_not_open(session: Session, plan: ConformancePlan) -> str:
    """Open the backend, and return why it cannot be tested; empty when it can."""
    try:
        session.open()
    except BackendUnavailableError as error:
        if error.got == "unknown":
            raise ArgumentValueError(plan.kind, expected=KINDS[plan.kind].names, got=repr(plan.backend)) from error
        if error.got == UNKNOWN_DEVICE:
            raise ArgumentValueError("device", expected=error.subject, got=repr(plan.device)) from error
        return error.subject
    except ChildEndedError as error:
        return f"loading the backend {error.how}\n{error.output}".rstrip()
    return ""


def _not_run(requirement: Requirement, level: Level, reason: str) -> Outcome:
    cases = [CaseOutcome(case.name, Verdict.NOT_RUN, case.data, reason=reason) for case in requirement.selected(level)]
    return Outcome(requirement, Verdict.NOT_RUN, cases, reason)
