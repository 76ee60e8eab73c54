"""The distributions in `examples/`, installed and certified as a stranger would."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvdock_conformance.new_backend import NewBackend
from support_projects import Environment, once, run
from support_sources import ROOT

ACME = ROOT / "examples" / "acme_backend"
TORCH = ROOT / "examples" / "torch_devices"


@pytest.fixture(scope="session")
def installed(shared: Path) -> Environment:
    """An environment with both, built without network."""

    def make(folder: Path) -> str:
        made = Environment.create(folder / "env")
        made.install(ACME, TORCH)
        return str(made.root)

    return Environment(Path(once(shared, "examples-installed", make)))


def rows(environment: Environment, **environ: str) -> dict[str, dict[str, Any]]:
    """Return what `kvdock backends` says of each backend."""
    done = environment.kvdock("backends", "--json", environ=environ)
    return {row["name"]: row for row in json.loads(done.stdout)["backends"]}


def certify(environment: Environment, backend: str, *options: str, **environ: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run core level; returns the exit code, and what came of each requirement."""
    done = environment.kvdock("conformance", "--backend", backend, "--level", "core", "--json", *options, environ=environ)
    assert done.stdout, done.stderr
    return done.returncode, {item["id"]: item for item in json.loads(done.stdout)["requirements"]}


def test_what_acme_declares(installed: Environment) -> None:
    acme = rows(installed)["acme"]
    assert acme["state"] == "ready"
    assert (acme["devices"], acme["priority"]) == (["cpu"], "SPECIALISED")
    assert acme["dtypes"] == ["torch.bfloat16", "torch.float16", "torch.float32"]
    assert acme["native"] == ["paged_caching_"]
    assert acme["portable"] == ["copy_blocks_", "gather_paged", "static_update_"]
    assert acme["notes"] == ["copy engine: firmware 3, simulated in host memory"]


def test_firmware_that_is_too_old_is_unusable(installed: Environment) -> None:
    acme = rows(installed, ACME_FIRMWARE="1")["acme"]
    assert acme["state"] == "unusable"
    assert "Fix: update it to 2 or newer" in acme["reason"]


@pytest.mark.slow  # the whole of core level
def test_acme_is_certified(installed: Environment) -> None:
    code, found = certify(installed, "acme")
    assert code == 0, [item for item in found.values() if item["verdict"] not in ("passed", "unsupported")]
    assert found["KVD-WRITE-022"]["verdict"] == "unsupported", "it declares no quantised dtype"


@pytest.mark.slow  # core level of one op, three times
def test_a_fault_is_found_expected_and_mended(installed: Environment, tmp_path: Path) -> None:
    expected = ("--op", "paged_caching_", "--expected", str(ACME / "expected-firmware-2.toml"))
    report = tmp_path / "report"
    code, found = certify(installed, "acme", "--op", "paged_caching_", "--report", str(report), ACME_FIRMWARE="2")
    assert code == 1
    assert [name for name, item in found.items() if item["verdict"] == "failed"] == ["KVD-WRITE-003"]
    repro = next((report / "failures").rglob("repro.py"))
    broken = run([installed.python, "-P", str(repro)], environ={"ACME_FIRMWARE": "2"})
    assert broken.returncode != 0
    assert "k_cache" in broken.stderr
    run([installed.python, "-P", str(repro)], check=True)  # firmware 3
    code, found = certify(installed, "acme", *expected, ACME_FIRMWARE="2")
    assert (code, found["KVD-WRITE-003"]["verdict"]) == (0, "expected failure")
    code, found = certify(installed, "acme", *expected)
    assert (code, found["KVD-WRITE-003"]["verdict"]) == (1, "failed"), "strict: what is mended leaves the file"


@pytest.mark.slow  # the whole of core level
def test_acmes_own_tests_pass(installed: Environment) -> None:
    code = f"import os, sys; os.chdir({str(ACME)!r}); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    done = run([installed.python, "-c", code, "-m", "pytest", "-q", "-p", "no:cacheprovider"], check=True, timeout=300)
    assert " passed" in done.stdout


def test_torchs_other_devices_take_at_most_60_lines() -> None:
    assert len((TORCH / "kvdock_torch_devices.py").read_text(encoding="utf-8").splitlines()) <= 60


def test_each_type_of_device_is_there_or_says_why_not(installed: Environment) -> None:
    found = {name: row for name, row in rows(installed).items() if name and name.startswith("torch-")}
    assert set(found) == {f"torch-{name}" for name in ("xpu", "mps", "npu", "hpu", "mlu", "musa", "cpu")}
    assert found["torch-cpu"]["state"] == "ready"
    assert found["torch-cpu"]["native"] == []
    assert all(row["state"] in ("ready", "absent") for row in found.values())
    assert all(row["reason"] for row in found.values() if row["state"] == "absent")


@pytest.mark.slow  # the whole of core level
def test_a_device_of_torchs_without_a_plugin_reaches_core_level(installed: Environment) -> None:
    """Torch's CPU stands for it: no kernel of its own, only the portable ones, and another name than the CPU backend's."""
    code, found = certify(installed, "torch-cpu")
    assert code == 0, [item for item in found.values() if item["verdict"] not in ("passed", "unsupported")]
    assert found["KVD-WRITE-001"]["verdict"] == "unsupported", "verified: the portable kernels serve it"
    assert found["KVD-WRITE-001"]["reason"] == "it has no kernel for this op"


@pytest.mark.parametrize("folder", [ACME, TORCH], ids=lambda folder: folder.name)
def test_their_lint_is_clean(folder: Path) -> None:
    run([sys.executable, "-m", "ruff", "check", "--no-cache", str(folder)], check=True)
    run([sys.executable, "-m", "ruff", "format", "--no-cache", "--check", str(folder)], check=True)


def test_the_ci_file_is_the_one_that_new_backend_writes() -> None:
    assert (ACME / ".github" / "workflows" / "conformance.yml").read_text() == NewBackend("acme", "npu").files()[
        ".github/workflows/conformance.yml"
    ]
