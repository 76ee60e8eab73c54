"""``kvdock conformance``, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvdock.cli import conformance
from kvdock.cli.app import build
from kvdock_conformance.run import ConformanceRun
from support_conformance import install


def kvdock(*arguments: str, env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "kvdock.cli", "conformance", *arguments]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False, timeout=300)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(build(["conformance"]), ["conformance", *arguments])


@pytest.mark.slow  # in make test, the example of a distribution is certified from its wheel
def test_a_strangers_backend_from_any_folder(tmp_path: Path) -> None:
    env = install(tmp_path / "site")
    report = tmp_path / "report"
    done = kvdock("--backend", "wrapping", "--report", str(report), env=env, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "KVD-WRITE-003: A negative slot is padding" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("wrapping at level core: does not conform (")
    told = json.loads((report / "report.json").read_text())
    failed = [item["id"] for item in told["requirements"] if item["verdict"] == "failed"]
    assert failed[:2] == ["KVD-WRITE-003", "KVD-WRITE-006"]  # slots with padding are among those with strides
    assert "KVD-GATHER-001" not in failed
    assert (report / "failures" / "KVD-WRITE-003" / "repro.py").is_file()  # `test_reports` runs one


@pytest.mark.slow
def test_failures_of_a_strangers_backend_may_be_expected(tmp_path: Path) -> None:
    env = install(tmp_path / "site")
    expected = tmp_path / "expected.toml"
    known = '[[expected]]\nrequirement = "KVD-WRITE-{}"\nreason = "known"\nlink = "https://example.com"\nexpires = 2999-01-01\n'
    expected.write_text("".join(map(known.format, ("003", "006", "025"))))  # padding among slots with strides, and in pairs with all else
    done = kvdock("--backend", "wrapping", "--expected", str(expected), "--op", "paged_caching_", "--json", env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["command"], answer["schema"], answer["op"]) == ("conformance", 1, "paged_caching_")
    assert answer["counts"]["expected failure"] == 3
    done = kvdock("--backend", "wrapping", "--expected", str(expected), env={**env, "MENDED": "1"}, cwd=tmp_path)
    assert done.returncode == 1
    assert "expected to fail, and passed: known (https://example.com)" in " ".join(done.stdout.split())


def test_an_interrupt_in_the_moment_before_a_run_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: object, **options: object) -> ConformanceRun:
        raise KeyboardInterrupt

    monkeypatch.setattr(conformance, "run", interrupted)
    result = invoke("--backend", "reference", "--op", "threads", "--report", str(tmp_path))
    assert result.exit_code == 3, result.output
    told = json.loads((tmp_path / "report.json").read_text())
    assert {(item["verdict"], item["reason"]) for item in told["requirements"]} == {("not run", "interrupted")}
    assert "incomplete: nothing is certified (" in result.output.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        pytest.param(("--backend", "reference", "--op", "nothing"), "op: expected one of paged_caching_", marks=pytest.mark.slow),
        (("--backend", "reference", "--expected", "missing.toml"), "missing.toml: expected a TOML file"),
        (("--backend", "nobody"), "expected the name of a backend"),
        (("--backend", "reference", "--level", "all"), "Invalid value for '--level'"),
        (("--backend", "reference", "--workers", "0"), "Invalid value for '--workers'"),
        ((), "expected one of --backend NAME, --prefix NAME, got none"),
    ],
)
def test_wrong_options_exit_with_2(arguments: tuple[str, ...], text: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert text in " ".join(result.output.replace("│", " ").split())


def test_wrong_options_as_json() -> None:
    result = invoke("--backend", "reference", "--op", "nothing", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["type"] == "ArgumentValueError"


@pytest.mark.slow
def test_hardware_that_is_absent_is_incomplete(tmp_path: Path) -> None:
    source = """
import kvdock
KVDOCK_API = (1, 0)
class Absent(kvdock.plugin.Backend):
    name = "absent"
    device_type = "acme"
    def probe(self): return kvdock.plugin.Probe.absent("no acme card in this machine")
    def claims(self, device): return False
    def devices(self): return []
    def kernels(self): return {}
@kvdock.plugin.hookimpl
def kvdock_backends(): return [Absent()]
"""
    done = kvdock("--backend", "absent", env=install(tmp_path, "absent", source), cwd=tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "ABSENT: no acme card in this machine" in done.stdout
    assert "\nnot run: " not in done.stdout, "a short reason stands in the table"
    assert "absent at level core: incomplete: nothing is certified (" in done.stdout.splitlines()[-1]


@pytest.mark.slow  # every fault of an area
def test_proving_seeds_faults_into_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvdock_conformance import faults

    some = {name: fault for name, fault in faults.load().items() if name in ("write-negative-slot-wraps", "write-no-tokens-refused")}
    monkeypatch.setattr(faults, "load", lambda: some)
    result = invoke("--backend", "portable-kernels", "--prove")
    assert result.exit_code == 0, result.output
    assert "write-negative-slot-wraps" in result.output
    assert "killed" in result.output
    assert "survived" not in result.output


@pytest.mark.slow
def test_a_selection_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvdock_conformance import requirements
    from support_conformance import chosen, requirement

    every = chosen(["KVD-WRITE-008"])
    every.add(requirement(9, area="other"))
    monkeypatch.setattr(requirements, "load", lambda: every)
    found: list[ConformanceRun] = []
    certify = conformance.certify
    monkeypatch.setattr(conformance, "certify", lambda plan, **more: found.append(certify(plan, **more)) or found[-1])
    result = invoke("--backend", "reference", "--op", "paged_caching_")
    assert result.exit_code == 0, result.output
    assert "left out: KVD-TEST-009\n" in result.output
    assert found[0].plan.backend == "reference"
