"""The kit as a test: one line in a vendor's own suite, one pytest item for each requirement.

::

    from kvdock_conformance.testing import conformance_tests

    test_conformance = conformance_tests("acme")

It is not a pytest plugin: nothing of it runs in a suite that does not import it.
"""

from __future__ import annotations

import atexit
import datetime
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs

from kvdock.errors import BackendUnavailableError
from kvdock.plugins.records import PluginState
from kvdock_conformance import requirements
from kvdock_conformance.child import ChildEndedError
from kvdock_conformance.expected import apply, read
from kvdock_conformance.kinds import UNKNOWN_DEVICE
from kvdock_conformance.reports.text import bug_report
from kvdock_conformance.requirement import Level, Requirement
from kvdock_conformance.run import ConformanceRun
from kvdock_conformance.session import ConformancePlan, Session
from kvdock_conformance.verdict import Outcome, Verdict

__all__ = ["conformance_tests"]


def conformance_tests(
    name: str,
    *,
    kind: str = "backend",
    level: str = "core",
    op: str | None = None,
    expected: str | Path | None = None,
    setup: str | None = None,
    environ: Mapping[str, str] | None = None,
    device: str | None = None,
) -> Callable[..., None]:
    """Return a test function with one item for each requirement: assign it to a name that begins with ``test``.

    A requirement that fails, or cannot be run, fails its item with a bug report; one that is unsupported and verified passes;
    an expected failure is reported as xfailed. Where the backend's hardware is absent, all are skipped with its reason.

    Args:
        name: name of the backend, found through the installed entry points; or of what else is tested.
        kind: ``"prefix"`` for a prefix cache: see `kvdock_conformance.kinds`.
        level: ``"core"`` or ``"extended"``.
        op: check this op only.
        expected: TOML file of expected failures, see `kvdock_conformance.expected`.
        setup: ``"module:function"`` to call in the child before the backend is looked for, if no entry point brings it.
        environ: variables of the child's environment beside this process's own, such as those that choose a simulator.
        device: on which of the backend's devices, such as ``"acme:1"``; the first if none is given.

    Raises:
        ArgumentValueError: there is no such op, or the file of expected failures is wrong.
        ValueError: there is no such level.
    """
    import pytest

    every = requirements.load()
    known = read(Path(expected), every) if expected is not None else {}
    plan = ConformancePlan(name, every, Level(level), op, known, setup, environ=environ or {}, kind=kind, device=device)
    opened: list[_Opened] = []

    @pytest.mark.parametrize("requirement", [pytest.param(item, id=item.id) for item in plan.selected()])
    def test(requirement: Requirement, record_property: Callable[[str, object], None]) -> None:
        if not opened:
            opened.append(_open(plan))
        if opened[0].is_absent:
            pytest.skip(opened[0].why_not)
        if opened[0].why_not:
            pytest.fail(opened[0].why_not, pytrace=False)
        outcome = _outcome(opened[0].session, plan, requirement)
        record_property("verdict", outcome.verdict.value)
        if outcome.verdict is Verdict.EXPECTED_FAILURE:
            pytest.xfail(outcome.reason)
        if not outcome.verdict.is_green:
            pytest.fail(_text(opened[0].session, plan, outcome), pytrace=False)

    return test


@attrs.frozen
class _Opened:
    """A session, kept for all items of a process; or why there is none, and whether that is because the hardware is absent."""

    session: Session
    why_not: str = ""
    is_absent: bool = False


def _open(plan: ConformancePlan) -> _Opened:
    """Open the backend, once: what cannot be opened is not tried again for each requirement."""
    session = Session(plan)
    atexit.register(session.close)
    try:
        session.open()
    except BackendUnavailableError as error:
        wrong = f"device: expected {error.subject}, got {plan.device!r}"
        return _Opened(session, wrong if error.got == UNKNOWN_DEVICE else error.subject, error.got == PluginState.ABSENT.value)
    except ChildEndedError as error:
        return _Opened(session, f"loading backend {plan.backend!r} {error.how}\n{error.output}")
    return _Opened(session)


def _outcome(session: Session, plan: ConformancePlan, requirement: Requirement) -> Outcome:
    outcome = session.requirement(requirement, plan.level)
    return apply([outcome], plan.expected, datetime.datetime.now(datetime.UTC).date())[0]


def _text(session: Session, plan: ConformancePlan, outcome: Outcome) -> str:
    run = ConformanceRun(attrs.evolve(plan), session.about, [outcome], datetime.datetime.now(datetime.UTC), outcome.seconds)
    reports = [bug_report(run, outcome, case) for case in outcome.failed[:1]]
    return "\n".join([*([f"{outcome.requirement.id}: {outcome.verdict.value}: {outcome.reason}"] if outcome.reason else []), *reports])
