"""The digest: a run on one page, whatever came of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvdock_conformance.reports import digest
from kvdock_conformance.reports.json_report import as_dict, text
from kvdock_conformance.run import ConformanceRun, run
from kvdock_conformance.verdict import Verdict
from support_conformance import chosen, plan, requirement

RECORDS = sorted((Path(__file__).parents[3] / "docs" / "benchmarks" / "conformance").glob("cuda-*.md"))


@pytest.fixture(scope="module")
def found() -> ConformanceRun:
    """A run with a failure, an unsupported requirement, one that passes, and one that was left out."""
    every = chosen(["KVD-WRITE-001", "KVD-WRITE-008", "KVD-WRITE-022"])
    every.add(requirement(7, area="other"))
    return run(plan("raises", every, area="paged_caching_"))


def rows(said: str, column: str) -> list[list[str]]:
    """Return the rows of the table whose first column has that name."""
    table = said.split(f"| {column} |")[1].split("\n\n")[0].splitlines()[2:]
    return [line.strip("| ").split(" | ") for line in table]


def facts(said: str) -> dict[str, str]:
    return {row[0]: " | ".join(row[1:]) for row in rows(said, "what")}


def with_verdicts(found: ConformanceRun, *verdicts: Verdict, **changes: Any) -> ConformanceRun:
    """Return the run with other verdicts, as one of a whole level."""
    outcomes = [attrs.evolve(outcome, verdict=verdict) for outcome, verdict in zip(found.outcomes, verdicts, strict=False)]
    return attrs.evolve(found, outcomes=outcomes, plan=attrs.evolve(found.plan, area=None), **changes)


def test_it_has_versions_device_counts_and_what_did_not_pass(found: ConformanceRun) -> None:
    said = digest.text(found)
    assert said.startswith("# Conformance of raises, level core\n\n| what |")
    told = facts(said)
    about = found.about
    assert told["requirements"] == "1 failed, 1 passed, 1 unsupported"
    assert told["backend"] == f"{about['class']} on {about['device']}"
    assert told["versions"] == ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    assert "torch " in told["versions"]
    assert (told["platform"], told["started"].split(",")[0]) == (about["platform"], as_dict(found)["started"])
    cases = {verdict.value: sum(case.verdict is verdict for outcome in found.outcomes for case in outcome.cases) for verdict in Verdict}
    (area,) = rows(said, "area")
    assert area[0] == "paged_caching_"
    assert all(f"{cases[word]} {word}" in area[2] for word in ("passed", "failed", "unsupported") if cases[word])
    assert [row[:2] for row in rows(said, "not passed")] == [["KVD-WRITE-001", "failed"], ["KVD-WRITE-022", "unsupported"]]
    assert "KVD-WRITE-008" not in said


@pytest.mark.parametrize(
    ("verdicts", "result"),
    [
        ([Verdict.PASSED, Verdict.UNSUPPORTED, Verdict.EXPECTED_FAILURE], "conforms"),
        ([Verdict.PASSED, Verdict.FAILED, Verdict.NOT_RUN], "does not conform"),
        ([Verdict.PASSED, Verdict.NOT_RUN], "incomplete: nothing is certified"),
        ([], "incomplete: nothing is certified"),
    ],
)
def test_the_result_is_what_the_requirements_show(found: ConformanceRun, verdicts: list[Verdict], result: str) -> None:
    assert facts(digest.text(with_verdicts(found, *verdicts)))["result"] == result


def test_a_run_of_one_area_certifies_nothing(found: ConformanceRun) -> None:
    passed = attrs.evolve(found, outcomes=found.outcomes[1:2])
    assert facts(digest.text(passed))["result"] == "passes what paged_caching_ asks; the other areas were left out"


def test_faults_are_counted_and_those_that_were_not_killed_are_named(found: ConformanceRun) -> None:
    proof = {"sentence": "X.", "area": "a", "reason": ""}
    proofs = [{"fault": "x", "verdict": "killed"}, {"fault": "y", "verdict": "missed"}, {"fault": "z", "verdict": "not seeded"}]
    run_of_faults = with_verdicts(found, Verdict.PASSED, proofs=[proof | one for one in proofs])
    said = digest.text(run_of_faults)
    assert facts(said)["faults"] == "1 killed, 1 missed, 1 not seeded"
    assert rows(said, "fault not killed") == [["y", "missed", "X."], ["z", "not seeded", "X."]]
    assert facts(said)["result"] == "conforms", "what seeded faults show is about the kit"


def test_reasons_are_one_short_line_each_and_equal_ones_share_a_row(found: ConformanceRun) -> None:
    why = "no card | none\nsecond line"
    missing = [attrs.evolve(outcome, verdict=Verdict.NOT_RUN, reason=why) for outcome in found.outcomes]
    long = attrs.evolve(found.outcomes[0], verdict=Verdict.FAILED, reason="x" * 500)
    said = digest.text(attrs.evolve(found, about={}, outcomes=[*missing, long]))
    assert "| KVD-WRITE-001, KVD-WRITE-008, KVD-WRITE-022 | not run | no card \\| none |\n" in said
    assert f"| KVD-WRITE-001 | failed | {'x' * 116} ... |\n" in said
    assert (facts(said)["backend"], facts(said)["hardware"]) == ("could not be opened", "not named")


def test_a_report_that_was_kept_gives_the_same_digest(found: ConformanceRun) -> None:
    assert digest.page(json.loads(text(found))) == digest.text(found)


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name)
def test_the_records_are_digests_of_whole_levels(record: Path) -> None:
    said = record.read_text(encoding="utf-8")
    assert said.count("\n") <= 60
    assert facts(said)["result"] == "conforms"
    assert facts(said)["hardware"].startswith("NVIDIA")


def test_there_is_a_record_of_each_level() -> None:
    assert [path.name for path in RECORDS] == ["cuda-core.md", "cuda-extended.md"]
