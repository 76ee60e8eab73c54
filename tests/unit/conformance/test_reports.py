"""What a run is told as: to people, to programs, and as a script that shows the fault."""

from __future__ import annotations

import ast
import json
import pprint
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import attrs
import jsonschema
import pytest

import kvdock
from kvdock_conformance import reports
from kvdock_conformance.reports import digest
from kvdock_conformance.reports.json_report import VERSION, as_dict
from kvdock_conformance.reports.junit import text as junit_text
from kvdock_conformance.reports.repro import Extract, script
from kvdock_conformance.reports.text import bug_report, summary
from kvdock_conformance.requirement import Level, Requirement
from kvdock_conformance.requirements import load
from kvdock_conformance.run import ConformanceRun, run
from kvdock_conformance.verdict import CaseOutcome, Verdict, outcome_of
from support_conformance import SCHEMA, chosen, install, plan, requirement

CHECK = jsonschema.Draft202012Validator(SCHEMA, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)


@pytest.fixture(scope="module")
def found() -> ConformanceRun:
    """A run with a failure, an unsupported requirement, one that passes, and one that was left out."""
    every = chosen(["KVD-WRITE-001", "KVD-WRITE-008", "KVD-WRITE-022"])
    every.add(requirement(7, area="other"))
    return run(plan("raises", every, area="paged_caching_"))


def test_a_requirement_that_was_given_up_is_told_in_every_form(found: ConformanceRun) -> None:
    failed, *others = found.outcomes
    reason = "not run after 3 crashes, time-outs or spoilt devices"
    cases = [*failed.cases[:3], *(attrs.evolve(case, verdict=Verdict.NOT_RUN, failure=None, reason=reason) for case in failed.cases[3:])]
    given_up = attrs.evolve(found, plan=attrs.evolve(found.plan, area=None), outcomes=[outcome_of(failed.requirement, cases), *others])
    left = f"{len(cases) - 3} of its {len(cases)} cases: {reason}"
    told = as_dict(given_up)
    CHECK.validate(told)
    assert (told["exit_code"], told["complete"], told["requirements"][0]["reason"]) == (3, False, left)
    assert "raises at level core: incomplete: nothing is certified; it crashes or hangs, and cases were not run (1 " in summary(given_up)
    assert left in bug_report(given_up, given_up.outcomes[0], cases[0])
    (failure,) = ElementTree.fromstring(junit_text(given_up)).iter("failure")  # noqa: S314 - our own text
    assert failure.attrib["message"] == f"failed: {left}"
    page = digest.text(given_up)
    assert "| result | incomplete: the backend crashes or hangs, and cases were not run |" in page
    assert f"| KVD-WRITE-001 | failed | {left} |" in page


def proved(found: ConformanceRun) -> ConformanceRun:
    proof = {"fault": "x", "sentence": "X.", "area": "a", "verdict": "missed", "killers": [], "killed_by": ["KVD-WRITE-001"]}
    return attrs.evolve(found, proofs=[proof | {"missed": [], "always": [], "refused": [], "reason": ""}])


def test_the_json_report_keeps_to_its_schema(found: ConformanceRun) -> None:
    CHECK.check_schema(SCHEMA)
    told = as_dict(found)
    CHECK.validate(told)
    assert told["schema"] == VERSION == SCHEMA["properties"]["schema"]["const"]
    assert told["left_out"] == ["KVD-TEST-007"]
    assert (told["exit_code"], told["complete"]) == (1, False), "one requirement was left out"
    whole = as_dict(attrs.evolve(found, plan=attrs.evolve(found.plan, area=None)))
    assert (whole["left_out"], whole["complete"]) == ([], True)
    assert told["counts"] == {"passed": 1, "failed": 1, "unsupported": 1, "expected failure": 0, "not run": 0}
    failed = told["requirements"][0]["cases"][0]
    assert failed["failure"]["got"] == "RuntimeError: no memory left on acme0"
    assert failed["data"] == next(iter(load()["KVD-WRITE-001"].cases())).data, "enough to run it again"
    assert "data" not in told["requirements"][1]["cases"][0]
    CHECK.validate(as_dict(proved(found)))
    assert "proofs" not in told


def test_runs_of_nothing_and_of_what_cannot_start_keep_to_it_too(found: ConformanceRun) -> None:
    case = CaseOutcome("x", Verdict.NOT_RUN, {}, reason="no card")
    outcome = attrs.evolve(found.outcomes[0], verdict=Verdict.NOT_RUN, cases=[case], reason="no card")
    broken = attrs.evolve(found, about={}, outcomes=[outcome])
    CHECK.validate(as_dict(broken))
    assert as_dict(broken)["complete"] is False
    CHECK.validate(as_dict(attrs.evolve(found, outcomes=[])))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema",), 2),
        (("exit_code",), 2),
        (("started",), "yesterday"),
        (("counts", "failed"), -1),
        (("requirements", 0, "verdict"), "fine"),
        (("requirements", 0, "id"), "WRITE-1"),
        (("requirements", 0, "cases"), []),
        (("requirements", 0, "cases", 0, "verdict"), "expected failure"),
        (("requirements", 1, "cases", 0, "verdict"), "failed"),
    ],
)
def test_the_schema_refuses_what_is_wrong(found: ConformanceRun, path: tuple[Any, ...], value: object) -> None:
    told = json.loads(json.dumps(as_dict(found)))
    place = told
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        CHECK.validate(told)


def test_junit_counts_and_tells_failures(found: ConformanceRun) -> None:
    (suite,) = ElementTree.fromstring(junit_text(found))  # noqa: S314 - our own text
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["3", "1", "0", "1"]
    assert [(case.get("classname"), case.get("name"), [part.tag for part in case]) for case in suite[1:]] == [
        ("paged_caching_", "KVD-WRITE-001", ["failure"]),
        ("paged_caching_", "KVD-WRITE-008", []),
        ("paged_caching_", "KVD-WRITE-022", ["skipped"]),
    ]
    assert "no memory left on acme0" in str(suite[1][0].text)
    assert str(suite[3][0].get("message")).startswith("unsupported: ")


def test_junit_has_an_error_for_what_was_not_run_and_no_character_that_xml_lacks(found: ConformanceRun) -> None:
    outcome = attrs.evolve(found.outcomes[1], verdict=Verdict.NOT_RUN, reason="bell \x07 and \x00 in it")
    (suite,) = ElementTree.fromstring(junit_text(attrs.evolve(found, outcomes=[outcome])))  # noqa: S314 - our own text
    assert suite.get("errors") == "1"
    assert suite[1][0].get("message") == "not run: bell ? and ? in it"


def test_junit_says_what_was_tested_and_on_what(found: ConformanceRun) -> None:
    about = {**found.about, "hardware": "Acme \x07 <2>", "notes": None}
    (suite,) = ElementTree.fromstring(junit_text(attrs.evolve(found, about=about)))  # noqa: S314 - our own text
    told = {item.get("name"): item.get("value") for item in suite[0]}
    assert (told["hardware"], told["device"], told["class"]) == ("Acme ? <2>", "cpu", "support_conformance.BadBackend")
    assert told["torch"] == found.about["versions"]["torch"]
    assert not {"ops", "notes", "graph_capture"} & told.keys(), "text only"
    (bare,) = ElementTree.fromstring(junit_text(attrs.evolve(found, about={})))  # noqa: S314 - our own text
    assert list(bare[0]) == []


def test_a_failure_reads_like_a_bug_report(found: ConformanceRun) -> None:
    outcome = found.outcomes[0]
    text = bug_report(found, outcome, outcome.failed[0])
    for line in (
        f"KVD-WRITE-001: {load()['KVD-WRITE-001'].sentence}",
        f"backend   raises (support_conformance.BadBackend) on cpu, {found.about['hardware']}",
        "case      in order",
        "call      paged_caching_",
        "  k_cache        bfloat16 [6, 4, 2, 8] strides [64, 16, 8, 1], 0 bytes past a 64-byte boundary, random, seed 0",
        "  slot_mapping   int64 [13] strides [1], 0 bytes past a 64-byte boundary, "
        "values [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ... 1 more]",
        "wrong     the check",
        "expected  no such error",
        "got       RuntimeError: no memory left on acme0",
    ):
        assert f"{line}\n" in text, text
    assert "5 of its 6 cases fail too: reversed, random order" in text
    assert text.count("Traceback") == 1


def test_a_case_without_calls_shows_its_data(found: ConformanceRun) -> None:
    failed = CaseOutcome("odd", Verdict.FAILED, {"threads": 2, "text": "x" * 200}, {"what": "a", "expected": "b", "got": "c"})
    text = bug_report(found, found.outcomes[0], failed)
    assert 'data      {"threads": 2, "text": "xxx' in text
    assert max(map(len, text.splitlines())) < 150


def test_the_last_line_says_it_all(found: ConformanceRun) -> None:
    passed = attrs.evolve(found, outcomes=[found.outcomes[1]])
    rest = "; nothing is certified without the 1 requirements of other areas"
    assert summary(found).startswith("raises at level core of paged_caching_: fails (1 passed, 1 failed, 1 unsupported) in ")
    assert summary(found).endswith(rest)
    assert "of paged_caching_: passes (1 passed) in " in summary(passed)
    assert summary(passed).endswith(rest)
    everything = attrs.evolve(found.plan, area=None)
    proven = summary(proved(attrs.evolve(passed, plan=everything)))
    assert ": conforms (1 passed) in " in proven, "a fault that nothing noticed is the kit's"
    assert proven.endswith(" s; faults: 1 missed")
    assert "at level core: does not conform (1 passed" in summary(attrs.evolve(found, plan=everything))
    assert "at level core: conforms (1 passed)" in summary(attrs.evolve(passed, plan=everything))
    assert "incomplete: nothing is certified ()" in summary(attrs.evolve(found, outcomes=[]))


def test_a_folder_of_reports(found: ConformanceRun, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "report"
    reports.write(found, folder)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    failures = ["failures/KVD-WRITE-001/report.txt", "failures/KVD-WRITE-001/repro.py"]
    assert names == ["digest.md", *failures, "junit.xml", "report.json"]
    assert (folder / "digest.md").read_text(encoding="utf-8") == reports.digest.text(found)
    CHECK.validate(json.loads((folder / "report.json").read_text()))
    reports.write(attrs.evolve(found, outcomes=[found.outcomes[1]]), folder)
    assert not (folder / "failures").exists(), "what is mended is not told again"


def test_a_folder_is_cleared_of_what_a_run_has_written_only(found: ConformanceRun, tmp_path: Path) -> None:
    reports.write(found, tmp_path)
    kept = [tmp_path / "notes.txt", tmp_path / "failures" / "list.txt", tmp_path / "failures" / "KVD-WRITE-001" / "core.dump"]
    kept += [tmp_path / "failures" / "mine" / "repro.py"]
    for path in kept:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    reports.prepare(tmp_path)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)
    assert [path.read_text() for path in kept] == ["mine"] * 4


def test_preparing_a_folder_leaves_nothing_in_it(tmp_path: Path) -> None:
    reports.prepare(tmp_path / "deep" / "report")
    assert list((tmp_path / "deep" / "report").iterdir()) == []


def test_what_cannot_be_written_is_an_error_with_the_folder(found: ConformanceRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report.json").mkdir()
    with pytest.raises(kvdock.ArgumentValueError, match=r"report: .*: expected a folder that can be written to, got .*report\.json"):
        reports.prepare(tmp_path)

    def full(*args: Any, **settings: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(kvdock.ArgumentValueError, match=r"expected room for the reports, got \[Errno 28\] No space left"):
        reports.write(found, tmp_path / "other")


# repro.py

BLOCKED = """
import runpy, sys
sys.modules["kvdock_conformance"] = None  # importing it raises
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def repro(path: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", BLOCKED, str(path)], env=env, capture_output=True, text=True, check=False, timeout=120, cwd=path.parent
    )


def test_a_repro_fails_while_the_fault_is_there_and_passes_when_it_is_mended(tmp_path: Path) -> None:
    env = install(tmp_path / "site")
    # What a fault of an installed plugin leads to, told without running the kit: `test_cli` does that.
    item = load()["KVD-WRITE-003"]
    case = item.selected(Level.CORE)[0]
    failed = CaseOutcome(case.name, Verdict.FAILED, case.data, {"what": 'a "b" \\', "expected": '"""', "got": "1\n2"})
    path = tmp_path / "repro.py"
    path.write_text(script(item, failed, name="wrapping"))
    broken = repro(path, env)
    assert broken.returncode == 1
    assert "NonconformanceError: paged_caching_: k_cache[5, 3, 0, 0], the first of" in broken.stderr
    mended = repro(path, {**env, "MENDED": "1"})
    assert (mended.returncode, mended.stdout) == (0, "passes now: KVD-WRITE-003, some -1\n"), mended.stderr


@pytest.mark.slow
def test_a_repro_of_a_refusal(tmp_path: Path) -> None:
    env = install(tmp_path / "site")
    item = load()["KVD-WRITE-022"]
    case = item.selected(Level.CORE)[0]
    path = tmp_path / "repro.py"
    path.write_text(script(item, CaseOutcome(case.name, Verdict.FAILED, case.data, {}), name="wrapping"))
    done = repro(path, env)
    assert done.returncode == 0, done.stderr
    (tmp_path / "site" / "kvdock_wrapping.py").write_text(
        (tmp_path / "site" / "kvdock_wrapping.py").read_text().replace("8-bit caches are for version 2", " ")
    )
    done = repro(path, env)
    assert done.returncode == 1
    assert "reason against paged_caching_: expected a text that says why, got ' '" in done.stderr


def each_requirement() -> Iterator[Any]:
    """Yield every requirement: slow are those whose check an earlier one has, since a script is the check and a case, and drawn ones.

    Of the others every third is quick.
    """
    checks: set[Any] = set()
    for item in load():
        is_drawn = item.id.startswith(("KVD-OP-001@", "KVD-OP-005@"))  # from a schema, in seconds
        is_slow = is_drawn or item.check in checks or len(checks) % 3
        yield pytest.param(item, id=item.id, marks=[pytest.mark.slow] if is_slow else [])
        checks.update([] if is_drawn else [item.check])


@pytest.mark.parametrize("item", list(each_requirement()))
def test_every_requirement_can_be_told_as_a_script(item: Requirement) -> None:
    case = next(iter(item.cases()))
    failed = CaseOutcome(case.name, Verdict.FAILED, case.data, {"what": "a", "expected": "b", "got": "c"})
    text = script(item, failed, name="acme")
    tree = ast.parse(text)
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if name.startswith("kvdock_conformance")]
    code = compile(text, "repro.py", "exec")
    scope: dict[str, Any] = {"__name__": "not main"}
    exec(code, scope)  # noqa: S102 - defines everything, in an order in which that works
    assert scope["CASE"] == case.data
    assert ast.get_docstring(tree, clean=False)
    data = pprint.pformat(dict(case.data), width=220, compact=True, sort_dicts=False)
    assert data in text
    assert text.replace(data, "").count("\n") < 1760, "short enough to read, the case's data aside"


def test_a_repro_of_the_kits_own_backends_says_what_it_needs() -> None:
    item = load()["KVD-WRITE-001"]
    case = CaseOutcome("x", Verdict.FAILED, {}, {})
    assert "register('reference')\n    target = Target('reference')" in script(item, case, name="reference")
    made = script(item, case, name="x", setup="mine.own:make", limit_s=3)
    assert "import_module('mine.own').make()\n" in made
    assert "backend 'x', made by mine.own. Ends" in made
    assert "dump_traceback_later(3, exit=True)" in made


def test_one_name_for_two_things_is_refused() -> None:
    extract = Extract()
    extract._seen["length_place"] = "kvdock_conformance.elsewhere"
    with pytest.raises(
        ValueError, match=r"length_place means something in kvdock_conformance\.elsewhere and in kvdock_conformance\.checking"
    ):
        extract.take(load()["KVD-WRITE-001"].check)
