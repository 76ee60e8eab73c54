"""Runs over backends that are good, that say no, that crash, hang and raise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest

import kvdock
from kvdock_conformance.expected import Expected
from kvdock_conformance.requirement import Level
from kvdock_conformance.run import ConformanceRun, run
from kvdock_conformance.session import Session
from kvdock_conformance.verdict import Outcome, Verdict
from support_conformance import chosen, plan, requirement

SOME = ("KVD-WRITE-001", "KVD-WRITE-008", "KVD-WRITE-022")


def verdicts(found: ConformanceRun) -> dict[str, str]:
    return {outcome.requirement.id: outcome.verdict.value for outcome in found.outcomes}


@pytest.fixture(scope="module")
def heard() -> list[Outcome]:
    """What a run over a good backend tells as it goes."""
    return []


@pytest.fixture(scope="module")
def good(heard: list[Outcome]) -> ConformanceRun:
    """A run over a good backend."""
    return run(plan("good", chosen(SOME)), heard.append)


def test_a_good_backend(good: ConformanceRun, heard: list[Outcome]) -> None:
    found = good
    assert verdicts(found) == {"KVD-WRITE-001": "passed", "KVD-WRITE-008": "passed", "KVD-WRITE-022": "unsupported"}
    assert found.exit_code == 0
    assert found.missing == found.failed == []
    assert list(found.outcomes) == heard
    assert found.counts() == {"passed": 2, "unsupported": 1}
    assert "quantised caches" in found.outcomes[2].reason
    assert found.about["backend"] == "good"
    assert found.about["device"] == "cpu"
    assert found.about["class"] == "support_conformance.BadBackend"
    assert found.about["ops"] == [
        *("copy_blocks_", "gather_paged", "mla_caching_", "mla_gather", "paged_attention", "paged_caching_", "static_update_"),
        "swap_blocks_",
    ]
    assert set(found.about["versions"]) == {"kvdock", "torch", "python"}


def test_areas_at_once_are_reported_in_the_order_of_the_plan() -> None:
    some = ("KVD-WRITE-001", "KVD-COPY-001", "KVD-GATHER-001", "KVD-COPY-002")
    found, told = run(plan("raises", chosen(some), workers=2), (heard := []).append), heard
    assert verdicts(found) == {"KVD-WRITE-001": "failed", **dict.fromkeys(some[1:], "passed")}
    assert [outcome.requirement.id for outcome in found.outcomes] == [*some]
    assert sorted(outcome.requirement.id for outcome in told) == sorted(some)


@pytest.mark.slow
def test_what_a_backend_prints_is_no_answer() -> None:
    found = run(plan("prints", chosen(["KVD-WRITE-001"])))
    assert verdicts(found) == {"KVD-WRITE-001": "failed"}, "it writes nothing, whatever it prints"
    failure = found.outcomes[0].failed[0].failure
    assert failure is not None
    assert "k_cache[0, 0, 0, 0]" in failure["what"]


def test_an_error_is_a_failure_with_its_traceback() -> None:
    (outcome,) = run(plan("raises", chosen(["KVD-WRITE-001"]))).outcomes
    failure = outcome.failed[0].failure
    assert failure is not None
    assert failure["got"] == "RuntimeError: no memory left on acme0"
    assert "in _raise" in failure["details"]
    assert len(outcome.failed) == len(outcome.cases), "each case is run, whatever came of those before"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "how", "said"),
    [
        ("crashes", "crashed with SIGSEGV", "about to crash"),
        pytest.param("exits", "ended with exit code 7", "", marks=pytest.mark.slow),
        pytest.param("hangs", "did not end within 1 s", "in _hang", marks=pytest.mark.slow),
    ],
)
def test_a_child_that_is_lost_is_a_failure_and_the_run_goes_on(backend: str, how: str, said: str) -> None:
    found = run(plan(backend, chosen(["KVD-WRITE-001", "KVD-WRITE-008"]), limit_s=1.0 if backend == "hangs" else None))
    assert verdicts(found) == {"KVD-WRITE-001": "failed", "KVD-WRITE-008": "passed"}, "a call without tokens never gets to the kernel"
    assert found.exit_code == 3, "what else is wrong is not known"
    assert [outcome.requirement.id for outcome in found.given_up] == ["KVD-WRITE-001"]
    cases = found.outcomes[0].cases
    assert [case.verdict for case in cases[:3]] == [Verdict.FAILED] * 3
    assert {case.verdict for case in cases[3:]} == {Verdict.NOT_RUN}
    assert cases[3].reason == "not run after 3 crashes, time-outs or spoilt devices"
    assert cases[0].failure is not None
    assert cases[0].failure["got"] == how
    assert said in cases[0].failure["details"]


@pytest.mark.slow
def test_a_device_that_is_spoilt_costs_its_case_and_not_those_behind_it() -> None:
    found = run(plan("spoils", chosen(["KVD-WRITE-003", "KVD-GATHER-001"])))
    assert verdicts(found) == {"KVD-WRITE-003": "failed", "KVD-GATHER-001": "passed"}, "reading back has nothing to do with it"
    cases = found.outcomes[0].cases
    assert [case.verdict for case in cases] == [Verdict.FAILED] * 3 + [Verdict.NOT_RUN] * (len(cases) - 3)
    for case in cases[:3]:
        assert case.failure is not None
        assert case.failure["got"].startswith("RuntimeError: acme error 700: the device is lost")
        assert "in _spoil" in case.failure["details"]
        assert case.failure["details"].endswith("and the next case gets a new one: RuntimeError: acme error 700: the device is lost")


@pytest.mark.slow
def test_a_backend_that_nobody_has_is_a_usage_error() -> None:
    with pytest.raises(
        kvdock.ArgumentValueError, match="backend: expected the name of a backend as `kvdock backends` lists it, got 'nobody'"
    ):
        run(plan("nobody", chosen(SOME)))
    with pytest.raises(kvdock.ArgumentValueError, match=r"op: expected one of paged_caching_, got 'gather'"):
        run(plan("good", chosen(SOME), area="gather"))


def test_a_child_that_cannot_start_leaves_everything_not_run() -> None:
    found = run(attrs.evolve(plan("good", chosen(SOME)), setup="support_conformance:crash"))
    assert set(verdicts(found).values()) == {"not run"}
    assert found.exit_code == 3
    assert found.outcomes[0].reason.startswith("loading the backend crashed with SIGKILL")
    assert found.about == {}
    assert all(case.verdict is Verdict.NOT_RUN for outcome in found.outcomes for case in outcome.cases)


@pytest.mark.slow
def test_an_interrupt_leaves_the_rest_not_run_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Session.requirement
    left: Iterator[Any] = iter([None])

    def interrupted(self: Session, item: Any, level: Level) -> Outcome:
        if next(left, 1) is None:
            return ask(self, item, level)
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "requirement", interrupted)
    found = run(plan("good", chosen(SOME)))
    assert list(verdicts(found).values()) == ["passed", "not run", "not run"]
    assert found.outcomes[2].reason == "interrupted"
    assert found.exit_code == 3, "an incomplete run is never green"


def test_an_interrupt_while_the_backend_is_loaded_leaves_everything_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Session) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "open", interrupted)
    found = run(plan("good", chosen(SOME)))
    assert set(verdicts(found).values()) == {"not run"}
    assert {outcome.reason for outcome in found.outcomes} == {"interrupted"}


@pytest.mark.slow
def test_an_interrupt_while_an_outcome_is_told_is_one_too() -> None:
    def interrupted(outcome: Outcome) -> None:
        if outcome.requirement.id == SOME[1]:
            raise KeyboardInterrupt

    found = run(plan("good", chosen(SOME)), interrupted)
    assert list(verdicts(found).values()) == ["passed", "not run", "not run"]


def test_a_device_that_the_backend_has_not_is_a_usage_error() -> None:
    with pytest.raises(kvdock.ArgumentValueError, match="device: expected one of cpu, got 'acme:1'"):
        run(plan("good", chosen(SOME), device="acme:1"))


def test_a_selection_says_what_it_leaves_out() -> None:
    every = chosen(SOME)
    every.add(requirement(5, area="other"))
    every.add(requirement(6, area="other", level=Level.EXTENDED))
    assert plan("good", every, area="paged_caching_").left_out() == ["KVD-TEST-005"]
    assert plan("good", every, area="paged_caching_", level=Level.EXTENDED).left_out() == ["KVD-TEST-005", "KVD-TEST-006"]
    assert plan("good", every).left_out() == []
    assert [item.id for item in plan("good", every, area="paged_caching_").selected()] == list(SOME)


@pytest.mark.slow
def test_expected_failures_are_taken_into_account() -> None:
    import datetime

    day = datetime.date(2999, 1, 1)
    known = {name: Expected(name, "known", "https://example.com", day) for name in ("KVD-WRITE-001", "KVD-WRITE-008")}
    found = run(plan("raises", chosen(["KVD-WRITE-001", "KVD-WRITE-008"]), expected=known))
    assert verdicts(found) == {"KVD-WRITE-001": "expected failure", "KVD-WRITE-008": "failed"}, "strict: the second one passes"
    assert found.exit_code == 1
    alone = run(plan("raises", chosen(["KVD-WRITE-001"]), expected=known))
    assert alone.exit_code == 0


@pytest.mark.slow
def test_nothing_is_not_green() -> None:
    assert run(plan("good", chosen([]))).exit_code == 3


def test_a_fault_that_survives_is_a_failure(good: ConformanceRun) -> None:
    codes = {"killed": 0, "not seeded": 0, "out of reach": 0, "survived": 1, "missed": 1, "unclear": 3}
    assert {verdict: attrs.evolve(good, proofs=[{"verdict": verdict}]).exit_code for verdict in codes} == codes


@pytest.mark.slow
def test_a_session_stops_at_a_failure_where_it_is_asked_to() -> None:
    (item,) = chosen(["KVD-WRITE-001"])
    with Session(plan("raises", chosen(SOME))) as session:
        outcome = session.requirement(item, Level.CORE, stop_at_failure=True)
        assert [case.verdict for case in outcome.cases[:2]] == [Verdict.FAILED, Verdict.NOT_RUN]
        assert outcome.verdict is Verdict.FAILED
        session.close()
        assert session.requirement(item, Level.CORE).verdict is Verdict.FAILED, "a closed session starts anew"
