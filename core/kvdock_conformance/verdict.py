"""What came of each case and of each requirement, as plain data."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from kvdock_conformance.requirement import Requirement

__all__ = ["CaseOutcome", "Outcome", "Verdict", "counted", "outcome_of"]


class Verdict(enum.Enum):
    """What a run says about a requirement, or about one of its cases."""

    PASSED = "passed"
    """Checked, and so."""

    FAILED = "failed"
    """Not so; or an expected failure that passed or has expired."""

    UNSUPPORTED = "unsupported"
    """Not claimed, and the refusal was verified: it says why, raises or is served by the portable kernels, and spoils nothing."""

    EXPECTED_FAILURE = "expected failure"
    """Not so, as the file of expected failures says, which has not expired."""

    NOT_RUN = "not run"
    """Not known: a run with one of these is not complete."""

    @property
    def is_green(self) -> bool:
        """Whether it stands in nobody's way."""
        return self in (Verdict.PASSED, Verdict.UNSUPPORTED, Verdict.EXPECTED_FAILURE)


@attrs.frozen
class CaseOutcome:
    """What came of one case.

    Args:
        name: name of the case.
        verdict: the verdict; never an expected failure, which is said of requirements.
        data: the case's data.
        failure: if it failed, ``what``, ``expected``, ``got`` as text, and where there is more to show ``details``.
        reason: why it is unsupported or was not run.
        seconds: what it took.
    """

    name: str
    verdict: Verdict
    data: Mapping[str, Any]
    failure: Mapping[str, str] | None = None
    reason: str = ""
    seconds: float = 0.0


@attrs.frozen
class Outcome:
    """What came of one requirement.

    Args:
        requirement: the requirement.
        verdict: the verdict.
        cases: what came of each of its cases.
        reason: what else there is to say, such as why a failure was expected.
    """

    requirement: Requirement
    verdict: Verdict
    cases: Sequence[CaseOutcome]
    reason: str = ""

    @property
    def failed(self) -> list[CaseOutcome]:
        """The cases that failed."""
        return [case for case in self.cases if case.verdict is Verdict.FAILED]

    @property
    def given_up(self) -> bool:
        """Whether it failed, and some of its cases were not run."""
        return self.verdict is Verdict.FAILED and any(case.verdict is Verdict.NOT_RUN for case in self.cases)

    @property
    def seconds(self) -> float:
        """What its cases took together."""
        return sum(case.seconds for case in self.cases)


def counted(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """Return how often each verdict occurs, in the order of `Verdict`, without those that do not occur."""
    every = list(verdicts)
    return {verdict.value: every.count(verdict) for verdict in Verdict if verdict in every}


def outcome_of(requirement: Requirement, cases: Sequence[CaseOutcome]) -> Outcome:
    """Sum up a requirement's cases: one failure fails it, one case not run leaves it open, all unsupported make it unsupported."""
    verdicts = {case.verdict for case in cases}
    # Worst first: a case that passed does not make up for one that failed or was not run.
    for verdict in (Verdict.FAILED, Verdict.NOT_RUN, Verdict.PASSED, Verdict.UNSUPPORTED):
        if verdict in verdicts:
            return Outcome(requirement, verdict, cases, _reason(verdict, cases))
    return Outcome(requirement, Verdict.NOT_RUN, cases, "it has no cases")


def _reason(verdict: Verdict, cases: Sequence[CaseOutcome]) -> str:
    """Return the distinct reasons of the cases with the requirement's own verdict, or of those that were unsupported beside others.

    Of a failure, how many cases were not run, and why.
    """
    shown = {Verdict.PASSED: Verdict.UNSUPPORTED, Verdict.FAILED: Verdict.NOT_RUN}.get(verdict, verdict)
    of_all = [case.reason for case in cases if case.verdict is shown and case.reason]
    reasons = list(dict.fromkeys(of_all))
    text = "; ".join(reasons[:3]) + (f"; and {len(reasons) - 3} more" if len(reasons) > 3 else "")
    return f"{len(of_all)} of its {len(cases)} cases: {text}" if of_all and verdict is Verdict.FAILED else text
