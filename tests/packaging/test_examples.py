"""The distributions in `examples/`, installed and certified as a stranger would."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvdock_conformance import requirements
from kvdock_conformance.cases.every_op import OPS
from kvdock_conformance.new_backend import NewBackend
from kvdock_conformance.requirement import Level
from kvdock_conformance.requirements.ops import REQUIREMENTS as OPS_OF_PLUGINS
from support_projects import Environment, once, run, wheels_of
from support_sources import ROOT

ACME = ROOT / "examples" / "acme_backend"
TORCH = ROOT / "examples" / "torch_devices"
ROPE = ROOT / "examples" / "rope_op"
FLASHINFER = ROOT / "examples" / "flashinfer_attention"
VARLEN = ROOT / "examples" / "varlen_attention"
ALL = (ACME, TORCH, ROPE, FLASHINFER, VARLEN)
TRANSPORTS = (ROOT / "examples" / "kvdock_nixl", ROOT / "examples" / "kvdock_mooncake")
"""They have tests of their own, with the wheels of their engines."""


@pytest.fixture(scope="session")
def wheels(shared: Path) -> list[Path]:
    """The wheels of all, built without network."""

    return [Path(path) for path in once(shared, "examples-wheels", lambda folder: [*map(str, wheels_of(ALL, folder))])]


@pytest.fixture(scope="session")
def installed(stranger: Callable[..., Environment], wheels: list[Path]) -> Environment:
    """A new environment with kvdock's wheel and all: nothing of this repository's folder is on its path."""
    return stranger("examples-installed", *wheels)


@pytest.fixture(scope="session")
def told(shared: Path, installed: Environment) -> dict[str, dict[str, Any]]:
    """What commands print as JSON, by their names; each run once for all workers."""

    def ask(_: Path) -> dict[str, Any]:
        lines = {"backends": (), "explain": ("paged_attention",)}
        return {name: json.loads(installed.kvdock(name, *more, "--json").stdout) for name, more in lines.items()}

    answers: dict[str, dict[str, Any]] = once(shared, "examples-told", ask)
    return answers


@pytest.fixture(scope="session")
def rows(told: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What `kvdock backends` says of each backend."""
    return {row["name"]: row for row in told["backends"]["backends"]}


def certify(environment: Environment, folder: Path, backend: str, *options: str, **environ: str) -> dict[str, Any]:
    """Run the kit as anybody does; returns the report, whose exit code is that of the command."""
    command = ("conformance", "--backend", backend, "--report", str(folder), *options)
    done = environment.kvdock(*command, environ=environ, timeout=900)
    report: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert done.returncode == report["exit_code"], done.stdout + done.stderr
    return report


def by_id(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what came of each requirement."""
    return {item["id"]: item for item in report["requirements"]}


def not_green(report: dict[str, Any]) -> list[str]:
    """Return the ids of the requirements that are neither passed nor unsupported."""
    return [item["id"] for item in report["requirements"] if item["verdict"] not in ("passed", "unsupported")]


def assert_conforms(report: dict[str, Any], level: str) -> None:
    """Check that a report is of a whole level, and green: every requirement that there is has a verdict."""
    assert not_green(report) == []
    assert (report["level"], report["op"], report["left_out"], report["complete"], report["exit_code"]) == (level, None, [], True, 0)
    wanted = [item for item in requirements.load() if item.kind == "backend" and (level == "extended" or item.level is Level.CORE)]
    # It has no outputs that are made anew, and nobody knows whether it adds to what is there, or which indices it refuses.
    of_plugins = {item.id for item in OPS_OF_PLUGINS} - {"KVD-OP-018", "KVD-OP-024", "KVD-OP-025"}
    assert set(by_id(report)) == {item.id for item in wanted} | {f"{name}@rope_caching_" for name in of_plugins}


def test_what_acme_declares(rows: dict[str, dict[str, Any]]) -> None:
    acme = rows["acme"]
    assert acme["state"] == "ready"
    assert (acme["devices"], acme["priority"]) == (["cpu"], "SPECIALISED")
    assert acme["dtypes"] == ["torch.bfloat16", "torch.float16", "torch.float32"]
    assert acme["native"] == sorted(OPS), "portable kernels attend"
    assert acme["notes"] == ["copy engine: firmware 3, simulated in host memory"]


@pytest.mark.slow
def test_firmware_that_is_too_old_is_unusable(installed: Environment) -> None:
    listed = json.loads(installed.kvdock("backends", "--json", environ={"ACME_FIRMWARE": "1"}).stdout)["backends"]
    (acme,) = [row for row in listed if row["name"] == "acme"]
    assert acme["state"] == "unusable"
    assert "Fix: update it to 2 or newer" in acme["reason"]


UNCLAIMED = (
    "acme stores torch.bfloat16",
    "lists one device",
    "no streams there",
    "set_sync_debug_mode",
    "does not claim graph_capture",
    "does not claim batch_invariant",
    "the copy engine moves whole multiples of 4 bytes",
)
"""Why a requirement is unsupported. All others are checked on Acme's own kernels."""


@pytest.mark.slow  # the whole of extended level
def test_acme_is_certified(installed: Environment, tmp_path: Path) -> None:
    report = certify(installed, tmp_path, "acme", "--level", "extended")  # whose requirements are those of core level, and more
    assert_conforms(report, "extended")
    assert report["about"]["class"] == "kvdock_acme.backend.AcmeBackend"
    others = [item for item in report["requirements"] if item["area"] not in OPS and "it has no kernel for this op" in item["reason"]]
    unsupported = {item["id"]: item["reason"] for item in report["requirements"] if item["verdict"] == "unsupported" and item not in others}
    assert {name: reason for name, reason in unsupported.items() if not any(text in reason for text in UNCLAIMED)} == {}
    assert "KVD-WRITE-022" in unsupported, "it declares no quantised dtype"
    passed = Counter(item["area"] for item in report["requirements"] if item["verdict"] == "passed")
    assert all(passed[op] > 15 for op in OPS), passed
    assert (tmp_path / "junit.xml").is_file()


PADDING = ["KVD-WRITE-003", "KVD-WRITE-006", "KVD-WRITE-025"]
"""What notices, among what is asked of the op, that firmware 2 writes padding."""


@pytest.mark.slow  # core level of one op, twice
def test_a_fault_is_found_expected_and_mended(installed: Environment, tmp_path: Path) -> None:
    only, expected = ("--op", "paged_caching_"), ("--expected", str(ACME / "expected-firmware-2.toml"))
    report = certify(installed, tmp_path / "found", "acme", *only, ACME_FIRMWARE="2")
    assert (report["exit_code"], not_green(report)) == (1, PADDING)
    repro = tmp_path / "found" / "failures" / "KVD-WRITE-003" / "repro.py"
    broken = run([installed.python, "-P", str(repro)], environ={"ACME_FIRMWARE": "2", "PYTHONPATH": ""})
    assert broken.returncode != 0
    assert "k_cache" in broken.stderr
    run([installed.python, "-P", str(repro)], environ={"PYTHONPATH": ""}, check=True)  # firmware 3
    report = certify(installed, tmp_path / "mended", "acme", *only, *expected)
    assert (report["exit_code"], by_id(report)["KVD-WRITE-003"]["verdict"]) == (1, "failed"), "strict: what is mended leaves the file"


@pytest.mark.slow  # the whole of core level
def test_old_firmware_conforms_but_for_what_its_file_says(installed: Environment, tmp_path: Path) -> None:
    report = certify(installed, tmp_path, "acme", "--expected", str(ACME / "expected-firmware-2.toml"), ACME_FIRMWARE="2")
    noticed = [*PADDING, "KVD-DESC-013", "KVD-DESC-015", "KVD-READ-001", "KVD-READ-003", "KVD-THREAD-002", "KVD-FUZZ-001"]
    assert (report["exit_code"], report["complete"], not_green(report)) == (0, True, noticed)
    entry = by_id(report)["KVD-WRITE-003"]
    assert entry["verdict"] == "expected failure"
    assert "firmware 3 fixes it" in entry["reason"]


@pytest.mark.slow  # the whole of core level
def test_acmes_own_tests_pass(installed: Environment, tmp_path: Path) -> None:
    """In a copy of its folder, without its sources: what is tested is the wheel."""
    for name in ("tests", "pyproject.toml", "expected-firmware-2.toml"):
        (tmp_path / name).symlink_to(ACME / name)
    done = installed.typed("pytest -q", tmp_path)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d{3} passed, 3 xfailed", done.stdout), done.stdout


@pytest.mark.slow  # mypy reads all of torch
def test_acmes_types_are_clean(installed: Environment, tmp_path: Path) -> None:
    done = installed.typed(f"mypy --cache-dir {tmp_path}", ACME)
    assert "Success" in done.stdout, done.stdout + done.stderr


def test_torchs_other_devices_take_at_most_60_lines() -> None:
    assert len((TORCH / "kvdock_torch_devices.py").read_text(encoding="utf-8").splitlines()) <= 60


def test_each_type_of_device_is_there_or_says_why_not(rows: dict[str, dict[str, Any]]) -> None:
    found = {name: row for name, row in rows.items() if name and name.startswith("torch-")}
    assert set(found) == {f"torch-{name}" for name in ("xpu", "mps", "npu", "hpu", "mlu", "musa", "cpu")}
    assert found["torch-cpu"]["state"] == "ready"
    assert found["torch-cpu"]["native"] == []
    assert all(row["state"] in ("ready", "absent") for row in found.values())
    assert all(row["reason"] for row in found.values() if row["state"] == "absent")


@pytest.mark.slow  # the whole of core level
def test_a_device_of_torchs_without_a_plugin_reaches_core_level(installed: Environment, tmp_path: Path) -> None:
    """Torch's CPU stands for it: no kernel of its own, only the portable ones, and another name than the CPU backend's."""
    report = certify(installed, tmp_path, "torch-cpu", "--level", "core")
    assert_conforms(report, "core")
    assert (report["about"]["class"], report["about"]["ops"]) == ("kvdock_torch_devices.TorchDevice", [])
    found = by_id(report)
    assert found["KVD-WRITE-001"]["verdict"] == "unsupported", "verified: the portable kernels serve it"
    assert found["KVD-WRITE-001"]["reason"] == "it has no kernel for this op"


@pytest.mark.parametrize("folder", [*ALL, *TRANSPORTS], ids=lambda folder: folder.name)
def test_their_lint_is_clean(folder: Path) -> None:
    run([sys.executable, "-m", "ruff", "check", "--no-cache", str(folder)], check=True)
    run([sys.executable, "-m", "ruff", "format", "--no-cache", "--check", str(folder)], check=True)


def test_the_ci_file_is_the_one_that_new_backend_writes() -> None:
    assert (ACME / ".github" / "workflows" / "conformance.yml").read_text() == NewBackend("acme", "npu").files()[
        ".github/workflows/conformance.yml"
    ]


@pytest.mark.slow
def test_the_op_of_a_plugin_works_as_a_stranger_has_it(installed: Environment, tmp_path: Path) -> None:
    (tmp_path / "tests").symlink_to(ROPE / "tests")
    (tmp_path / "pyproject.toml").symlink_to(ROPE / "pyproject.toml")
    done = installed.typed("pytest -q", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout)


@pytest.mark.slow
def test_the_op_of_a_plugin_is_explained_by_the_command(installed: Environment) -> None:
    done = installed.kvdock("explain", "rope_caching_", "--dtype", "float32", "--head-dim", "2", "--run", "3", "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["served_by"], told["kernel"]) == (0, "portable", "kvdock_rope.portable.RopeCaching")
    assert told["run"]["calls"] == 3
    assert "rope_caching_" in installed.kvdock("explain", "no_such_op").stderr


def test_the_op_of_a_plugin_is_listed_with_who_serves_it(told: dict[str, dict[str, Any]]) -> None:
    (op,) = told["backends"]["ops"]
    assert (op["op"], op["plugin"], op["distribution"], op["native"]) == ("rope_caching_", "rope", "kvdock-rope", [])
    assert {"acme", "cpu", "torch-cpu"} <= set(op["portable"])


@pytest.mark.slow  # each fault with all that the op is asked
def test_faults_in_the_op_of_a_plugin_are_noticed(installed: Environment, tmp_path: Path) -> None:
    """Seeded into the installed plugin's portable kernel: wrong rows, padding, bounds, inputs, plans, first sizes and more."""
    report = certify(installed, tmp_path, "cpu", "--op", "rope_caching_", "--prove")
    assert (report["exit_code"], not_green(report)) == (0, [])
    assert {proof["fault"]: proof["verdict"] for proof in report["proofs"] if proof["verdict"] != "killed"} == {}
    seeded = {proof["fault"].partition("@")[0] for proof in report["proofs"]}
    assert {"op-row-behind", "op-padding-written", "op-byte-past-the-end", "op-input-changed", "op-plan-per-count"} <= seeded
    assert {"op-first-sizes-kept", "op-first-values-kept"} <= seeded


ATTENTION = pytest.mark.parametrize(("name", "folder"), [("flashinfer", FLASHINFER), ("varlen", VARLEN)], ids=["flashinfer", "varlen"])
NO_CUDA = pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built with CUDA: their own tests say what is so there")


@NO_CUDA
@pytest.mark.parametrize("name", ["flashinfer", "varlen"])
def test_attention_of_others_is_absent_without_a_gpu_and_says_so(
    name: str, told: dict[str, dict[str, Any]], rows: dict[str, dict[str, Any]]
) -> None:
    reason = f"torch {torch.__version__} is built without CUDA"
    assert (rows[name]["state"], rows[name]["reason"]) == ("absent", reason)
    explained = told["explain"]
    assert (explained["op"], explained["served_by"]) == ("paged_attention", "cpu")
    (other,) = [item for item in explained["candidates"] if item["name"] == name]
    assert other["reason"] == f"ABSENT: {reason}"


@NO_CUDA
@pytest.mark.slow  # the kit's items are looked at, and skipped
@ATTENTION
def test_own_tests_of_attention_of_others_pass_and_say_what_they_skip(
    name: str, folder: Path, installed: Environment, tmp_path: Path
) -> None:
    for path in folder.iterdir():
        if path.name != "src":  # what is tested is the wheel
            (tmp_path / path.name).symlink_to(path)
    done = installed.typed("pytest -q -rs", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed, \d+ skipped", done.stdout), done.stdout
    assert f"backend '{name}': ABSENT: torch {torch.__version__} is built without CUDA" in done.stdout, done.stdout


@pytest.mark.slow  # mypy reads all of torch
@ATTENTION
def test_types_of_attention_of_others_are_clean(name: str, folder: Path, installed: Environment, tmp_path: Path) -> None:
    done = installed.typed(f"mypy --cache-dir {tmp_path}", folder)
    assert "Success" in done.stdout, done.stdout + done.stderr
