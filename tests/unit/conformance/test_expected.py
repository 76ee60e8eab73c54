from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest

import kvdock
from kvdock_conformance.expected import Expected, apply, read
from kvdock_conformance.requirement import Requirements
from kvdock_conformance.verdict import CaseOutcome, Outcome, Verdict, outcome_of
from support_conformance import requirement

TODAY = datetime.date(2026, 11, 28)
EVERY = Requirements([requirement(1), requirement(2)])
ENTRY = """
[[expected]]
requirement = "KVD-TEST-001"
reason = "firmware 2"
link = "https://example.com/17"
expires = 2026-12-31
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "expected.toml"
    path.write_text(text)
    return path


def test_a_file_is_read(tmp_path: Path) -> None:
    found = read(written(tmp_path, ENTRY), EVERY)
    assert found == {"KVD-TEST-001": Expected("KVD-TEST-001", "firmware 2", "https://example.com/17", datetime.date(2026, 12, 31))}
    assert read(written(tmp_path, ""), EVERY) == {}


@pytest.mark.parametrize(
    ("old", "new", "error", "text"),
    [
        ("KVD-TEST-001", "KVD-TEST-009", kvdock.ArgumentValueError, "expected one of KVD-TEST-001, KVD-TEST-002, got 'KVD-TEST-009'"),
        (
            'reason = "firmware 2"',
            "",
            kvdock.ArgumentValueError,
            "a table with exactly requirement, reason, link, expires, got requirement, link, expires",
        ),
        ("expires = 2026-12-31", "", kvdock.ArgumentValueError, "entry 1: expected a table with exactly"),
        ("reason =", "strict = false\nreason =", kvdock.ArgumentValueError, "got requirement, strict, reason, link, expires"),
        (
            "2026-12-31",
            '"2026-12-31"',
            kvdock.ArgumentTypeError,
            "entry 1: expires: expected a date, got '2026-12-31'. Fix: write a date without quotes",
        ),
        ("2026-12-31", "2026-12-31T00:00:00", kvdock.ArgumentTypeError, "expires: expected a date, got datetime.datetime"),
        ('"firmware 2"', "2", kvdock.ArgumentTypeError, "reason: expected a str, got 2. Fix: write a text in quotes"),
        ('"firmware 2"', '" "', kvdock.ArgumentValueError, "reason: expected why it fails, got ' '"),
        (
            "https://example.com/17",
            "ticket 17",
            kvdock.ArgumentValueError,
            "link: expected an address beginning with http, got 'ticket 17'",
        ),
        ("[[expected]]", "[[expect]]", kvdock.ArgumentValueError, r"expected tables [[expected]] only, got expect"),
        ("[[expected]]", "[expected]", kvdock.ArgumentValueError, r"expected tables [[expected]] only, got {"),
        ("[[expected]]", "[[expected", kvdock.ArgumentValueError, "expected a TOML file, got"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, old: str, new: str, error: type[Exception], text: str) -> None:
    assert old in ENTRY
    with pytest.raises(error, match=re.escape(text)):
        read(written(tmp_path, ENTRY.replace(old, new)), EVERY)


def test_an_entry_twice_and_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(kvdock.ArgumentValueError, match="expected one entry for each requirement, got KVD-TEST-001 twice"):
        read(written(tmp_path, ENTRY * 2), EVERY)
    with pytest.raises(kvdock.ArgumentValueError, match=r"missing\.toml: expected a TOML file, got .*No such file"):
        read(tmp_path / "missing.toml", EVERY)


def outcome(verdict: Verdict, number: int = 1) -> Outcome:
    return Outcome(requirement(number), verdict, [])


@pytest.mark.parametrize(
    ("verdict", "expires", "becomes", "reason"),
    [
        (Verdict.FAILED, TODAY, Verdict.EXPECTED_FAILURE, "firmware 2 (https://example.com/17), until 2026-11-28"),
        (Verdict.FAILED, TODAY - datetime.timedelta(days=1), Verdict.FAILED, "the expected failure has expired on 2026-11-27: firmware 2"),
        (Verdict.PASSED, TODAY, Verdict.FAILED, "expected to fail, and passed: firmware 2 (https://example.com/17). Fix: take it out"),
        (Verdict.PASSED, TODAY - datetime.timedelta(days=1), Verdict.FAILED, "has expired"),
        (Verdict.UNSUPPORTED, TODAY, Verdict.FAILED, "expected to fail, and unsupported"),
        (Verdict.NOT_RUN, TODAY, Verdict.NOT_RUN, ""),
    ],
)
def test_expected_failures_are_strict_and_expire(verdict: Verdict, expires: datetime.date, becomes: Verdict, reason: str) -> None:
    entry = Expected("KVD-TEST-001", "firmware 2", "https://example.com/17", expires)
    unrelated = outcome(verdict, 2)
    judged, other = apply([outcome(verdict), unrelated], {entry.requirement: entry}, TODAY)
    assert judged.verdict is becomes
    assert reason in judged.reason
    assert other is unrelated, "nothing was expected of that one"


def case(verdict: Verdict, reason: str = "") -> CaseOutcome:
    return CaseOutcome("x", verdict, {}, reason=reason)


@pytest.mark.parametrize(
    ("cases", "verdict"),
    [
        ([Verdict.PASSED, Verdict.PASSED], Verdict.PASSED),
        ([Verdict.PASSED, Verdict.UNSUPPORTED], Verdict.PASSED),
        ([Verdict.UNSUPPORTED, Verdict.UNSUPPORTED], Verdict.UNSUPPORTED),
        ([Verdict.PASSED, Verdict.NOT_RUN, Verdict.UNSUPPORTED], Verdict.NOT_RUN),
        ([Verdict.PASSED, Verdict.NOT_RUN, Verdict.FAILED], Verdict.FAILED),
        ([], Verdict.NOT_RUN),
    ],
)
def test_a_requirement_is_as_good_as_its_worst_case(cases: list[Verdict], verdict: Verdict) -> None:
    assert outcome_of(requirement(), [case(each) for each in cases]).verdict is verdict


def test_reasons_are_told_once_and_not_all() -> None:
    reasons = ["a", "b", "a", "c", "d", "e"]
    summed = outcome_of(requirement(), [case(Verdict.UNSUPPORTED, reason) for reason in reasons])
    assert summed.reason == "a; b; c; and 2 more"
    assert [each.verdict for each in summed.cases] == [Verdict.UNSUPPORTED] * 6
    assert outcome_of(requirement(), [case(Verdict.PASSED), case(Verdict.UNSUPPORTED, "no fp8")]).reason == "no fp8"


def test_what_is_green() -> None:
    assert [verdict for verdict in Verdict if verdict.is_green] == [Verdict.PASSED, Verdict.UNSUPPORTED, Verdict.EXPECTED_FAILURE]
