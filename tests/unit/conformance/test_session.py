"""A session: a child when one is needed, and what becomes of cases whose child is lost. The child is a script without torch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvdock.errors import BackendUnavailableError
from kvdock_conformance.child import ChildEndedError
from kvdock_conformance.requirement import Level
from kvdock_conformance.session import Session
from kvdock_conformance.verdict import Verdict
from support_scripted import Scripted, cases


@pytest.fixture
def scripted(tmp_path: Path) -> Scripted:
    return Scripted(tmp_path)


def test_one_child_serves_all_cases(scripted: Scripted) -> None:
    with scripted.session() as session:
        outcome = session.requirement(cases("passed", "failed", "unsupported"), Level.CORE)
        assert [case.verdict.value for case in outcome.cases] == ["passed", "failed", "unsupported"]
        assert outcome.verdict is Verdict.FAILED
        assert outcome.seconds == 1.5
        assert outcome.cases[1].failure == {"what": "w", "expected": "e", "got": "g"}
        assert outcome.cases[2].reason == "why"
    assert scripted.asked() == ["open", "case", "case", "case"]


def test_what_is_opened_is_told_all_about_the_plan(scripted: Scripted) -> None:
    with scripted.session(kind="prefix", setup="a.b:c", device="acme:1") as session:
        session.open()
        session.open()
    (line,) = scripted.log.read_text().splitlines()
    assert json.loads(line) == {"open": {"kind": "prefix", "name": "acme", "setup": "a.b:c", "device": "acme:1"}}


def test_a_child_that_is_lost_is_replaced_and_the_rest_is_not_run_after_three(scripted: Scripted) -> None:
    with scripted.session() as session:
        outcome = session.requirement(cases("crash", "passed", "crash", "crash", "passed", "passed"), Level.CORE)
    verdicts = [case.verdict.value for case in outcome.cases]
    assert verdicts == ["failed", "passed", "failed", "failed", "not run", "not run"]
    assert outcome.cases[4].reason == "not run after 3 crashes, time-outs or spoilt devices"
    assert outcome.cases[0].failure is not None
    assert outcome.cases[0].failure["got"] == "crashed with SIGABRT"
    assert outcome.cases[0].failure["expected"] == "an answer"
    assert scripted.asked().count("open") == 3, "the fourth is not needed any more"


def test_the_next_requirement_begins_anew(scripted: Scripted) -> None:
    with scripted.session() as session:
        session.requirement(cases("crash", "crash", "crash"), Level.CORE)
        assert session.requirement(cases("passed"), Level.CORE).verdict is Verdict.PASSED


def test_an_area_that_is_silent_is_left_and_the_next_is_run(scripted: Scripted) -> None:
    silent, other = cases(*["crash"] * 4), attrs.evolve(cases("passed"), area="another")
    with scripted.session() as session:
        outcomes = [session.requirement(silent, Level.CORE) for _ in range(5)]
        assert session.requirement(other, Level.CORE).verdict is Verdict.PASSED
    failed = [len(outcome.failed) for outcome in outcomes]
    assert failed == [3, 1, 1, 0, 0], "one dead child is enough to know, behind a requirement without any answer"
    assert [outcome.verdict.value for outcome in outcomes[2:4]] == ["failed", "not run"]
    assert [outcome.given_up for outcome in outcomes] == [True, True, True, False, False]
    assert outcomes[1].reason == "3 of its 4 cases: not run after 1 crashes, time-outs or spoilt devices"
    assert outcomes[3].reason == "not run after 3 requirements of its area in a row that crashed or hung in every case"


def test_an_answer_makes_up_for_the_silence_before_it(scripted: Scripted) -> None:
    with scripted.session() as session:
        session.requirement(cases("crash", "crash", "crash"), Level.CORE)
        session.requirement(cases("passed"), Level.CORE)
        assert len(session.requirement(cases(*["crash"] * 4), Level.CORE).failed) == 3


def test_hangs_have_a_time_for_all_of_them_together(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdock_conformance.patience._IN_ALL_S", 1.0)
    with scripted.session(limit_s=0.6) as session:
        first = session.requirement(cases("hang", "passed", "hang", "passed"), Level.CORE)
        other = session.requirement(attrs.evolve(cases("passed"), area="another"), Level.CORE)
        assert [case.verdict.value for case in first.cases] == ["failed", "passed", "failed", "not run"]
        assert other.verdict is Verdict.NOT_RUN
        assert other.reason in ("not run after 1 s of cases that crashed or hung", "not run after 2 s of cases that crashed or hung")
        session.seed(None)
        assert session.requirement(cases("passed"), Level.CORE).verdict is Verdict.PASSED, "a fault says nothing about the next"


@pytest.mark.parametrize(("limit_s", "own"), [(0.5, 60.0), (None, 0.5)])
def test_a_case_has_the_plans_limit_or_its_requirements(scripted: Scripted, limit_s: float | None, own: float) -> None:
    with scripted.session(limit_s=limit_s) as session:
        session.open()
        (case,) = session.requirement(cases("hang", limit_s=own), Level.CORE).cases
    assert case.failure is not None
    assert case.failure["got"] == "did not end within 0.5 s"


def test_cases_behind_a_failure_are_left_where_that_is_asked_for(scripted: Scripted) -> None:
    item = cases("passed", "failed", "passed")
    with scripted.session() as session:
        outcome = session.requirement(item, Level.CORE, stop_at_failure=True)
        assert [case.verdict.value for case in outcome.cases] == ["passed", "failed", "not run"]
        assert outcome.cases[2].reason == "not run after a failure"
        assert [case.name for case in session.requirement(item, Level.CORE, last="1 failed").cases] == ["0 passed", "1 failed"]


def test_a_backend_that_is_not_ready_says_so_and_its_child_goes(scripted: Scripted) -> None:
    session = scripted.session(environ={"OPEN": '{"error": "no card", "state": "absent"}'})
    with pytest.raises(BackendUnavailableError) as caught:
        session.open()
    assert (caught.value.subject, caught.value.got) == ("no card", "absent")
    assert session._child is None
    assert session.about == {}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ('{"error": "no card", "state": "absent"}', "the backend could not be opened: no card"),
        ('"crash"', "the backend could not be opened: the child that ran the case crashed with SIGABRT"),
    ],
)
def test_what_cannot_be_opened_is_tried_three_times_and_leaves_cases_open(scripted: Scripted, answer: str, reason: str) -> None:
    session = scripted.session(environ={"OPEN": answer})
    outcome = session.requirement(cases(*["passed"] * 5), Level.CORE)
    assert outcome.verdict is Verdict.NOT_RUN
    assert [case.reason.startswith(reason) for case in outcome.cases] == [True] * 3 + [False] * 2
    assert outcome.cases[4].reason == "the backend could not be opened 3 times"
    assert scripted.asked() == ["open"] * 3


def test_starts_that_failed_count_in_a_row_only(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    session = scripted.session()
    for answer in ('"crash"', '"crash"', None, '"crash"', '"crash"', None):
        if answer is None:
            session = _with(session, {"LOG": str(scripted.log)})
            session.open()
            session.close()
        else:
            session = _with(session, {"LOG": str(scripted.log), "OPEN": answer})
            with pytest.raises(ChildEndedError):
                session.open()
    assert session.requirement(cases("passed"), Level.CORE).verdict is Verdict.PASSED
    session.close()


def _with(session: Session, environ: dict[str, str]) -> Session:
    """Let the children that a session starts from now on have another environment."""
    session._plan = attrs.evolve(session._plan, environ=environ)
    return session


def test_a_fault_that_was_seeded_is_in_the_next_child_too(scripted: Scripted) -> None:
    with scripted.session() as session:
        assert session.seed("seeded") == ""
        session.requirement(cases("crash", "passed"), Level.CORE)
        assert scripted.asked() == ["open", "fault", "case", "open", "fault", "case"]
        assert session.seed("other") == "not here"
        session.requirement(cases("crash", "passed"), Level.CORE)
    assert scripted.asked()[6:] == ["fault", "case", "open", "case"], "what could not be seeded is in none"


def test_an_interrupt_takes_the_child_away(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvdock_conformance.child import Child

    session = scripted.session()
    session.open()
    pid = int(session.about["pid"])

    def interrupted(self: Child, *args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Child, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.requirement(cases("passed"), Level.CORE)
    assert session._child is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_what_hangs_while_it_is_loaded_is_ended(scripted: Scripted) -> None:
    command = (sys.executable, "-I", "-c", "import time; time.sleep(60)")
    session = scripted.session(command=command, start_s=0.5)
    with pytest.raises(ChildEndedError, match=r"did not end within 0\.5 s"):
        session.open()
    session.close()
    session.close()
