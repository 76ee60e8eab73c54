"""Random calls on and on, until the time is up or one fails: then the smallest one like it that Hypothesis finds."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs

from kvdock.errors import ArgumentValueError, KVDockError
from kvdock_conformance.cases.random_calls import FUZZABLE, described, random_case
from kvdock_conformance.patience import INTERRUPTED
from kvdock_conformance.requirement import Case, Level, Requirement
from kvdock_conformance.session import ConformancePlan, Session
from kvdock_conformance.verdict import CaseOutcome, Outcome, Verdict, outcome_of

__all__ = ["FUZZED", "check_fuzz", "fuzz", "with_fuzz"]

FUZZED = "KVD-FUZZ-001"
"""The requirement whose cases are drawn."""

_T = TypeVar("_T")
_BATCH = 100
_SHRINKING_S = 120.0


def check_fuzz(plan: ConformancePlan, minutes: float) -> None:
    """Refuse what cannot be fuzzed, before a run that may be long.

    Raises:
        ArgumentValueError: Hypothesis is not installed, the plan is about something else than a backend's ops, or no time is given.
    """
    if minutes <= 0:
        raise ArgumentValueError("fuzz", expected="more than 0 minutes", got=minutes)
    if plan.kind != "backend" or plan.area not in (None, *FUZZABLE):
        got = f"--op {plan.area}" if plan.kind == "backend" else f"--{plan.kind}"
        raise ArgumentValueError("fuzz", expected=f"a backend, and if any --op one of {', '.join(FUZZABLE)}", got=got)
    try:
        import hypothesis  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise ArgumentValueError(
            "fuzz", expected="Hypothesis to be installed", got="no module of that name", fix="pip install hypothesis"
        ) from error


@attrs.define
class _Search:
    """Cases that are drawn and run.

    Args:
        session: runs them.
        requirement: checks them.
        ops: what to draw from.
        end: when to stop drawing, by `time.monotonic`.
    """

    session: Session
    requirement: Requirement
    ops: Sequence[str]
    end: float
    count: int = 0
    failed: CaseOutcome | None = None
    lost: CaseOutcome | None = None
    known: dict[str, CaseOutcome] = attrs.field(factory=dict)

    def fails(self, draw: Callable[..., Any]) -> bool:
        """Draw a case and run it; whether it failed."""
        data = random_case(_Drawn(draw), self.ops)
        key = json.dumps(data)
        if key in self.known:  # Hypothesis comes back to what it found, also when the time is up
            self.failed = self.known[key]
            return True
        if time.monotonic() > self.end or self.lost is not None:
            return False
        found = self._run(data)
        if found.verdict is Verdict.NOT_RUN:
            self.lost = found
        if found.verdict is not Verdict.FAILED:
            return False
        if not self.known:
            self.end = time.monotonic() + _SHRINKING_S
        self.failed = self.known[key] = found
        return True

    def _run(self, data: dict[str, Any]) -> CaseOutcome:
        self.count += 1
        case = Case(f"drawn: {described(data)}", data)
        (found,) = self.session.requirement(attrs.evolve(self.requirement, cases=lambda: [case]), Level.EXTENDED).cases
        return found


class _Drawn:
    """Chooses by Hypothesis.

    Args:
        draw: draws from a strategy.
    """

    def __init__(self, draw: Callable[..., Any]) -> None:
        self._draw = draw

    def integer(self, least: int, most: int) -> int:
        """Return an integer."""
        from hypothesis import strategies

        return int(self._draw(strategies.integers(least, most)))

    def one_of(self, values: Sequence[_T]) -> _T:
        """Return one of some values."""
        from hypothesis import strategies

        place: int = self._draw(strategies.integers(0, len(values) - 1))
        return values[place]


def fuzz(plan: ConformancePlan, minutes: float, seed: int = 0) -> Outcome:
    """Draw cases and run them until the time is up, or one fails, which is then made smaller.

    Args:
        plan: what to test; its area, if it has one, is the only op.
        minutes: how long to draw; making a failure smaller takes at most two minutes more.
        seed: of what is drawn.

    Returns:
        The outcome of `FUZZED`: one case, the smallest that failed, or one that says how many passed.

    Raises:
        ArgumentValueError: see `check_fuzz`.
    """
    check_fuzz(plan, minutes)
    requirement = plan.requirements[FUZZED]
    with Session(plan) as session:
        with contextlib.suppress(KVDockError):  # what cannot be opened is told of the first case
            session.open()  # which may take as long as a short search
        start = time.monotonic()
        search = _Search(session, requirement, FUZZABLE if plan.area is None else (plan.area,), start + 60 * minutes)
        batch = 0
        try:
            while search.failed is None and search.lost is None and time.monotonic() < search.end:
                _draw_batch(search, seed * 100_003 + batch)
                batch += 1
        except KeyboardInterrupt:
            search.lost = CaseOutcome("drawn", Verdict.NOT_RUN, {}, reason=INTERRUPTED)
    text = f"{search.count} random calls with seed {seed}"
    passed = CaseOutcome(text, Verdict.PASSED, {"seed": seed, "count": search.count}, seconds=time.monotonic() - start)
    return outcome_of(requirement, [search.failed or search.lost or passed])


def with_fuzz(outcomes: Sequence[Outcome], fuzzed: Outcome) -> list[Outcome]:
    """Return the outcomes of a run, with what came of fuzzing among the cases of its requirement, or at the end."""
    own = [outcome for outcome in outcomes if outcome.requirement.id == FUZZED]
    cases = [*(case for outcome in own for case in outcome.cases), *fuzzed.cases]
    return [*(outcome for outcome in outcomes if outcome not in own), outcome_of(fuzzed.requirement, cases)]


def _draw_batch(search: _Search, seed: int) -> None:
    """Run a batch of cases, and make the first that fails as small as can be."""
    import hypothesis
    from hypothesis import strategies

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=_BATCH,
        deadline=None,
        database=None,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list(hypothesis.HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.given(strategies.data())
    def one(data: Any) -> None:
        assert not search.fails(data.draw), "a case failed"  # noqa: S101 - how Hypothesis is told

    try:
        one()
    except (AssertionError, hypothesis.errors.HypothesisException):  # those that fail now and then too: what failed is kept
        if search.failed is None:
            raise
