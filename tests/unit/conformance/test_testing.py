"""The one line that a vendor's suite needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvdock
from kvdock_conformance.requirement import Level
from kvdock_conformance.requirements import load
from kvdock_conformance.requirements.ops import REQUIREMENTS as OPS_OF_PLUGINS
from kvdock_conformance.testing import conformance_tests
from support_conformance import PLUGIN, TESTS, install

LINE = "from kvdock_conformance.testing import conformance_tests\ntest_conformance = conformance_tests({arguments})\n"


def suite(folder: Path, arguments: str, *, env: dict[str, str], options: tuple[str, ...] = ()) -> tuple[int, str]:
    """Run a vendor's suite of one line; returns pytest's exit code and output."""
    (folder / "test_acme.py").write_text(LINE.format(arguments=arguments))
    command = [sys.executable, "-m", "pytest", "-q", "-rsxX", "-p", "no:cacheprovider", "-W", "error", "test_acme.py", *options]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    return done.returncode, done.stdout + done.stderr


def test_there_is_one_item_for_each_requirement() -> None:
    def items(level: str) -> list[str]:
        (mark,) = conformance_tests("acme", level=level).pytestmark  # type: ignore[attr-defined] - pytest's marks
        return [item.id for item in mark.args[1]]

    backends = load().of_kind("backend")
    assert items("core") == [*(item.id for item in backends.select(Level.CORE)), "KVD-OP"]
    assert items("extended") == [*(item.id for item in backends.select(Level.EXTENDED)), "KVD-OP"]
    (mark,) = conformance_tests("acme", op="rope_caching_").pytestmark  # type: ignore[attr-defined] - pytest's marks
    assert [item.id for item in mark.args[1]] == [item.id for item in OPS_OF_PLUGINS]


@pytest.mark.slow
def test_a_requirement_that_fails_fails_its_item_with_a_bug_report(tmp_path: Path) -> None:
    env = install(tmp_path / "site")
    code, output = suite(tmp_path, "'wrapping', op='paged_caching_'", env=env)
    count = len(load().select(Level.CORE, "paged_caching_"))
    assert code == 1
    assert f"3 failed, {count - 3} passed" in output, output  # padding is there among strided slots and among pairs too
    assert "KVD-WRITE-003: A negative slot is padding" in output
    assert "got       " in output


@pytest.mark.slow
def test_a_failure_may_be_expected_and_that_is_strict(tmp_path: Path) -> None:
    env = install(tmp_path / "site")
    (tmp_path / "expected.toml").write_text(
        '[[expected]]\nrequirement = "KVD-WRITE-003"\nreason = "known"\nlink = "https://example.com"\nexpires = 2999-01-01\n'
    )
    arguments = "'wrapping', op='paged_caching_', expected='expected.toml'"
    code, output = suite(tmp_path, arguments, env=env, options=("-k", "WRITE-003 or WRITE-008"))
    assert code == 0, output
    assert "1 passed" in output
    assert "1 xfailed" in output
    assert "known (https://example.com), until 2999-01-01" in output
    code, output = suite(tmp_path, arguments, env={**env, "MENDED": "1"}, options=("-k", "WRITE-003"))
    assert code == 1
    assert "expected to fail, and passed" in output


@pytest.mark.slow  # in make test, tests/backends skips what is for GPUs where there is none
@pytest.mark.parametrize(
    ("probe", "outcome", "code"),
    [("absent('no acme card here')", "2 skipped", 0), ("unusable('driver 3 is too old')", "2 failed", 1)],
)
def test_absent_hardware_skips_and_broken_hardware_fails(tmp_path: Path, probe: str, outcome: str, code: int) -> None:
    env = install(tmp_path / "site", "wrapping", PLUGIN.replace("Probe.ready()", f"Probe.{probe}"))
    found, output = suite(tmp_path, "'wrapping'", env=env, options=("-k", "WRITE-001 or WRITE-002"))
    assert found == code, output
    assert outcome in output
    assert probe.split("'")[1] in output


@pytest.mark.slow
def test_a_plugin_that_cannot_be_imported_fails(tmp_path: Path) -> None:
    env = install(tmp_path / "site", "wrapping", "import os\nos._exit(9)\n")
    code, output = suite(tmp_path, "'wrapping'", env=env, options=("-k", "WRITE-001"))
    assert code == 1
    assert "loading backend 'wrapping' ended with exit code 9" in output


@pytest.mark.slow
def test_a_device_may_be_asked_for(tmp_path: Path) -> None:
    env = install(tmp_path / "site")
    code, output = suite(tmp_path, "'wrapping', device='cpu'", env=env, options=("-k", "WRITE-001"))
    assert code == 0, output
    code, output = suite(tmp_path, "'wrapping', device='acme:1'", env=env, options=("-k", "WRITE-001"))
    assert code == 1
    assert "device: expected one of cpu, got 'acme:1'" in output


def test_what_is_asked_for_is_checked_when_the_file_is_collected() -> None:
    with pytest.raises(kvdock.ArgumentValueError, match="op: expected one of prefix"):
        conformance_tests("x", kind="prefix", op="nothing")
    with pytest.raises(ValueError, match="'all' is not a valid Level"):
        conformance_tests("x", level="all")
    with pytest.raises(kvdock.ArgumentValueError, match=r"missing\.toml: expected a TOML file"):
        conformance_tests("x", expected="missing.toml")


@pytest.mark.slow
def test_ops_of_plugins_are_asked_where_they_are_there(tmp_path: Path) -> None:
    """One op, by name, that a plugin brings; a name that nobody brings fails; and without any op there is one item, skipped."""
    env = {**os.environ, "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"}
    code, output = suite(tmp_path, "'cpu', op='zoo_sum_', setup='support_ops:register'", env=env)
    assert (code, "22 passed, 3 skipped" in output) == (0, True), output
    code, output = suite(tmp_path, "'cpu', op='zoo_sum_', setup='support_ops:register_exact'", env=env, options=("-k", "OP-001"))
    assert code == 1
    assert "KVD-OP-001@zoo_sum_: A call writes what the reference" in output
    code, output = suite(tmp_path, "'cpu', op='zoo_sam_', setup='support_ops:register'", env=env, options=("-k", "OP-001"))
    assert code == 1
    assert "zoo_pick, zoo_sum_, got 'zoo_sam_'" in output
    code, output = suite(tmp_path, "'cpu'", env=env, options=("-k", "KVD-OP and not paged_attention"))
    assert (code, "1 skipped" in output) == (0, True), output
