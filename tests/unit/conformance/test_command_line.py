"""``kvdock conformance`` as a process of its own: what it exits with, what it writes, and how it is ended."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest

from kvdock_conformance.requirement import Level
from kvdock_conformance.requirements import load
from support_conformance import PLUGIN, SCHEMA, install

CHECK = jsonschema.Draft202012Validator(SCHEMA)
COMMAND = (sys.executable, "-P", "-m", "kvdock.cli", "conformance")
HANGING = PLUGIN.replace(
    "    def __call__(self, k_cache",
    """    def __call__(self, *args):
        import pathlib, time
        pathlib.Path(os.environ["HANGS"]).touch()
        time.sleep(600)

    def unused(self, k_cache""",
)
"""A plugin whose calls make a file, and hang."""


def kvdock(*arguments: str, env: dict[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], env=env, cwd=cwd, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The environment of a plugin whose negative slots wrap, unless MENDED is set: KVD-WRITE-003 fails."""
    return install(tmp_path / "site")


def told(report: Path) -> dict[str, Any]:
    """Return a JSON report that keeps to its schema, beside a JUnit report that is XML."""
    found: dict[str, Any] = json.loads((report / "report.json").read_text(encoding="utf-8"))
    CHECK.validate(found)
    ElementTree.parse(report / "junit.xml")  # noqa: S314 - our own text
    return found


def children_of(process: int) -> list[int]:
    """Return the processes that a process has started, and theirs."""
    own = [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return own + [other for one in own for other in children_of(one)]


def wait_for(is_so: Callable[[], object]) -> None:
    """Wait until something is so, a minute at most."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def listening() -> None:
    """Let a process take Ctrl-C, also where the tests run in the background, with it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "when"),
    [
        (signal.SIGINT, "in a case"),
        pytest.param(signal.SIGINT, "while it is loaded", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "in a case", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_interrupted_tells_what_it_has(tmp_path: Path, number: signal.Signals, when: str) -> None:
    hangs, report = tmp_path / "hangs", tmp_path / "report"
    env = {**install(tmp_path / "site", source=HANGING), "HANGS": str(hangs)}
    command = [*COMMAND, "--backend", "wrapping", "--op", "paged_caching_", "--report", str(report)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, preexec_fn=listening) as process:
        try:
            wait_for(hangs.exists if when == "in a case" else report.exists)  # made before the run: until then there is nothing to tell
            children = children_of(process.pid)
            assert children
            process.send_signal(number)
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()  # or it would be waited for, which may be long
    assert process.returncode == 3, errors
    assert "Traceback" not in errors
    assert "KVD-WRITE-001 │ not run" in output
    assert "incomplete: nothing is certified (" in output.splitlines()[-1]
    assert not [child for child in children if Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes()]
    found = told(report)
    assert (found["exit_code"], found["complete"], found["counts"]["passed"]) == (3, False, 0)
    assert {item["reason"] for item in found["requirements"]} == {"interrupted"}


WRAPPED = ("KVD-WRITE-003", "KVD-WRITE-006", "KVD-WRITE-025")
"""What notices negative slots that wrap."""


def written(folder: Path, requirement: str = WRAPPED[0], expires: str = "2999-01-01") -> str:
    path, rest = folder / "expected.toml", f'reason = "known"\nlink = "https://example.com"\nexpires = {expires}\n'
    names = WRAPPED if requirement == WRAPPED[0] else (requirement,)
    path.write_text("".join(f'[[expected]]\nrequirement = "{name}"\n{rest}' for name in names))
    return str(path)


@pytest.mark.parametrize(
    ("requirement", "expires", "mended", "code", "verdict", "reason"),
    [
        pytest.param("KVD-WRITE-003", "2999-01-01", False, 0, "expected failure", "until 2999-01-01", marks=pytest.mark.slow),
        pytest.param("KVD-WRITE-003", "2020-01-01", False, 1, "failed", "has expired on 2020-01-01", marks=pytest.mark.slow),
        pytest.param("KVD-WRITE-003", "2999-01-01", True, 1, "failed", "expected to fail, and passed", marks=pytest.mark.slow),
        pytest.param("KVD-WRITE-022", "2999-01-01", True, 1, "failed", "expected to fail, and unsupported", marks=pytest.mark.slow),
        pytest.param("KVD-GATHER-001", "2020-01-01", True, 0, "passed", "", marks=pytest.mark.slow),
    ],
)
def test_exit_codes_of_expected_failures(
    tmp_path: Path, env: dict[str, str], requirement: str, expires: str, mended: bool, code: int, verdict: str, reason: str
) -> None:
    arguments = ("--backend", "wrapping", "--op", "paged_caching_", "--json", "--expected", written(tmp_path, requirement, expires))
    done = kvdock(*arguments, env={**env, **({"MENDED": "1"} if mended else {})}, cwd=tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["exit_code"] == code
    shown = requirement if requirement.startswith("KVD-WRITE") else "KVD-WRITE-003"  # one that is not selected does not matter
    (item,) = [item for item in found["requirements"] if item["id"] == shown]
    assert item["verdict"] == verdict
    assert reason in item["reason"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--prefix", "radix", "--device", "cpu"), "device: expected none, since a prefix cache"),
        pytest.param(("--backend", "wrapping", "--device", "acme:1"), "expected one of cpu, got 'acme:1'", marks=pytest.mark.slow),
        pytest.param(("--prefix", "nobody"), "prefix: expected the name of a prefix cache", marks=pytest.mark.slow),
        pytest.param(("--prefix", "radix", "--backend", "cpu"), "got --backend cpu and --prefix radix", marks=pytest.mark.slow),
        pytest.param(("--backend", "a\x01\udc80b"), "backend: expected the name of a backend", marks=pytest.mark.slow),
        pytest.param(("--prefix", "radix", "--op", "hygiene"), "op: expected one of prefix, got 'hygiene'", marks=pytest.mark.slow),
        pytest.param(("--backend", "wrapping", "--op", ""), "op: expected one of paged_caching_", marks=pytest.mark.slow),
    ],
)
def test_wrong_options_exit_with_2(tmp_path: Path, env: dict[str, str], arguments: tuple[str, ...], text: str) -> None:
    report = tmp_path / "report"
    done = kvdock(*arguments, "--report", str(report), env=env, cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not (report / "report.json").exists()


@pytest.mark.slow
def test_a_device_may_be_named(tmp_path: Path, env: dict[str, str]) -> None:
    done = kvdock("--backend", "wrapping", "--device", "cpu:0", "--op", "devices", "--json", env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    about = json.loads(done.stdout)["about"]
    assert about["device"] == "cpu"
    assert about["hardware"]


@pytest.mark.parametrize(
    "place", ["a file", *(pytest.param(place, marks=pytest.mark.slow) for place in ("below a file", "failures is a file"))]
)
def test_a_report_that_cannot_be_written_is_found_before_the_run(tmp_path: Path, env: dict[str, str], place: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "failures").write_text("mine")
    report = {"a file": "file", "below a file": "file/report", "failures is a file": "folder"}[place]
    start = time.monotonic()
    done = kvdock("--backend", "wrapping", "--report", report, env={**env, "PYTHONPATH": env["PYTHONPATH"]}, cwd=tmp_path)
    assert done.returncode == 2
    assert f"report: {report}: expected a folder that can be written to, got" in done.stderr
    assert "Fix: name another one" in done.stderr
    assert not done.stdout
    assert time.monotonic() - start < 30
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "failures").read_text() == "mine"


@pytest.mark.slow
def test_what_an_earlier_run_left_is_gone_and_what_is_somebodys_stays(tmp_path: Path, env: dict[str, str]) -> None:
    report = tmp_path / "report"
    arguments = ("--backend", "wrapping", "--op", "paged_caching_", "--report", str(report))
    assert kvdock(*arguments, env=env, cwd=tmp_path).returncode == 1
    assert told(report)["exit_code"] == 1
    assert (report / "failures" / "KVD-WRITE-003" / "repro.py").is_file()
    (report / "failures" / "KVD-WRITE-003" / "notes.txt").write_text("mine")
    assert kvdock(*arguments, env={**env, "MENDED": "1"}, cwd=tmp_path).returncode == 0
    assert told(report)["exit_code"] == 0
    assert [path.name for path in (report / "failures").rglob("*") if path.is_file()] == ["notes.txt"]


@pytest.mark.slow
def test_progress_is_shown_on_a_terminal_only(tmp_path: Path, env: dict[str, str]) -> None:
    command = [*COMMAND, "--backend", "wrapping", "--op", "devices"]
    controller, terminal = pty.openpty()
    with subprocess.Popen(command, env={**env, "TERM": "xterm"}, cwd=tmp_path, stdout=subprocess.PIPE, stderr=terminal) as process:
        os.close(terminal)
        assert process.stdout is not None
        shown = b""
        while True:
            try:
                part = os.read(controller, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
        output = process.stdout.read()
    os.close(controller)
    (*others, last) = load().select(Level.CORE, "devices")
    count = len(others) + 1
    assert re.search(rf"requirements .*{count}/{count}".encode(), shown), shown
    assert f"{last.id} passed".encode() in shown, "those before may be gone before they are drawn"
    assert f"{count}/{count}".encode() not in output
    piped = kvdock("--backend", "wrapping", "--op", "devices", env=env, cwd=tmp_path)
    assert piped.returncode == 0
    assert piped.stderr == ""


@pytest.mark.slow
def test_a_backend_that_crashes_while_it_is_loaded_says_why_once(tmp_path: Path) -> None:
    source = "import os\nprint('licence server: no answer')\nprint('giving up', flush=True)\nos._exit(9)\n"
    done = kvdock("--backend", "wrapping", "--op", "hygiene", env=install(tmp_path, source=source), cwd=tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stdout.count("\nnot run: loading the backend ended with exit code 9\nlicence server: no answer\ngiving up\n") == 1
    assert done.stdout.count("giving up") == 1, "the table has first lines only"
    assert done.stdout.count("(loading the backend ended with exit code 9 ...)") > 5
