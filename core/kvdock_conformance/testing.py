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

from kvdock.errors import ArgumentValueError, BackendUnavailableError
from kvdock.plugins.records import PluginState
from kvdock_conformance import requirements
from kvdock_conformance.child import ChildEndedError
from kvdock_conformance.expected import apply, read
from kvdock_conformance.kinds import UNKNOWN_DEVICE
from kvdock_conformance.reports.text import bug_report
from kvdock_conformance.requirement import Level, Requirement
from kvdock_conformance.requirements.ops import REQUIREMENTS as OP_REQUIREMENTS
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
    limit_s: float | None = None,
) -> Callable[..., None]:
    """Return a test function with one item for each requirement: assign it to a name that begins with ``test``.

    What is asked of the ops that plugins bring is one item, or one for each requirement where ``op`` names one of them.

    A requirement that fails, or cannot be run, fails its item with a bug report; one that is unsupported and verified passes;
    an expected failure is reported as xfailed. Where the backend's hardware is absent, all are skipped with its reason.

    Args:
        name: name of the backend, found through the installed entry points; or of what else is tested.
        kind: ``"prefix"`` for a prefix cache: see `kvdock_conformance.kinds`.
        level: ``"core"`` or ``"extended"``.
        op: check this op only, kvdock's or a plugin's.
        expected: TOML file of expected failures, see `kvdock_conformance.expected`.
        setup: ``"module:function"`` to call in the child before the backend is looked for, if no entry point brings it.
        environ: variables of the child's environment beside this process's own, such as those that choose a simulator.
        device: on which of the backend's devices, such as ``"acme:1"``; the first if none is given.
        limit_s: how long a case may take in seconds, such as on a simulator; if None, as each requirement says.

    Raises:
        ArgumentValueError: there is no such area of a prefix cache, or the file of expected failures is wrong.
        ValueError: there is no such level.
    """
    import pytest

    every = requirements.load()
    known = read(Path(expected), every) if expected is not None else {}
    plan = ConformancePlan(name, every, Level(level), op, known, setup, environ=environ or {}, kind=kind, device=device, limit_s=limit_s)
    opened: list[_Opened] = []

    items = [pytest.param(item.id, id=item.id) for item in plan.known()]
    named = {item.id for item in plan.known()}
    if kind == "backend" and op is None:
        items.append(pytest.param("KVD-OP-", id="KVD-OP"))
    elif not items:
        items = [pytest.param(item.id, id=item.id) for item in OP_REQUIREMENTS]

    @pytest.mark.parametrize("requirement", items)
    def test(requirement: str, record_property: Callable[[str, object], None]) -> None:
        if not opened:
            opened.append(_open(plan))
        if opened[0].is_absent:
            pytest.skip(opened[0].why_not)
        if opened[0].why_not:
            pytest.fail(opened[0].why_not, pytrace=False)
        asked = [
            item
            for item in opened[0].plan.selected()
            if item.id == requirement or (item.id not in named and item.id.startswith(requirement))
        ]
        if not asked:
            pytest.skip("no plugin brings an op that this is about")
        outcomes = [_outcome(opened[0], item) for item in asked]
        record_property("verdict", ", ".join(dict.fromkeys(outcome.verdict.value for outcome in outcomes)))
        wrong = [_text(opened[0], outcome) for outcome in outcomes if not outcome.verdict.is_green]
        if wrong:
            pytest.fail("\n".join(wrong), pytrace=False)
        expected_ones = [outcome.reason for outcome in outcomes if outcome.verdict is Verdict.EXPECTED_FAILURE]
        if expected_ones:
            pytest.xfail("; ".join(expected_ones))

    return test


@attrs.frozen
class _Opened:
    """A session, kept for all items of a process, with what is to be run; or why there is none, and whether for absent hardware."""

    session: Session
    plan: ConformancePlan
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
        return _Opened(session, plan, wrong if error.got == UNKNOWN_DEVICE else error.subject, error.got == PluginState.ABSENT.value)
    except ChildEndedError as error:
        return _Opened(session, plan, f"loading backend {plan.backend!r} {error.how}\n{error.output}")
    plan = plan.with_ops(session.brought())
    try:
        plan.selected()
    except ArgumentValueError as error:
        return _Opened(session, plan, str(error))
    return _Opened(session, plan)


def _outcome(opened: _Opened, requirement: Requirement) -> Outcome:
    outcome = opened.session.requirement(requirement, opened.plan.level)
    return apply([outcome], opened.plan.expected, datetime.datetime.now(datetime.UTC).date())[0]


def _text(opened: _Opened, outcome: Outcome) -> str:
    run = ConformanceRun(opened.plan, opened.session.about, [outcome], datetime.datetime.now(datetime.UTC), outcome.seconds)
    reports = [bug_report(run, outcome, case) for case in outcome.failed[:1]]
    return "\n".join([*([f"{outcome.requirement.id}: {outcome.verdict.value}: {outcome.reason}"] if outcome.reason else []), *reports])
