"""Proving the kit on a backend: each fault is seeded into it, and the requirements that should notice must fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kvdock.errors import BackendUnavailableError
from kvdock_conformance.child import ChildEndedError
from kvdock_conformance.faults.fault import Fault
from kvdock_conformance.patience import INTERRUPTED
from kvdock_conformance.requirement import Level, Requirement, Requirements
from kvdock_conformance.session import ConformancePlan, Session
from kvdock_conformance.verdict import Outcome, Verdict

__all__ = ["Proof", "faults_of", "prove", "prove_one", "requirements_of"]


@attrs.frozen
class Proof:
    """What came of one fault.

    Args:
        fault: the fault.
        killed_by: ids of the requirements that failed with it: others than its killers only where none of those did.
        reason: why it could not be seeded; empty when it was.
        always: ids of those that failed with it, and at the same cases without it: their failure proves nothing.
        refused: ids of the fault's killers that did not notice, and have cases that the backend refuses, as it may.
        lost: why nothing is known: seeding it crashed, or the run was interrupted; empty when it was seeded or could not be.
    """

    fault: Fault
    killed_by: tuple[str, ...]
    reason: str = ""
    always: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    lost: str = ""

    @property
    def missed(self) -> tuple[str, ...]:
        """Ids of the requirements that should have failed and did not."""
        return () if self.reason or self.lost else tuple(name for name in self.fault.killers if name not in (*self.killed_by, *self.always))

    @property
    def verdict(self) -> str:
        """In a word: ``killed``, ``survived``, ``missed`` by a requirement that should have noticed, or ``not seeded``.

        ``unclear`` where one that should notice fails without the fault too, or nothing is known. ``out of reach`` where one that
        should notice has cases that the backend refuses: it may be those that the fault shows in.
        """
        if self.lost:
            return "unclear"
        if self.reason:
            return "not seeded"
        if not self.missed and set(self.always).intersection(self.fault.killers):
            return "unclear"
        if self.missed and self.refused:
            return "out of reach"
        return "survived" if not self.killed_by else "missed" if self.missed else "killed"

    def as_dict(self) -> dict[str, Any]:
        """Return it as what JSON can hold."""
        return {
            "fault": self.fault.name,
            "sentence": self.fault.sentence,
            "area": self.fault.area,
            "verdict": self.verdict,
            "killers": list(self.fault.killers),
            "killed_by": list(self.killed_by),
            "missed": list(self.missed),
            "always": list(self.always),
            "refused": list(self.refused),
            "reason": self.reason or self.lost,
        }


def requirements_of(fault: Fault, requirements: Requirements) -> tuple[list[Requirement], list[Requirement]]:
    """Return what should notice a fault, its killers, and what else may: the other core requirements of its area.

    Raises:
        ArgumentValueError: a killer does not exist.
    """
    killers = [requirements[name] for name in fault.killers]
    return killers, [item for item in requirements if item.area == fault.area and item.level is Level.CORE and item not in killers]


def prove_one(session: Session, fault: Fault, requirements: Requirements) -> Proof:
    """Seed one fault, and run what should notice: it must fail with the fault, and must not at the same cases without it.

    What else may notice is run where nothing else did.

    Args:
        session: the backend.
        fault: the fault. It is taken out again.
        requirements: every requirement there is.
    """
    reason = session.seed(fault.name)
    if reason:
        return Proof(fault, (), reason)
    fault = attrs.evolve(fault, killers=fault.killers_where(must_raise=session.about.get("must_raise", True)))
    killers, others = requirements_of(fault, requirements)
    outcomes = [_outcome(session, item) for item in killers]
    if not any(outcome.verdict is Verdict.FAILED for outcome in outcomes):
        outcomes += [_outcome(session, item) for item in others]
    # Taken out before the failures are judged: what fails at the same case without the fault proves nothing.
    session.seed(None)
    failed = [outcome for outcome in outcomes if outcome.verdict is Verdict.FAILED]
    always = [outcome.requirement.id for outcome in failed if _fails_anyway(session, outcome)]
    return Proof(
        fault,
        killed_by=tuple(outcome.requirement.id for outcome in failed if outcome.requirement.id not in always),
        always=tuple(always),
        refused=tuple(outcome.requirement.id for outcome in outcomes if outcome.requirement.id in fault.killers and _is_refused(outcome)),
    )


def _fails_anyway(session: Session, outcome: Outcome) -> bool:
    """Whether a requirement fails at the same cases without a fault. What is known of them from another fault is not asked again."""
    requirement, first = outcome.requirement, outcome.failed[0]
    count = 1 + [case.name for case in outcome.cases].index(first.name)
    if session.sound.get(requirement.id, 0) < count:
        if _outcome(session, requirement, first.name).failed:
            return True
        session.sound[requirement.id] = count
    return False


def _is_refused(outcome: Outcome) -> bool:
    """Whether a requirement did not fail, and has cases that the backend refuses."""
    return outcome.verdict is not Verdict.FAILED and any(case.verdict is Verdict.UNSUPPORTED for case in outcome.cases)


def _outcome(session: Session, requirement: Requirement, last: str = "") -> Outcome:
    """Run one requirement up to its first failure, or to a case."""
    return session.requirement(requirement, requirement.level, stop_at_failure=True, last=last)


def prove(plan: ConformancePlan, faults: Mapping[str, Fault], listen: Callable[[Proof], None] = lambda proof: None) -> list[Proof]:
    """Seed each fault of the plan's area, or of all, into the backend. An interrupt (Ctrl-C) leaves the rest unclear.

    Args:
        plan: which backend, and which area; expected failures do not matter.
        faults: the faults by name.
        listen: called with each proof as it comes.
    """
    proofs, lost = [], ""
    with Session(plan) as session:
        for fault in faults_of(plan, faults):
            try:
                found = Proof(fault, (), lost=lost) if lost else _proof(session, fault, plan.requirements)
                listen(found)
            except KeyboardInterrupt:
                lost = INTERRUPTED
                found = Proof(fault, (), lost=lost)
            proofs.append(found)
    return proofs


def faults_of(plan: ConformancePlan, faults: Mapping[str, Fault]) -> list[Fault]:
    """Return the faults that a plan is about."""
    return [fault for fault in faults.values() if fault.kind == plan.kind and plan.area in (None, fault.area)]


def _proof(session: Session, fault: Fault, requirements: Requirements) -> Proof:
    """Prove one fault; where it cannot be put in or out, because that crashes or hangs, nothing is known."""
    try:
        return prove_one(session, fault, requirements)
    except ChildEndedError as error:
        return Proof(fault, (), lost=f"seeding it {error.how}")
    except BackendUnavailableError as error:
        return Proof(fault, (), lost=f"the backend could not be opened: {error.subject}")
